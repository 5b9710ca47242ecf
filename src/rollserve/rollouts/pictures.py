"""Tasks with pictures, and policies that take none: told before anything is started."""

from __future__ import annotations

from rollserve.gateway.images import takes_none
from rollserve.records.policy import PolicySpec, takes_images
from rollserve.records.task import Task
from rollserve.rollouts.pages import every
from rollserve.store.base import Store


class Sight:
    """Whether a policy takes pictures: one for all the tasks that are checked together, read from the store
    at the first of them that has any."""

    def __init__(self, policy: str, store: Store) -> None:
        self._policy = policy
        self._store = store
        self._seen: tuple[PolicySpec, bool] | None = None

    async def check(self, task: Task, field: str) -> None:
        """Raises ``InvalidInput`` that names the policy, at ``<field>.pictures``. A backend that is
        registered later may change it: the attempt fails then."""
        if not task.pictures:
            return
        if self._seen is None:
            self._seen = await self._look()
        spec, sees = self._seen
        if not sees:
            raise takes_none(spec, f"{field}.pictures" if field else "pictures")

    async def _look(self) -> tuple[PolicySpec, bool]:
        spec = (await self._store.get_policy(self._policy)).spec
        backends = await every(lambda **page: self._store.list_backends(self._policy, **page))
        return spec, takes_images(spec, backends)

"""Tasks with pictures, and policies that take none: told before anything is started."""

from __future__ import annotations

from rollserve.gateway.images import takes_none
from rollserve.records.policy import takes_images
from rollserve.records.task import Task
from rollserve.rollouts.pages import every
from rollserve.store.base import Store


async def check_pictures(task: Task, policy: str, store: Store, field: str) -> None:
    """Raises ``InvalidInput`` that names the policy, at ``<field>.pictures``. A backend that is registered
    later may change it: the attempt fails then."""
    if not task.pictures:
        return
    spec = (await store.get_policy(policy)).spec
    backends = await every(lambda **page: store.list_backends(policy, **page))
    if not takes_images(spec, backends):
        raise takes_none(spec, f"{field}.pictures" if field else "pictures")

"""What every ``Store`` does about updates of a policy's weights (part of ``store_conformance``)."""

from __future__ import annotations

from typing import Any

import pytest

from rollserve.errors import Conflict, LeaseLost, StaleEpoch, VersionRegression
from rollserve.records.update import Canary, UpdateMode, UpdateState, WeightUpdate
from rollserve.store.base import Store
from rollserve.testing.store_facts import NOW, NeedsStore, make_policy


def make_update(update_id: str, **changes: Any) -> WeightUpdate:
    update = WeightUpdate(
        id=update_id,
        policy="pol",
        mode=UpdateMode.KEEP,
        lease_s=60,
        begun_at=NOW,
        expires_at=NOW + 60,
        from_version=0,
        weights=0,
        backends=["be"],
    )
    return update.model_copy(update=changes)


class Updating(NeedsStore):
    async def test_policy_update(self, store: Store) -> None:
        await store.create_policy(make_policy())
        update = make_update("up1")
        assert (await store.set_policy_update("pol", update)).update == update
        with pytest.raises(Conflict):
            await store.set_policy_update("pol", make_update("up2"))
        with pytest.raises(Conflict):
            await store.set_policy_version("pol", 7, "seven")
        ready = update.model_copy(update={"state": UpdateState.READY})
        assert (await store.set_policy_update("pol", ready)).update == ready
        done = ready.model_copy(update={"state": UpdateState.COMMITTED, "version": 4, "label": "four"})
        canary = Canary(version=4, verdict="unverified", scores={"be": [-1.0, -2.5]})
        policy = await store.commit_policy_update("pol", done, canary)
        assert (policy.version, policy.labels, policy.weights) == (4, {"four": 4}, 1)
        assert policy == await store.get_policy("pol")
        assert (policy.update, policy.canary) == (done, canary)
        for again in (store.commit_policy_update("pol", done, None), store.set_policy_update("pol", ready)):
            with pytest.raises(LeaseLost):
                await again
        assert (await store.set_policy_version("pol", 5, "five")).weights == 2
        assert (await store.set_policy_version("pol", 5, "five")).weights == 2

    async def test_policy_update_is_fenced(self, store: Store) -> None:
        await store.create_policy(make_policy())
        await store.set_policy_version("pol", 3, "three")
        await store.set_policy_update("pol", make_update("up1", weights=0))
        late = make_update("up1", weights=0, version=9, label="nine", state=UpdateState.COMMITTED)
        with pytest.raises(StaleEpoch):
            await store.commit_policy_update("pol", late, None)
        await store.set_policy_update("pol", make_update("up1", state=UpdateState.ABORTED))
        await store.set_policy_update("pol", make_update("up2", weights=1))
        old = make_update("up2", weights=1, version=2, label="two", state=UpdateState.COMMITTED)
        with pytest.raises(VersionRegression):
            await store.commit_policy_update("pol", old, None)
        other = make_update("up2", weights=1, version=5, label="three", state=UpdateState.COMMITTED)
        with pytest.raises(Conflict):
            await store.commit_policy_update("pol", other, None)
        assert (await store.get_policy("pol")).version == 3

"""What an attempt had recorded whose worker is gone."""

from __future__ import annotations

from rollserve.errors import RollserveError
from rollserve.store.payload import PayloadStore, SealedPayload


def sampled_in(payload: SealedPayload | None) -> int:
    """Tokens; none are known of one that can't be read back."""
    return 0 if payload is None else payload.counts.get("sampled_tokens", 0)


async def salvaged(payloads: PayloadStore, run_id: str, attempt_id: str) -> SealedPayload | None:
    """Sealed, and counted: its worker can't tell any more what it sampled. Raises what ``salvage``
    raises; one that can't be read back is kept without counts."""
    payload = await payloads.salvage(run_id, attempt_id)
    if payload is None:
        return None
    try:
        calls = (await payloads.read(payload.ref)).calls
    except (RollserveError, OSError):
        return payload
    sampled = sum(len(call.sampled_ids) // 4 for call in calls)
    return SealedPayload(
        ref=payload.ref,
        size_bytes=payload.size_bytes,
        counts={"turns": len(calls), "sampled_tokens": sampled},
    )

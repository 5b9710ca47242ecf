"""Looking at an inference server, once."""

from __future__ import annotations

import asyncio

from rollserve.backend.registry import list_models, make_backend
from rollserve.errors import InvalidInput, RollserveError
from rollserve.records.policy import BackendInfo, BackendKind, BackendSpec

LOOK_WITHIN_S = 30.0


async def probe(spec: BackendSpec, model: str) -> BackendInfo:
    """What the backend at ``spec.url`` is. Raises ``InvalidInput`` when it is none, or serves others."""
    backend = make_backend(spec, model)
    try:
        return await backend.probe()
    finally:
        await backend.close()


async def identify(url: str) -> BackendInfo:
    """Of a server whose kind and model nobody has named: the first kind that fits, with its first model.
    Raises ``InvalidInput`` with what each kind missed."""
    models = await list_models(BackendSpec(url=url))
    if not models:
        raise InvalidInput(f"{url} serves no model", field="url")
    complaints = []
    for kind in (BackendKind.VLLM, BackendKind.OPENAI):
        try:
            async with asyncio.timeout(LOOK_WITHIN_S):
                return await probe(BackendSpec(url=url, kind=kind), models[0])
        except (RollserveError, TimeoutError) as error:
            complaints.append(f"{kind.value}: {error or 'no answer in time'}")
    raise InvalidInput("; ".join(complaints), field="url")

"""Looking at an inference server, or at a policy's chat template, once."""

from __future__ import annotations

import asyncio
import sys

from rollserve.backend.registry import list_models, make_backend
from rollserve.errors import InvalidInput, RollserveError
from rollserve.records.policy import (
    BackendInfo,
    BackendKind,
    BackendSpec,
    PolicySpec,
    TemplateFinding,
    TemplateReport,
)

LOOK_WITHIN_S = 30.0

TEMPLATE_WITHIN_S = 180.0
"""For the import of a renderer, a large tokenizer from a hub, and the probe itself."""

_SHOWN_CHARS = 500


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
    for kind in (BackendKind.VLLM, BackendKind.SGLANG, BackendKind.OPENAI):
        try:
            async with asyncio.timeout(LOOK_WITHIN_S):
                return await probe(BackendSpec(url=url, kind=kind), models[0])
        except (RollserveError, TimeoutError) as error:
            complaints.append(f"{kind.value}: {error or 'no answer in time'}")
    raise InvalidInput("; ".join(complaints), field="url")


async def probe_template(spec: PolicySpec) -> TemplateFinding:
    """In a process of its own, ended within ``TEMPLATE_WITHIN_S`` or when this is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollserve.gateway.template_probe"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TEMPLATE_WITHIN_S):
            found, said = await process.communicate(spec.model_dump_json().encode())
    except TimeoutError:
        return _unknown(f"the probe did not end within {TEMPLATE_WITHIN_S:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        words = said.decode(errors="replace").strip().splitlines()
        return _unknown(words[-1][:_SHOWN_CHARS] if words else f"exit code {process.returncode}")
    return TemplateFinding.model_validate_json(found)


def _unknown(why: str) -> TemplateFinding:
    report = TemplateReport(verdict="unknown", detail=why)
    return TemplateFinding(keep=report, strip=report)

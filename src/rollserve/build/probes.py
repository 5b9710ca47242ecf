"""Looking at an inference server, or at a policy's tokenizer and chat template, once."""

from __future__ import annotations

import asyncio
import json
import sys

from rollserve.addresses import checked_root
from rollserve.backend.registry import list_models, make_backend
from rollserve.errors import InvalidInput, RollserveError
from rollserve.gateway.tokenizer_files import TINY
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

TOKENIZER_WITHIN_S = 45.0
"""For a tokenizer's download and its loading: well within what clients wait for an answer."""

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
    url = checked_root(url)
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


async def check_tokenizer(name: str, *, within_s: float = TOKENIZER_WITHIN_S) -> None:
    """Raises ``InvalidInput`` (field ``tokenizer``) when it can't be loaded here in time."""
    if name == TINY:
        return
    try:
        code, found, said = await _apart("tokenizer_check", name, within_s)
    except TimeoutError:
        raise InvalidInput(
            f"the tokenizer {name!r} could not be loaded within {within_s:g} s",
            field="tokenizer",
            hint="download it first, and give its folder",
        ) from None
    if code == 1 and found:
        problem = json.loads(found)
        raise InvalidInput(problem["message"], field="tokenizer", hint=problem["hint"])
    if code:
        raise InvalidInput(f"loading {name!r} failed: {_last_words(said, code)}", field="tokenizer")


async def probe_template(spec: PolicySpec) -> TemplateFinding:
    """Never raises for what the template is like; ended within ``TEMPLATE_WITHIN_S``."""
    try:
        code, found, said = await _apart("template_probe", spec.model_dump_json(), TEMPLATE_WITHIN_S)
    except TimeoutError:
        return _unknown(f"the probe did not end within {TEMPLATE_WITHIN_S:g} s")
    if code:
        return _unknown(_last_words(said, code))
    return TemplateFinding.model_validate_json(found)


async def _apart(module: str, asked: str, within_s: float) -> tuple[int, bytes, bytes]:
    """A module of the gateway in a process of its own: exit code, output, complaints. It is ended when
    this is cancelled or takes too long (``TimeoutError``)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"rollserve.gateway.{module}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(within_s):
            found, said = await process.communicate(asked.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, found, said


def _last_words(said: bytes, code: int) -> str:
    words = said.decode(errors="replace").strip().splitlines()
    return words[-1][:_SHOWN_CHARS] if words else f"exit code {code}"


def _unknown(why: str) -> TemplateFinding:
    report = TemplateReport(verdict="unknown", detail=why)
    return TemplateFinding(keep=report, strip=report)

"""How new weights reach an inference server. One small class an engine; a trainer gets one by URL.

The service pauses the server before, and labels it, empties its caches and resumes it after
(``client.Client.updating``): nothing of that is done here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import torch
from safetensors.torch import save_file

from rollserve.errors import BackendError


class WeightSync(Protocol):
    async def push(self, state: Mapping[str, torch.Tensor], version: int) -> float:
        """Bring ``state`` to the server, which is paused for it; returns the seconds it took. Raises
        ``BackendError``."""


def _name(version: int) -> str:
    return f"weights-{version:06d}.safetensors"


def _save(state: Mapping[str, torch.Tensor], folder: Path, version: int) -> Path:
    """Write the weights; the file before is kept, since a server may still be reading it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.absolute() / _name(version)
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}, path)
    kept = {path, folder.absolute() / _name(version - 1)}
    for other in folder.absolute().glob("weights-*.safetensors"):
        if other not in kept:
            other.unlink(missing_ok=True)
    return path


class _Server:
    """POSTs to an engine's control routes."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    async def post(self, session: aiohttp.ClientSession, path: str, body: Any = None) -> None:
        try:
            async with session.post(self._url + path, json=body) as answer:
                if answer.status >= 400:
                    text = (await answer.text())[:500]
                    raise BackendError(f"{path} answered {answer.status}: {text}", operation="weights.push")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BackendError(f"{path} failed: {error}", operation="weights.push") from error


class LocalWeights(_Server):
    """``rollserve.localserver``: one call, in place, between two decode steps."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url)
        self._folder = folder

    async def push(self, state: Mapping[str, torch.Tensor], version: int) -> float:
        started = time.perf_counter()
        path = _save(state, self._folder, version)
        body = {"model_path": str(path), "weight_version": str(version), "mode": "keep"}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            await self.post(session, "/update_weights_from_disk", body)
        return time.perf_counter() - started


class VllmWeights(_Server):
    """vLLM 0.32 through its RL protocol with the ``file`` weight-transfer engine that
    ``rollserve.trainers.vllm_file_engine`` registers."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url)
        self._folder = folder
        self._initialised = False

    async def push(self, state: Mapping[str, torch.Tensor], version: int) -> float:
        started = time.perf_counter()
        path = _save(state, self._folder, version)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            if not self._initialised:
                await self.post(session, "/init_weight_transfer_engine", {"init_info": {}})
                self._initialised = True
            await self.post(session, "/start_weight_update", {})
            await self.post(session, "/update_weights", {"update_info": {"path": str(path)}})
            await self.post(session, "/finish_weight_update", {"weight_version": str(version)})
        return time.perf_counter() - started

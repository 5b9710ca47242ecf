"""A weight-transfer engine for vLLM 0.32 that reads a safetensors file: the official update protocol on
machines without GPU transports. Loaded by vLLM itself through the entry point ``vllm.general_plugins``;
nothing of rollserve imports it.

``update_info`` is ``{"path": …}``. A model with tied embeddings on the CPU needs its output layer
packed again after a load: vLLM 0.32 keeps the old one otherwise, silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NAME = "rollserve_file"


def register() -> None:
    """The plugin hook. Plugins may be loaded more than once in one process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, _engine_class())


def _engine_class() -> type[Any]:
    """The engine; made here because its base class exists in vLLM's process only."""
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class FileInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not in this environment
        pass

    @dataclass
    class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not in this environment
        path: str

    class FileEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not in this environment
        init_info_cls = FileInit
        update_info_cls = FileUpdate

        def init_transfer_engine(self, init_info: FileInit) -> None:
            """There is no connection to make."""

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Without the device synchronisation of the base class, which a CPU does not have."""
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: FileUpdate) -> None:
            self.model.load_weights(list(load_file(update_info.path).items()))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
            if tied and self.device.type == "cpu":
                dispatch_cpu_unquantized_gemm(self.model.lm_head, remove_weight=False)

        def shutdown(self) -> None:
            """There is no connection to close."""

    return FileEngine

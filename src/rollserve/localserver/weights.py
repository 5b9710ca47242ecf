"""Checkpoint files: read and check them whole before a single weight is touched, then copy in place."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rollserve.errors import InvalidInput

_FIELD = "model_path"


def read_checkpoint(path: str) -> dict[str, torch.Tensor]:
    """Tensors of a ``.safetensors`` file, or of all such files in a directory."""
    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files or not all(file.is_file() for file in files):
        raise InvalidInput(f"{path} is neither a .safetensors file nor a directory with some", field=_FIELD)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise InvalidInput(f"{file} can't be read: {error}", field=_FIELD) from None
    return tensors


def check_checkpoint(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Raise ``InvalidInput`` naming the first tensor that does not fit the model."""
    wanted = module.state_dict()
    for name, tensor in tensors.items():
        if name not in wanted:
            raise InvalidInput(f"tensor {name!r} is not in the model", field=_FIELD)
        if tensor.shape != wanted[name].shape:
            shapes = f"{list(tensor.shape)}, the model's {list(wanted[name].shape)}"
            raise InvalidInput(f"tensor {name!r} has shape {shapes}", field=_FIELD)
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidInput(f"tensor {name!r} holds values that are not finite numbers", field=_FIELD)
    given = {wanted[name].data_ptr() for name in tensors}
    for name, tensor in wanted.items():
        # a tied tensor needs to come under one of its names only
        if tensor.data_ptr() not in given:
            raise InvalidInput(f"tensor {name!r} is missing from the checkpoint", field=_FIELD)


def load_weights(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Copy checked tensors into the model, in place, converting to its dtype and device."""
    wanted = module.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            wanted[name].copy_(tensor)

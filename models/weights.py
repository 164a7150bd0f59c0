"""Reads a checkpoint's tensors by name. A tensor that nobody asks for, or that is missing, is an error that names it."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ConfigError, UnsupportedModel
from models.spec import read_json

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


class Checkpoint:
    """The safetensors files of a folder, single or sharded. `close` checks that everything was used."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._files = {path: _open(path) for path in _files(folder)}
        self._where = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118
        self._unused = set(self._where)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """In `dtype`, or the model's. Raises UnsupportedModel when it is missing or has another shape."""
        if name not in self._where:
            raise UnsupportedModel(f"the checkpoint in {self._folder} lacks the tensor {name!r}")
        tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(f"tensor {name!r} is {tuple(tensor.shape)}; config.json says {shape}")
        self._unused.discard(name)
        return tensor.to(self._device, dtype or self._dtype)

    def ignore(self, name: str) -> None:
        self._unused.discard(name)

    def close(self) -> None:
        """Raises UnsupportedModel when a tensor was left over."""
        left = sorted(name for name in self._unused if not name.endswith(_IGNORED_SUFFIXES))
        self._files.clear()
        self._where.clear()
        if left:
            raise UnsupportedModel(
                f"no rule says what to do with {len(left)} tensors of the checkpoint, e.g. {left[0]!r}"
            )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error} (an incomplete download?)") from None


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not (folder / name).exists():
            raise ConfigError(f"{folder} has no {name}: the model's weights are missing (safetensors only)")
    return [folder / name for name in names]

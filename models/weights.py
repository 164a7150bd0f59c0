"""Reads a checkpoint's tensors by name, and of each only what this rank holds.

A tensor that nobody asks for, or that is missing, is an error that names it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ConfigError, UnsupportedModel
from models.quantised import from_fp8_blocks
from models.spec import read_json

Cut = Sequence[Sequence[slice]]
"""For each dimension of a tensor the runs that a rank holds, joined in this order. All have a start and a stop, and no step."""
Shard = Callable[[str, tuple[int, ...]], Cut]
"""(name in the checkpoint, full shape) -> what this rank holds of it."""
_SCALES = "_scale_inv"
_STORED = {
    torch.float32: ("F32", "F16", "BF16", "F64"),
    torch.bfloat16: ("F32", "F16", "BF16", "F64"),
    torch.uint8: ("U8",),
}
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def whole(name: str, shape: tuple[int, ...]) -> Cut:
    """The `Shard` of a rank that holds everything."""
    del name
    return [[slice(0, size)] for size in shape]


class Checkpoint:
    """The safetensors files of a folder, single or sharded. `close` checks that everything was used."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = whole,
        fp8_block: tuple[int, int] | None = None,
    ) -> None:
        """`fp8_block`: rows and columns that share a scale in matrices that are stored as FP8."""
        self._folder, self.dtype, self._device, self._shard = folder, dtype, device, shard
        self._fp8_block = fp8_block
        self._files = {path: _open(path) for path in _files(folder)}
        self._where = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118
        self._unused = set(self._where)
        self.bytes_read = 0
        """Of tensors, as they lie in the files."""

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """This rank's part of the tensor, in `dtype` or the model's; `shape` is the whole tensor's.

        Raises UnsupportedModel when it is missing or has another shape."""
        if name not in self._where:
            raise UnsupportedModel(f"the checkpoint in {self._folder} lacks the tensor {name!r}")
        stored = self._where[name].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise UnsupportedModel(
                f"tensor {name!r} is {tuple(stored.get_shape())}; config.json says {shape}"
            )
        wanted, cut = dtype or self.dtype, self._shard(name, shape)
        tensor = _read(stored, cut)
        self.bytes_read += tensor.nbytes
        self._unused.discard(name)
        if stored.get_dtype() == "F8_E4M3" and self._fp8_block is not None:
            tensor = from_fp8_blocks(tensor, self._scales(name, shape), cut, self._fp8_block)
        elif stored.get_dtype() not in _STORED[wanted]:
            raise UnsupportedModel(
                f"tensor {name!r} is stored as {stored.get_dtype()}, which is not supported"
            )
        return tensor.to(self._device, wanted)

    def _scales(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self._fp8_block is not None
        if len(shape) != 2:
            raise UnsupportedModel(f"tensor {name!r} is FP8 and no matrix, which is not supported")
        if f"{name}{_SCALES}" not in self._where:
            raise UnsupportedModel(f"the checkpoint in {self._folder} lacks the tensor {name + _SCALES!r}")
        blocks = tuple(-(-size // block) for size, block in zip(shape, self._fp8_block, strict=True))
        scales = self._where[f"{name}{_SCALES}"].get_tensor(f"{name}{_SCALES}")
        if tuple(scales.shape) != blocks:
            raise UnsupportedModel(f"tensor {name + _SCALES!r} is {tuple(scales.shape)}; it must be {blocks}")
        self.bytes_read += scales.nbytes
        self._unused.discard(f"{name}{_SCALES}")
        return scales

    def held(self, name: str, count: int) -> list[int]:
        """Which of `count` things that have tensors of their own this rank holds: asked of the `Shard` as rows of one tensor
        `name`, which need not exist."""
        return [row for run in self._shard(name, (count,))[0] for row in range(run.start, run.stop)]

    def ignore(self, *names: str) -> None:
        """These tensors are not this model's, or not this rank's."""
        self._unused.difference_update(names, (f"{name}{_SCALES}" for name in names))

    def ignore_under(self, *prefixes: str) -> None:
        self._unused = {name for name in self._unused if not name.startswith(prefixes)}

    def close(self) -> None:
        """Raises UnsupportedModel when a tensor was left over."""
        left = sorted(name for name in self._unused if not name.endswith(_IGNORED_SUFFIXES))
        self._files.clear()
        self._where.clear()
        if left:
            raise UnsupportedModel(
                f"no rule says what to do with {len(left)} tensors of the checkpoint, e.g. {left[0]!r}"
            )


def _read(stored: Any, cut: Cut, chosen: tuple[slice, ...] = ()) -> Tensor:
    """`stored` is safetensors' slice: indexing it reads just those bytes."""
    if len(chosen) == len(cut):
        return stored[chosen]
    parts = [_read(stored, cut, (*chosen, run)) for run in cut[len(chosen)]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, len(chosen))


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

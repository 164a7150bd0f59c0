"""Tensors of a GGUF file under the names that safetensors checkpoints have, floats or as they are stored."""

import mmap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import Int8Groups, Kind, Weight
from kernels.packing import from_nibbles
from models.files.gguf_reader import IN_16_BITS, ROPE_FACTORS, field, library, open_gguf

BLOCK: Final = 32
"""Neighbouring inputs of Q8_0 and Q4_0 that share a scale."""
BLOCKS: Final = ("Q8_0", "Q4_0")
"""Types whose products need not be those of floats."""
_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """It is asked as safetensors' files are."""

    def __init__(self, path: Path) -> None:
        self._reader = open_gguf(path)
        named = {_name(tensor.name): tensor for tensor in self._reader.tensors if tensor.name != ROPE_FACTORS}
        self._tensors = named

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> "GgufTensor":
        return GgufTensor(self._tensors[name], self._order(name))

    def get_tensor(self, name: str) -> Tensor:
        stored = self.get_slice(name)
        return stored[tuple(slice(0, size) for size in stored.get_shape())]

    def give_back(self) -> None:
        """Give the system what this process has of the file in its memory. What was read is copied, and what is read again comes
        again."""
        mapped = self._reader.data.base
        if isinstance(mapped, mmap.mmap):
            mapped.madvise(mmap.MADV_DONTNEED)

    def _order(self, name: str) -> np.ndarray | None:
        """Return in which row of the file each row is. Llama's rows of queries and keys are in the order of rotated pairs."""
        if field(self._reader, "general.architecture") != "llama":
            return None
        heads = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(name.rsplit(".", 2)[-2])
        if heads is None:
            return None
        rows = int(self._tensors[name].shape[-1])
        count = field(
            self._reader, f"llama.attention.{heads}", field(self._reader, "llama.attention.head_count")
        )
        return np.arange(rows).reshape(int(count), -1, 2).swapaxes(1, 2).ravel()


class GgufTensor:
    """One tensor, of which indexing reads a part, as float32."""

    def __init__(self, tensor: Any, order: np.ndarray | None) -> None:
        self._tensor, self._order = tensor, order

    @property
    def type(self) -> str:
        return self._tensor.tensor_type.name

    def get_shape(self) -> list[int]:
        return [int(size) for size in reversed(self._tensor.shape)]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        floats = library().dequantize(self._rows(part[0]), self._tensor.tensor_type)
        return torch.from_numpy(np.array(floats[(slice(None), *part[1:])], np.float32))

    def packed(self, rows: Sequence[slice], blocks: Sequence[slice], keeps: frozenset[Kind]) -> Weight | None:
        """Return these rows and these blocks of 32 columns as they are stored; None where that is not among `keeps`."""
        if self.type == "Q8_0" and "int8_groups" in keeps:
            scales, numbers = self._blocks(rows, blocks)
            values = torch.from_numpy(numbers.view(np.int8).reshape(len(numbers), -1))
            return Int8Groups(values=values, scales=scales, zeros=None, group=BLOCK)
        if self.type == "Q4_0" and "four_bit" in keeps:
            scales, pairs = self._blocks(rows, blocks)
            nibbles = np.concatenate((pairs & 15, pairs >> 4), -1).reshape(len(pairs), -1)
            return from_nibbles(torch.from_numpy(nibbles).T, scales.T, BLOCK)
        return None

    def becomes_16_bits(self) -> bool:
        return self.type in IN_16_BITS

    def _blocks(self, rows: Sequence[slice], blocks: Sequence[slice]) -> tuple[Tensor, np.ndarray]:
        """Return scales (N, K / 32) float16, and what follows each in its block: (N, K / 32, bytes)."""
        own = np.concatenate([self._rows(run) for run in rows])
        split = own.reshape(len(own), self.get_shape()[1] // BLOCK, -1)
        split = np.concatenate([split[:, run] for run in blocks], 1)
        scales = np.ascontiguousarray(split[..., :2]).view(np.float16)[..., 0]
        return torch.from_numpy(scales.copy()), np.ascontiguousarray(split[..., 2:])

    def _rows(self, run: slice) -> np.ndarray:
        return self._tensor.data[run if self._order is None else self._order[run]]


@cache
def _name(name: str) -> str:
    """Raises UnsupportedModel."""
    stem, _, what = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{what}"
    elif stem in _NAMES:
        return f"{_NAMES[stem]}.{what}"
    raise UnsupportedModel(f"the GGUF file has a tensor {name!r}, which is not supported")

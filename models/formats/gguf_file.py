"""Tensors of a GGUF file under the names that safetensors checkpoints have, floats or as they are stored."""

import mmap
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import FourBit, Int8Groups, Kind
from models.files.gguf_reader import ROPE_FACTORS, field, library, open_gguf
from models.formats.gguf_blocks import BLOCK_TYPES, BlockType, matrix_of
from models.formats.stored_matrix import Cut

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

    def block_type(self, keeps: frozenset[Kind]) -> BlockType | None:
        """Return how the matrix is multiplied as it is stored, if `keeps` allows it."""
        kind = BLOCK_TYPES.get(self.type)
        return kind if kind is not None and kind.needs <= keeps else None

    def packed(self, kind: BlockType, cut: Cut) -> FourBit | Int8Groups | None:
        """Return this part, of whole groups, as it is stored; None where that cannot be."""
        rows, columns = cut
        return matrix_of(kind, np.concatenate([self._rows(run) for run in rows]), columns)

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

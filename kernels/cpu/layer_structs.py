"""What the native library takes of layers (`src/layers.h`), field by field, without torch."""

from ctypes import Structure, c_float, c_int64, c_void_p
from typing import Any

_Field = tuple[str, Any]


def _whole(*names: str) -> list[_Field]:
    return [(name, c_int64) for name in names]


def _pointers(*names: str) -> list[_Field]:
    return [(name, c_void_p) for name in names]


def _floats(*names: str) -> list[_Field]:
    return [(name, c_float) for name in names]


class GivenMatrix(Structure):
    _fields_ = (
        *_whole("isa", "format", "outputs", "inputs", "group", "zero_bytes", "scales"),
        *_pointers("panels", "bias"),
    )


class GivenLayer(Structure):
    _fields_ = (
        *((name, GivenMatrix) for name in ("qkv", "output", "gate_up", "down")),
        *_pointers(
            "attention_norm", "q_norm", "k_norm", "sinks", "behind_attention", "mlp_norm", "behind_mlp"
        ),
        *_whole("window", "gate", "rotation"),
        *_floats("score_scale", "soft_cap", "eps", "head_eps", "residual_scale"),
    )


class LayerStep(Structure):
    _fields_ = (
        *_pointers("x", "added"),
        *_whole("rows", "hidden", "row_isa", "attention_isa", "heads", "kv_heads", "size"),
        *_whole("block_size", "sequences"),
        *_pointers("slots", "query_starts", "read_starts", "context_lens", "tables"),
        *_whole("number"),
        *_pointers("pools", "cos", "sin"),
    )

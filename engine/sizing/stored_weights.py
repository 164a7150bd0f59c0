"""How a rank keeps a model's weights, in bytes for each number, worked out from the model's description alone."""

from dataclasses import dataclass

import torch

from core.kv import DTYPE_BYTES
from kernels.cpu.attention import attends_heads_of
from kernels.cpu.library import instruction_sets
from kernels.cpu.prepacked import WeightFormat, bytes_per_number, kept, reads_back
from kernels.packed import SCALE_BLOCK
from kernels.packing import NVFP4_GROUP
from models.formats.quantised import MXFP4_GROUP
from models.formats.rounded_matrix import WeightRounding
from models.registry import rounded_to
from models.spec.model_spec import ModelSpec
from models.spec.quantisation import Quantisation

_FLOAT = 4
_MXFP4_BYTES = 0.5 + 1 / 32
"""Four bits a number, and an exponent of one byte for each 32 numbers."""
_BLOCKS = (SCALE_BLOCK, SCALE_BLOCK)
"""The only blocks of scales that kernels of 8 bits have."""
_FOUR_BIT_BLOCKS = ((1, NVFP4_GROUP), (1, MXFP4_GROUP))
"""Inputs that share a byte of scale in GPUs' kernels of E2M1 numbers."""
_SCALE_BYTES = 4
"""A group's scale and zero point, at the most where scales have 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """How a rank keeps a model, in bytes for each number."""

    matrix: float
    """Bytes of a number in the projections."""
    head: float
    expert: float
    embedding: float
    other: int
    """Bytes of a number in activations and biases: those of the dtype that the model computes in."""
    on_cpu: bool
    shares_head: bool = True
    """Whether a head that is tied to the embedding is the same matrix."""
    attends_natively: bool = False
    """Whether attention writes out no scores: a CPU's native kernels read K and V where they lie."""
    samples_natively: bool = False
    """Whether tokens are sampled from the logits where they lie."""


def stored_as(
    spec: ModelSpec, dtype: str, weights: WeightFormat, device: torch.device, *, deterministic: bool
) -> Stored:
    """Return how weights are kept where the model computes in `dtype`. A GPU keeps quantised weights as they are unless it is
    `deterministic`, and a CPU with `half`, where they have kernels that multiply them so."""
    wide, how = DTYPE_BYTES[dtype], spec.quantisation
    if device.type == "cpu":
        head = matrix = bytes_per_number(weights, getattr(torch, dtype))
        expert, native = _floats_experts(spec, weights, device, wide), _is_native(spec)
        if how is not None and weights == "half":
            matrix, expert = (
                max(each) for each in zip(*(_on_cpu(way, wide) for way in how.ways), strict=True)
            )
        if spec.moe is not None and spec.moe.mxfp4 and weights == "half":
            expert = 1 + _FLOAT / MXFP4_GROUP
        return Stored(
            matrix=matrix,
            head=head,
            expert=expert,
            embedding=_embedding_bytes(spec, weights, wide),
            other=wide,
            on_cpu=True,
            shares_head=reads_back(weights) and not _is_gguf(spec),
            attends_natively=native,
            samples_natively=bool(instruction_sets()),
        )
    if (rounding := rounded_to(spec, weights, device)) is not None:
        return _rounded_on_gpu(spec, rounding, wide)
    matrix = wide if how is None or deterministic else max(_on_gpu(way, wide) for way in how.ways)
    is_mxfp4 = spec.moe is not None and spec.moe.mxfp4 and not deterministic
    expert = _MXFP4_BYTES if is_mxfp4 else matrix
    return Stored(matrix=matrix, head=wide, expert=expert, embedding=wide, other=wide, on_cpu=False)


def _floats_experts(spec: ModelSpec, weights: WeightFormat, device: torch.device, wide: int) -> float:
    """Return the bytes of each number of a full-precision checkpoint's experts on a CPU."""
    rounding = rounded_to(spec, weights, device)
    return wide if rounding is None else _on_cpu(rounding.how, wide)[1]


def _rounded_on_gpu(spec: ModelSpec, rounding: WeightRounding, wide: int) -> Stored:
    """Return how a GPU keeps matrices that are rounded as they are read."""
    takes = rounding.takes((spec.hidden_size, spec.hidden_size))
    matrix = _on_gpu(rounding.how, wide) if takes else wide
    return Stored(
        matrix=matrix,
        head=matrix,
        expert=_MXFP4_BYTES if spec.moe is not None and spec.moe.mxfp4 else matrix,
        embedding=_on_gpu(rounding.of_tables.how, wide),
        other=wide,
        on_cpu=False,
        shares_head=rounding.of_tables == rounding,
    )


def _embedding_bytes(spec: ModelSpec, weights: WeightFormat, wide: int) -> int:
    """Return the bytes of each number of an embedding that is no head: the 16 bits that a checkpoint has it in stay, and what is
    made of fewer bits has 8. A GGUF file's is made floats."""
    if weights in ("int8", "int4", "nvfp4"):
        return 1
    if weights == "fp8":
        return wide
    is_half = spec.dtype in ("bfloat16", "float16") and "half" in kept(weights)
    return 2 if is_half and not _is_gguf(spec) else wide


def _is_gguf(spec: ModelSpec) -> bool:
    """A file's head may have more or fewer bits than can be read back, so that its embedding is counted beside it."""
    return spec.quantisation is not None and spec.quantisation.kind == "gguf"


def _on_gpu(how: Quantisation, wide: int) -> float:
    """Return the bytes of each number, with its share of the scales."""
    match how.kind:
        case "scaled" if how.number == "float4":
            return 0.5 + 1 / how.block[1] if how.block in _FOUR_BIT_BLOCKS else wide
        case "scaled":
            return 1.0 if how.rounds_activations and how.block in (None, _BLOCKS) else wide
        case "awq" | "gptq" | "packed":
            return _packed_bytes(how)
        case "gguf" | "bitsandbytes" | "hqq" | "torchao":
            return wide


def _on_cpu(how: Quantisation, wide: int) -> tuple[float, float]:
    """Return the same for projections, and for experts."""
    match how.kind, how.number:
        case "scaled", "float4":
            each = 1 + (_FLOAT / how.block[1] if how.block else 0)
        case "scaled", "int8" if how.block in (None, _BLOCKS):
            each = 1.0
        case "scaled", "float8" if how.block == (1, MXFP4_GROUP):
            return (
                2,
                wide,
            )  # powers of two leave numbers that bfloat16 has, and experts of floats are not packed
        case "scaled", _:
            each = wide
        case "gguf", _:
            each = how.bytes_each
        case "bitsandbytes", _ if how.bits == 8:
            each = 1.0
        case "bitsandbytes" | "hqq", _:
            return 2, wide  # the 16 bits in which their libraries multiply
        case "torchao", _:
            each = wide
        case _:
            each = _packed_bytes(how)
    return each, each


def _packed_bytes(how: Quantisation) -> float:
    return how.bits / 8 + (_SCALE_BYTES / how.group if how.group else 0)


def _is_native(spec: ModelSpec) -> bool:
    """Return whether a CPU's native kernels attend in all layers."""
    if spec.mla is not None or spec.compressed is not None or (spec.kv is not None and any(spec.kv.places)):
        return False
    return attends_heads_of(spec.head_dim)

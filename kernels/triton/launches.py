"""One launch of every kernel, at the shapes of an 8-billion-parameter model, for `kernels.triton.aot` to compile."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton import activation, norm, rope

TOKENS, HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_DIM = 4096, 4096, 14336, 32, 8, 128
NUM_BLOCKS, BLOCK_SIZE = 1024, 16


@dataclass(frozen=True, slots=True)
class Launch:
    name: str
    run: Callable[[], object]
    """Launches kernels on meta tensors."""
    min_capability: int = 80


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _float(*shape: int) -> Tensor:
    return tensor(*shape, dtype=torch.float32)


def _elementwise() -> None:
    x, weight = tensor(TOKENS, HIDDEN), _float(HIDDEN)
    norm.rms_norm(x, weight, 1e-5)
    norm.rms_norm(tensor(TOKENS, HEADS, HEAD_DIM), _float(HEAD_DIM), 1e-5)
    norm.add_rms_norm(x, x, weight, 1e-5)
    norm.rms_norm_quantised(x, weight, 1e-5, torch.int8, x)
    activation.silu_mul(tensor(TOKENS, 2 * MIDDLE))
    activation.gelu_tanh_mul(tensor(TOKENS, 2 * MIDDLE))
    activation.gated_quantised(tensor(TOKENS, 2 * MIDDLE), False, torch.int8)


def _elementwise_float8() -> None:
    x, weight = tensor(TOKENS, HIDDEN), _float(HIDDEN)
    norm.rms_norm_quantised(x, weight, 1e-5, torch.float8_e4m3fn, x)
    activation.gated_quantised(tensor(TOKENS, 2 * MIDDLE), True, torch.float8_e4m3fn)


def _pool(dtype: torch.dtype) -> Tensor:
    return tensor(NUM_BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)


def _rotations() -> None:
    angles, slots = tensor(TOKENS, HEAD_DIM), tensor(TOKENS, dtype=torch.int64)
    qkv = tensor(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    rope.rope(qkv.view(TOKENS, -1, HEAD_DIM)[:, :HEADS], angles, angles)
    keys = tensor(TOKENS, KV_HEADS, HEAD_DIM)
    rope.write_kv(keys, keys, _pool(torch.bfloat16), slots)
    rope.rope_and_write_kv(qkv, angles, angles, slots, _pool(torch.bfloat16), HEADS)


def _rotations_into(dtype: torch.dtype) -> None:
    angles, slots = tensor(TOKENS, HEAD_DIM), tensor(TOKENS, dtype=torch.int64)
    qkv = tensor(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    norms = (_float(HEAD_DIM), _float(HEAD_DIM), 1e-6)
    scales = _float(NUM_BLOCKS, 2, KV_HEADS, BLOCK_SIZE)
    rope.rope_and_write_kv(qkv, angles, angles, slots, _pool(dtype), HEADS, scales, norms)


LAUNCHES = (
    Launch("elementwise", _elementwise),
    Launch("elementwise, float8", _elementwise_float8, 90),
    Launch("rotations and KV writes", _rotations),
    Launch("KV writes, int8", lambda: _rotations_into(torch.int8)),
    Launch("KV writes, float8", lambda: _rotations_into(torch.float8_e4m3fn), 90),
)
"""float8_e4m3fn exists from compute capability 8.9 on."""

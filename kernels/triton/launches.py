"""One launch of every kernel, at the shapes of an 8-billion-parameter model, for `aot` to compile."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.head_places import HeadPlaces
from kernels.kv_parts import KVPart, ScaledKV, ScaledLatents
from kernels.ops import AttentionMeta, ExpertWeights, KVLayer, Latents
from kernels.packed import EightBit, FourBit
from kernels.rounding import Rounding
from kernels.routing import Routing
from kernels.triton import activation, gemm, norm, rope
from kernels.triton.attention import TritonAttention
from kernels.triton.fixed_step import TritonFixedStep
from kernels.triton.gemm_few import linear_few
from kernels.triton.gemm_four_bit import linear_four_bit
from kernels.triton.gemm_scaled import linear_scaled
from kernels.triton.grouped import add_lora
from kernels.triton.latent import absorbed_attention
from kernels.triton.quantise import round_to
from kernels.triton.route import route
from kernels.triton.sampling import likeliest, logprobs, mask, penalise_entries, sample
from kernels.triton.token_index import index_scores, selected_attention
from kernels.triton.weights import experts

TOKENS, HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_DIM = 4096, 4096, 14336, 32, 8, 128
NUM_BLOCKS, BLOCK_SIZE = 1024, 16


@dataclass(frozen=True, slots=True)
class Launch:
    name: str
    run: Callable[[], object]
    """Launches kernels on meta tensors."""
    capabilities: tuple[int, ...] = (80, 90, 100)
    """The architectures that it is compiled for."""


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _float(*shape: int) -> Tensor:
    return tensor(*shape, dtype=torch.float32)


def _elementwise() -> None:
    x, weight = tensor(TOKENS, HIDDEN), _float(HIDDEN)
    norm.rms_norm(x, weight, 1e-5)
    norm.rms_norm(tensor(TOKENS, HEADS, HEAD_DIM), _float(HEAD_DIM), 1e-5)
    norm.add_rms_norm(x, x, weight, 1e-5)
    norm.norm_rounded(x, x, weight, 1e-5, Rounding(torch.int8))
    activation.silu_mul(tensor(TOKENS, 2 * MIDDLE))
    activation.gelu_tanh_mul(tensor(TOKENS, 2 * MIDDLE))
    activation.gated_rounded(tensor(TOKENS, 2 * MIDDLE), "silu", Rounding(torch.int8))


def _elementwise_float8() -> None:
    x, weight = tensor(TOKENS, HIDDEN), _float(HIDDEN)
    for how in (Rounding(torch.float8_e4m3fn), Rounding(torch.float8_e4m3fn, 128)):
        norm.norm_rounded(x, x, weight, 1e-5, how)
        activation.gated_rounded(tensor(TOKENS, 2 * MIDDLE), "gelu_tanh", how)


def _elementwise_given() -> None:
    """Launch them with a checkpoint's own scale for all rows."""
    how = Rounding(torch.float8_e4m3fn, scale=_float(1))
    x = tensor(TOKENS, HIDDEN)
    norm.norm_rounded(x, None, _float(HIDDEN), 1e-5, how)
    activation.gated_rounded(tensor(TOKENS, 2 * MIDDLE), "silu", how)
    round_to(x, how)


def _pool(dtype: torch.dtype, head_dim: int = HEAD_DIM) -> KVLayer:
    shape = (NUM_BLOCKS, 2, KV_HEADS, BLOCK_SIZE)
    data = tensor(*shape, head_dim, dtype=dtype)
    return data if dtype == torch.bfloat16 else ScaledKV(data, _float(*shape))


def _rotations() -> None:
    angles, slots = tensor(TOKENS, HEAD_DIM), tensor(TOKENS, dtype=torch.int64)
    qkv = tensor(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    rope.rope(qkv.view(TOKENS, -1, HEAD_DIM)[:, :HEADS], angles, angles)
    rope.rope_and_write_kv(qkv, angles, angles, slots, _pool(torch.bfloat16), HEADS)


def _rotations_into(dtype: torch.dtype) -> None:
    angles, slots = tensor(TOKENS, HEAD_DIM), tensor(TOKENS, dtype=torch.int64)
    qkv = tensor(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    norms = (_float(HEAD_DIM), _float(HEAD_DIM), 1e-6)
    rope.rope_and_write_kv(qkv, angles, angles, slots, _pool(dtype), HEADS, norms)


def _step(lens: list[tuple[int, int]], *, both_ways: bool = False) -> AttentionMeta:
    """Return a step of sequences of (query tokens, context tokens)."""
    tables = [np.zeros(-(-context // BLOCK_SIZE), np.int64) for _, context in lens]
    slots = np.zeros(sum(query for query, _ in lens), np.int64)
    meta = AttentionMeta.build(
        [query for query, _ in lens], [context for _, context in lens], tables, slots, torch.device("meta")
    )
    return replace(meta, both_ways=(True,) * len(lens)) if both_ways else meta


def _attention(
    lens: list[tuple[int, int]], head_dim: int = HEAD_DIM, window: int = 0, soft_cap: float = 0.0,
    kv_dtype: torch.dtype = torch.bfloat16, sinks: bool = False, split_tokens: int = 0, both_ways: bool = False,
) -> None:  # fmt: skip
    q = tensor(sum(query for query, _ in lens), HEADS, head_dim)
    attend, each = TritonAttention(split_tokens), _float(HEADS) if sinks else None
    attend(q, _pool(kv_dtype, head_dim), _step(lens, both_ways=both_ways), 0.1, window, soft_cap, each)


def _parts(lens: list[tuple[int, int]], split_tokens: int = 0) -> None:
    """Launch attention of Gemma 4: 4 KV heads of 512 in a half of a pool's 16 heads of 256, and 2 of 256 in a half of 4."""
    attend = TritonAttention(split_tokens)
    for kv_heads, places in ((16, HeadPlaces(2, 4, 2)), (4, HeadPlaces(1, 2, 1))):
        pool = KVPart(tensor(NUM_BLOCKS, 2, kv_heads, BLOCK_SIZE, 256), places)
        size, window = 256 * places.width, 512 * (places.width == 1)
        attend(
            tensor(sum(query for query, _ in lens), HEADS, size), pool, _step(lens), 1.0, window, 0.0, None
        )


def _rotations_into_parts() -> None:
    pool = KVPart(tensor(NUM_BLOCKS, 2, 16, BLOCK_SIZE, 256), HeadPlaces(2, 4, 2))
    angles, slots = tensor(TOKENS, 512), tensor(TOKENS, dtype=torch.int64)
    norms = (_float(512), _float(512), 1e-6)
    rope.rope_and_write_kv(tensor(TOKENS, (HEADS + 8) * 512), angles, angles, slots, pool, HEADS, norms)


def _latents(dtype: torch.dtype, index_dim: int = 0) -> Latents:
    """Return a pool of DeepSeek's latents, with index keys behind them if `index_dim` is not 0."""
    shape, size = (NUM_BLOCKS, 1, 1, BLOCK_SIZE), 576 + index_dim
    if dtype == torch.bfloat16:
        return tensor(*shape, size)
    return ScaledLatents(
        tensor(*shape, size + 64, dtype=dtype), _float(*shape, (size - 64) // 128), (512, 576)
    )


def _latent_attention(lens: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16) -> None:
    q = tensor(sum(query for query, _ in lens), 128, 576)
    absorbed_attention(q, _latents(dtype), _step(lens), 0.1, 512)


def _chosen_tokens(dtype: torch.dtype = torch.bfloat16) -> None:
    """Launch what DeepSeek-V3.2 does: 64 index heads of 128 choose 2,048 tokens."""
    pool, rows = _latents(dtype, 128), tensor(16, 2, dtype=torch.int32)
    index_scores(tensor(16, 64, 128), _float(16, 64), pool, rows, tensor(16, 512, dtype=torch.int32), 8192)
    slots = tensor(16, 2048, dtype=torch.int64)
    ups = tensor(128, 128, 512), tensor(128, 128, 512)
    selected_attention(tensor(16, 128, 192), pool, slots, _step(DECODE), 0.1, *ups)


def _fixed(
    rows: int, head_dim: int = HEAD_DIM, window: int = 0, kv_dtype: torch.dtype = torch.bfloat16,
    split_tokens: int = 0,
) -> None:  # fmt: skip
    q, attend = tensor(rows, HEADS, head_dim), TritonAttention(split_tokens)
    for meta in _fixed_steps(rows, split_tokens):
        attend(q, _pool(kv_dtype, head_dim), meta, 0.1, window, 0.0, None)


def _fixed_latents(rows: int) -> None:
    for meta in _fixed_steps(rows):
        q, latents = tensor(rows, 128, 576), tensor(NUM_BLOCKS, 1, 1, BLOCK_SIZE, 576)
        absorbed_attention(q, latents, meta, 0.1, 512)


def _fixed_steps(rows: int, split_tokens: int = 0) -> list[AttentionMeta]:
    """Return one of low tiles alone, and one of tall ones, too."""
    step = TritonFixedStep(rows, rows, 512, NUM_BLOCKS, BLOCK_SIZE, torch.device("meta"), split_tokens)
    return [step.meta, step.smaller(rows, tall=True).meta]


def _scaled(rows: int, dtype: torch.dtype, *, blockwise: bool = False) -> None:
    x, weight = tensor(rows, HIDDEN, dtype=dtype), tensor(2 * MIDDLE, HIDDEN, dtype=dtype)
    if blockwise:
        scales = _float(rows, HIDDEN // 128), _float(2 * MIDDLE // 128, HIDDEN // 128)
    else:
        scales = _float(rows), _float(2 * MIDDLE)
    linear_scaled(x, weight, *scales, torch.bfloat16)


def _four_bit(group: int, scales: torch.dtype) -> None:
    for rows in (16, TOKENS):
        linear_four_bit(tensor(rows, HIDDEN), four_bit((HIDDEN, MIDDLE), group, scales))


def four_bit(shape: tuple[int, ...], group: int, scales: torch.dtype) -> FourBit:
    """Four-bit weights of `shape` (.., inputs, outputs)."""
    *rest, inputs, outputs = shape
    words = tensor(*rest, -(-inputs // 128), outputs, 32, dtype=torch.int16)
    in_bytes = scales == torch.uint8
    each = (-(-inputs // 128), outputs, 128 // group) if in_bytes else (-(-inputs // group), outputs, 2)
    return FourBit(
        words=words,
        scales=tensor(*rest, *each, dtype=scales),
        group=group,
        inputs=inputs,
        factors=_float(*rest, outputs) if in_bytes and group == 16 else None,
    )


def _products(rows: int) -> None:
    gemm.linear(tensor(rows, HIDDEN), tensor(2 * MIDDLE, HIDDEN), None)
    gemm.linear(_float(rows, 2048), _float(64, 2048), None)
    latents, up = tensor(rows, 128, 512), tensor(128, 128, 512)
    gemm.batched_linear(latents, up)
    gemm.batched_linear(tensor(rows, 128, 192)[..., :128], up.mT)


def _few_rows() -> None:
    for rows in (1, 16):
        linear_few(tensor(rows, HIDDEN), tensor(HIDDEN, HIDDEN), tensor(HIDDEN))
        linear_few(tensor(rows, HIDDEN), tensor(2 * MIDDLE, HIDDEN), None, "silu")


def _groups(rows: int) -> None:
    held = ExpertWeights(tensor(64, 2 * 1408, 2048), tensor(64, 2048, 1408))
    slots = tensor(rows, 6, dtype=torch.int64)
    experts(tensor(rows, 2048), slots, _float(rows, 6), held, activation.silu_mul)


def _packed_groups(rows: int, weight: Callable[[int, int], EightBit | FourBit], size: int) -> None:
    """32 experts of `size` inputs and inner size; `weight` of (outputs, inputs)."""
    held = ExpertWeights(weight(2 * size, size), weight(size, size))
    slots = tensor(rows, 4, dtype=torch.int64)
    experts(tensor(rows, size), slots, _float(rows, 4), held, activation.silu_mul)


def _eight_bit_groups(rows: int, dtype: torch.dtype, *, blockwise: bool = False) -> None:
    def weight(outputs: int, inputs: int) -> EightBit:
        scales = (outputs // 128, inputs // 128) if blockwise else (outputs,)
        return EightBit(tensor(32, outputs, inputs, dtype=dtype), _float(32, *scales))

    _packed_groups(rows, weight, 2816)


def _four_bit_groups(rows: int, group: int, scales: torch.dtype) -> None:
    _packed_groups(rows, lambda outputs, inputs: four_bit((32, inputs, outputs), group, scales), 2880)


def _roundings(dtype: torch.dtype) -> None:
    round_to(tensor(TOKENS, HIDDEN), Rounding(dtype))
    round_to(tensor(TOKENS, MIDDLE), Rounding(dtype))
    round_to(tensor(TOKENS, HIDDEN), Rounding(dtype, 128))


def _routes() -> None:
    route(_float(TOKENS, 128), None, Routing(top_k=8))
    route(
        _float(TOKENS, 256),
        _float(256),
        Routing(
            top_k=8, scoring="sigmoid", renormalise=True, scale=2.5, num_groups=8, top_groups=4, group_best=2
        ),
    )


def _adapters() -> None:
    x, adapters = tensor(256, HIDDEN), tensor(256, dtype=torch.int64)
    add_lora(tensor(256, HIDDEN), x, tensor(8, 16, HIDDEN), tensor(8, HIDDEN, 16), adapters)


def _sampling() -> None:
    logits, each, tokens = _float(64, 128256), _float(64), tensor(64, dtype=torch.int64)
    penalise_entries(logits, tokens, tokens, tokens, each, each, each)
    sample(logits, each, tensor(64, dtype=torch.int32), each, each, tensor(64, dtype=torch.float64))
    mask(logits, tokens, tensor(64, 128256 // 32, dtype=torch.int32))
    logprobs(logits, tokens, 5)
    likeliest(logits)
    likeliest(tensor(64, 128256))


FLOAT8 = (90, 100)
PREFILL, DECODE = [(2048, 4096)], [(1, 8192)] * 16

LAUNCHES = (
    Launch("elementwise", _elementwise),
    Launch("elementwise, float8", _elementwise_float8, FLOAT8),
    Launch("elementwise, float8 by a given scale", _elementwise_given, (90,)),
    Launch("rotations and KV writes", _rotations),
    Launch("KV writes, int8", lambda: _rotations_into(torch.int8)),
    Launch("KV writes, float8", lambda: _rotations_into(torch.float8_e4m3fn), FLOAT8),
    Launch("attention, prefill", lambda: _attention(PREFILL)),
    Launch("attention, prefill, heads of 256, soft cap", lambda: _attention(PREFILL, 256, soft_cap=50.0)),
    Launch(
        "attention, prefill, heads of 64, window, sinks", lambda: _attention(PREFILL, 64, 128, sinks=True)
    ),
    Launch(
        "attention, images of Gemma 3", lambda: _attention([(256, 600)], 256, 1024, both_ways=True), (90,)
    ),
    Launch("attention, decode", lambda: _attention(DECODE)),
    Launch("attention, decode, heads of 256, window", lambda: _attention(DECODE, 256, 4096), (90,)),
    Launch("attention, int8", lambda: _attention(DECODE, kv_dtype=torch.int8), (80, 100)),
    Launch("attention, float8", lambda: _attention(PREFILL + DECODE, kv_dtype=torch.float8_e4m3fn), (90,)),
    Launch("attention, prefill, parts of a pool's heads", lambda: _parts(PREFILL)),
    Launch("attention, decode, parts of a pool's heads", lambda: _parts(DECODE)),
    Launch("attention, batch-invariant, parts of a pool's heads", lambda: _parts(DECODE, 1024), (90,)),
    Launch("KV writes, parts of a pool's heads", _rotations_into_parts, (90,)),
    Launch("attention, latents", lambda: _latent_attention(DECODE)),
    Launch("attention, latents, int8", lambda: _latent_attention(DECODE, torch.int8), (80,)),
    Launch("attention, chosen tokens", _chosen_tokens),
    Launch("attention, chosen tokens, int8", lambda: _chosen_tokens(torch.int8), (80,)),
    Launch("fixed step", lambda: _fixed(32)),
    Launch("fixed step, heads of 64, window", lambda: _fixed(32, 64, 128)),
    Launch("fixed step, int8", lambda: _fixed(32, kv_dtype=torch.int8), (80, 90)),
    Launch("fixed step, latents", lambda: _fixed_latents(32)),
    Launch("fixed step, batch-invariant", lambda: _fixed(32, split_tokens=1024), (90,)),
    Launch("int8 product", lambda: _scaled(4096, torch.int8)),
    Launch("float8 product", lambda: _scaled(4096, torch.float8_e4m3fn), FLOAT8),
    Launch("float8 product by blocks", lambda: _scaled(4096, torch.float8_e4m3fn, blockwise=True), FLOAT8),
    Launch("float8 product, few rows", lambda: _scaled(16, torch.float8_e4m3fn, blockwise=True), (90,)),
    Launch("four-bit product", lambda: _four_bit(128, torch.bfloat16)),
    Launch("four-bit product, small groups", lambda: _four_bit(16, torch.bfloat16), (100,)),
    Launch("MXFP4 product", lambda: _four_bit(32, torch.uint8)),
    Launch("NVFP4 product", lambda: _four_bit(16, torch.uint8)),
    Launch("products, batch-invariant", lambda: _products(4096)),
    Launch("products, batch-invariant, few rows", lambda: _products(16), (90,)),
    Launch("products of few rows", _few_rows, (90,)),
    Launch("experts, many rows", lambda: _groups(4096)),
    Launch("experts, few rows", lambda: _groups(16), (90,)),
    Launch("experts, int8", lambda: _eight_bit_groups(4096, torch.int8), (80,)),
    Launch("experts, float8", lambda: _eight_bit_groups(4096, torch.float8_e4m3fn), (90,)),
    Launch(
        "experts, float8 by blocks",
        lambda: _eight_bit_groups(16, torch.float8_e4m3fn, blockwise=True),
        FLOAT8,
    ),
    Launch("experts, four-bit", lambda: _four_bit_groups(4096, 64, torch.float16)),
    Launch("experts, MXFP4", lambda: _four_bit_groups(16, 32, torch.uint8)),
    Launch("experts, NVFP4", lambda: _four_bit_groups(16, 16, torch.uint8)),
    Launch("experts, NVFP4, many rows", lambda: _four_bit_groups(4096, 16, torch.uint8), (90, 100)),
    Launch("experts, MXFP4, many rows", lambda: _four_bit_groups(4096, 32, torch.uint8), (80, 90)),
    Launch("rounding to int8", lambda: _roundings(torch.int8)),
    Launch("rounding to float8", lambda: _roundings(torch.float8_e4m3fn), FLOAT8),
    Launch("routing", _routes),
    Launch("adapters", _adapters, (80, 90)),
    Launch("sampling", _sampling),
    Launch("attention, batch-invariant", lambda: _attention(PREFILL + DECODE, split_tokens=1024), (90,)),
)

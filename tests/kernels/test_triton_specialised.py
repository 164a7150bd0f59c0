"""Kernels are compiled once for a model, whatever lengths and numbers of rows its steps have: a kernel takes seconds to compile,
and what is compiled in the middle of serving holds all sequences up. Needs no GPU: launches on meta tensors are looked at."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from core.types import SamplingParams
from kernels.ops import AttentionMeta, ScaledKV
from kernels.rounding import Rounding
from kernels.routing import Routing
from kernels.sampling import Masks, Penalties, SampleShapes
from kernels.triton import activation, gemm, norm, rope
from kernels.triton.aot import launches_given_to
from kernels.triton.attention import TritonAttention
from kernels.triton.fixed_step import TritonFixedStep
from kernels.triton.gemm_few import MOST_ROWS, linear_few
from kernels.triton.gemm_four_bit import linear_four_bit
from kernels.triton.gemm_scaled import linear_scaled
from kernels.triton.latent import absorbed_attention
from kernels.triton.launches import four_bit, tensor
from kernels.triton.quantise import round_to
from kernels.triton.route import route
from kernels.triton.sampling import likeliest, logprobs, penalise, sample_rows

META = torch.device("meta")
ROWS = (1, 2, 3, 5, 16, 17, 18, 64, 96, 101)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, VOCAB = 8, 2, 64, 16, 32000
ALIGNED = 16
"""Bytes, and what Triton divides integers by."""


def specialised(launch: Callable[[], object]) -> dict[object, set[object]]:
    """Return for each kernel, and what its author lets it be compiled for, what else it would be compiled for."""
    found: dict[object, set[object]] = defaultdict(set)

    def look(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        given = dict(zip((param.name for param in kernel.params), args, strict=False)) | options
        fixed = {param.name: given.pop(param.name) for param in kernel.params if param.is_constexpr}
        rest = tuple(
            (param.name, kind_of(param, given.pop(param.name)))
            for param in kernel.params
            if param.name in given
        )
        found[kernel.__name__, str(fixed | given)].add(rest)

    with launches_given_to(90, look):
        launch()
    return found


def kind_of(param: Any, value: Any) -> object:
    """Return what Triton compiles for of an argument."""
    if isinstance(value, torch.Tensor):
        return value.dtype, not param.do_not_specialize and value.data_ptr() % ALIGNED == 0
    if isinstance(value, int) and not param.do_not_specialize:
        return "int", value == 1, value % ALIGNED == 0
    return type(value)


def f32(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.float32)


def i64(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int64)


def steps() -> Iterator[AttentionMeta]:
    """Decode alone, prompts, and both, of any numbers of sequences."""
    rng = random.Random(0)
    for number in range(40):
        num_seqs, longest = rng.randint(1, 9), (1, 300, 2)[number % 3]
        queries = [rng.randint(1, longest) for _ in range(num_seqs)]
        contexts = [query + rng.choice((0, 7, 3000)) for query in queries]
        tables = [np.zeros(-(-context // BLOCK_SIZE), np.int64) for context in contexts]
        yield AttentionMeta.build(queries, contexts, tables, np.zeros(sum(queries), np.int64), META)


def attention() -> None:
    pool = tensor(64, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    eight_bits = ScaledKV(tensor(*pool.shape, dtype=torch.int8), f32(*pool.shape[:-1]))
    for meta in steps():
        q = tensor(sum(meta.query_lens), HEADS, HEAD_DIM)
        for layer in (pool, eight_bits):
            TritonAttention()(q, layer, meta, 0.1, 0, 0.0)
        TritonAttention(1024)(q, pool, meta, 0.1, 0, 0.0)


def latents() -> None:
    for meta in steps():
        q = tensor(sum(meta.query_lens), 16, 576)
        absorbed_attention(q, tensor(64, 1, 1, BLOCK_SIZE, 576), meta, 0.1, 512)


def attention_for_graphs() -> None:
    """Launch it for each size that is captured: compiling for each of them would take minutes."""
    for size in ROWS:
        for split_tokens in (0, 1024):
            step = TritonFixedStep(size, 256, 64, 1000, BLOCK_SIZE, META, split_tokens)
            pool = tensor(64, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
            for each in (step, step.smaller(size, tall=True)):
                TritonAttention(split_tokens)(tensor(size, HEADS, HEAD_DIM), pool, each.meta, 0.1, 0, 0.0)


def rows_of_a_step() -> None:
    for rows in ROWS:
        x, angles = tensor(rows, 4096), tensor(rows, HEAD_DIM)
        norm.rms_norm(x, f32(4096), 1e-5)
        norm.add_rms_norm(x, x, f32(4096), 1e-5)
        norm.norm_rounded(x, x, f32(4096), 1e-5, Rounding(torch.int8))
        activation.silu_mul(x)
        activation.gated_rounded(x, "silu", Rounding(torch.int8))
        round_to(x, Rounding(torch.int8))
        qkv = tensor(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        rope.rope(qkv.view(rows, -1, HEAD_DIM)[:, :HEADS], angles, angles)
        pool = tensor(64, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        rope.rope_and_write_kv(qkv, angles, angles, i64(rows), pool, HEADS)
        route(f32(rows, 128), None, Routing(top_k=8))


def products() -> None:
    for rows in ROWS:
        for dtype in (torch.int8, torch.float8_e4m3fn):
            x, weight = tensor(rows, 4096, dtype=dtype), tensor(512, 4096, dtype=dtype)
            linear_scaled(x, weight, f32(rows), f32(512), torch.bfloat16)
        linear_four_bit(tensor(rows, 4096), four_bit((4096, 512), 128, torch.bfloat16))
        gemm.linear(tensor(rows, 4096), tensor(512, 4096), None)
        if rows <= MOST_ROWS:
            linear_few(tensor(rows, 4096), tensor(512, 4096), None)


def samples() -> None:
    for rows in ROWS:
        logits, shapes = f32(rows, VOCAB), [SamplingParams(temperature=1.0)] * rows
        words = tensor(1, VOCAB // 32, dtype=torch.int32)
        sample_rows(logits, SampleShapes(shapes, tensor(5, rows, dtype=torch.float64)), Masks(i64(1), words))
        likeliest(logits)
        logprobs(logits, i64(rows), 5)
        for num_entries in (1, 2, 15, 16, 33):
            penalise(logits, Penalties(i64(3, num_entries), f32(3, rows)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [attention, latents, attention_for_graphs, rows_of_a_step, products, samples],
    ids=lambda one: one.__name__,
)
def test_a_kernel_is_compiled_once_whatever_a_step_has(launch: Callable[[], None]) -> None:
    found = specialised(launch)
    assert found
    assert {name: kinds for name, kinds in found.items() if len(kinds) > 1} == {}

"""What is done with logits: penalties, masks, samples, log-probabilities. The same as kernels.torch.sampling; engine.sampler says
what each step means and where the numbers come from."""

import torch
import triton.language as tl
from torch import Tensor

from kernels.sampling import Masks, Penalties, SampleShapes
from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, cdiv, next_power_of_2
from kernels.triton.token_sampling import (
    NO_TOKEN,
    SEGMENTS_OF_ROW,
    WIDTH_OF_ROW,
    best_of_places,
    places,
    sample,
    sum_all,
)

_BLOCK = 64 if INTERPRETED else 4096
_SEGMENTS = 4 if INTERPRETED else 32
"""A row's, where its likeliest token is all that is looked for: of few rows more is on its way."""


def sample_rows(logits: Tensor, asked: SampleShapes, masks: Masks | None = None) -> Tensor:
    """`Ops.sample_rows`; rows of logits are contiguous."""
    if masks is not None:
        mask(logits, masks.rows, masks.bits)
    if not any(shape.temperature > 0 for shape in asked.shapes):
        return likeliest(logits)
    temperature, top_k, top_p, min_p, uniforms = asked.columns.contiguous().unbind(0)
    return sample(logits, temperature.float(), top_k.int(), top_p.float(), min_p.float(), uniforms)


@launchable()
def _likeliest_kernel(logits, out, V, stride, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    top, at, _ = best_of_places(logits + index * stride, V, SEGMENTS, WIDTH)
    peak = tl.max(tl.max(top, 1), 0)
    tl.store(out + index, tl.min(tl.min(tl.where(top == peak, at, NO_TOKEN), 1), 0).to(tl.int64))


def likeliest(logits: Tensor) -> Tensor:
    """`logits` (N, V) of any floats -> each row's likeliest token (N,) int64, the first of equal ones."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _likeliest_kernel[(len(logits),)](
        logits, out, logits.shape[1], logits.stride(0), SEGMENTS=_SEGMENTS, WIDTH=WIDTH_OF_ROW, num_warps=_SEGMENTS
    )  # fmt: skip
    return out


@launchable(
    do_not_specialize=[
        "rows",
        "tokens",
        "counts",
        "repetition",
        "presence",
        "frequency",
        "num_entries",
    ]
)
def _penalty_kernel(
    logits, rows, tokens, counts, repetition, presence, frequency, num_entries, stride, BLOCK: tl.constexpr
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + entry, entry < num_entries, -1)
    mask = row >= 0
    target = logits + row * stride + tl.load(tokens + entry, mask, 0)
    value, count = tl.load(target, mask, 0.0), tl.load(counts + entry, mask, 0)
    factor = tl.load(repetition + row, mask, 1.0)
    value = tl.where(value > 0, value / factor, value * factor)
    added = tl.load(presence + row, mask, 0.0) + tl.load(frequency + row, mask, 0.0) * count.to(tl.float32)
    tl.store(target, value - tl.where(count > 0, added, 0.0), mask)


def penalise(logits: Tensor, penalties: Penalties) -> None:
    """`Ops.penalise`; rows of logits are contiguous."""
    penalise_entries(logits, *penalties.entries.unbind(0), *penalties.factors.unbind(0))


def penalise_entries(
    logits: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor,
    repetition: Tensor, presence: Tensor, frequency: Tensor,
) -> None:  # fmt: skip
    """(E,) int64 each, (N,) float32 each: see `Penalties`."""
    if len(rows):
        block = 256
        _penalty_kernel[(cdiv(len(rows), block),)](
            logits, rows, tokens, counts, repetition, presence, frequency, len(rows), logits.stride(0), BLOCK=block
        )  # fmt: skip


@launchable()
def _mask_kernel(logits, rows, bits, V, stride, num_words, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + index * num_words + token // 32, token < V, -1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    target = logits + tl.load(rows + index) * stride + token
    tl.store(target, tl.full((BLOCK,), float("-inf"), tl.float32), (token < V) & forbidden)


def mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See `Masks`; rows of logits and of bits are contiguous."""
    grid = (len(rows), cdiv(logits.shape[1], _BLOCK))
    _mask_kernel[grid](
        logits, rows, bits, logits.shape[1], logits.stride(0), bits.shape[1], BLOCK=_BLOCK
    )  # fmt: skip


@launchable(do_not_specialize=["num_top"])
def _logprob_kernel(
    logits, tokens, out, top_values, top_tokens, V, stride, num_top,
    SEGMENTS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One row of logits. Each place of a tile keeps the best of the tokens that it has read, STEPS at most; where that is taken,
    it looks for its next."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    top, at, size = best_of_places(row, V, SEGMENTS, WIDTH)
    peak, first = tl.max(tl.max(top, 1), 0), places(V, SEGMENTS, WIDTH)[1]
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.zeros((SEGMENTS, WIDTH), tl.float32)
    for start in tl.range(0, size, WIDTH):
        weights += tl.exp(tl.load(row + first + start, first + start < V, float("-inf")) - base)
    whole = base + tl.log(sum_all(weights))
    tl.store(out + index, tl.load(row + tl.load(tokens + index)) - whole)
    for number in tl.range(0, num_top):
        peak = tl.max(tl.max(top, 1), 0)
        token = tl.min(tl.min(tl.where(top == peak, at, NO_TOKEN), 1), 0)
        tl.store(top_values + index * num_top + number, peak - whole)
        tl.store(top_tokens + index * num_top + number, token.to(tl.int64))
        segment, step = token // size, tl.arange(0, STEPS)
        others = segment * size + (token - segment * size) % WIDTH + step * WIDTH
        exists = (others < (segment + 1) * size) & (others < V)
        x = tl.load(row + others, exists, float("-inf"))
        is_left = exists & ((x < peak) | ((x == peak) & (others > token)))
        following = tl.max(tl.where(is_left, x, float("-inf")), 0)
        its = tl.min(tl.where(is_left & (x == following), others, NO_TOKEN), 0)
        top, at = tl.where(at == token, following, top), tl.where(at == token, its, at)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """`Ops.logprobs`; rows of logits are contiguous."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    values = torch.empty((num_rows, num_top), dtype=torch.float32, device=logits.device)
    indices = torch.empty((num_rows, num_top), dtype=torch.int64, device=logits.device)
    if num_rows:
        _logprob_kernel[(num_rows,)](
            logits, tokens, out, values, indices, vocab, logits.stride(0), num_top, SEGMENTS=SEGMENTS_OF_ROW, WIDTH=WIDTH_OF_ROW,
            STEPS=next_power_of_2(cdiv(vocab, SEGMENTS_OF_ROW * WIDTH_OF_ROW)), num_warps=SEGMENTS_OF_ROW,
        )  # fmt: skip
    return out, values, indices

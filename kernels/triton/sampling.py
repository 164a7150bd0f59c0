"""Drawing tokens: penalties, then temperature, top-k, top-p, min-p, and one number through the inverse of the cumulative
distribution in token-id order; log-probabilities. The same draw as kernels.sampling; engine.sampler says what each step means
and where the numbers come from.

Thresholds are found without sorting: floats are compared as integers of the same order, whose bits are settled two at a time by
counting, or adding up, what lies above three candidates. A row is read 16 times for each of top-k and top-p, from L2."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import DrawShapes, Masks, Penalties
from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, cdiv

_BLOCK = 64 if INTERPRETED else 4096


@triton.jit
def _key(values):
    """float32 -> int64 in [0, 2^32) of the same order."""
    bits = values.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)


@triton.jit
def _scaled(row, token, V, temperature):
    return tl.load(row + token, token < V, float("-inf")) / temperature


@triton.jit
def _threshold(row, V, temperature, peak, floor, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key t with at least `wanted` tokens (MASS: of exp(x - peak) summed) of keys >= t and >= `floor`."""
    settled = tl.full((), 0, tl.int64)
    for step in tl.range(0, 16):
        unit = tl.full((), 1, tl.int64) << (30 - 2 * step)
        one, two, three = (
            tl.full((), 0.0, tl.float64),
            tl.full((), 0.0, tl.float64),
            tl.full((), 0.0, tl.float64),
        )
        for start in tl.range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = _scaled(row, token, V, temperature)
            key = _key(x)
            weight = tl.exp(x - peak).to(tl.float64) if MASS else tl.full((BLOCK,), 1.0, tl.float64)
            weight = tl.where((token < V) & (key >= floor), weight, 0.0)
            one += tl.sum(tl.where(key >= settled + unit, weight, 0.0), 0)
            two += tl.sum(tl.where(key >= settled + 2 * unit, weight, 0.0), 0)
            three += tl.sum(tl.where(key >= settled + 3 * unit, weight, 0.0), 0)
        reached = (one >= wanted).to(tl.int64) + (two >= wanted).to(tl.int64) + (three >= wanted).to(tl.int64)
        settled += reached * unit
    return settled


@launchable()
def _sample_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, out, V, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """One row of logits."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    temperature = tl.load(temperatures + index)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)
    peak, best = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    for start in tl.range(0, V, BLOCK):
        x = _scaled(row, start + tl.arange(0, BLOCK), V, temperature)
        here = tl.max(x, 0)
        best = tl.where(here > peak, start + tl.argmax(x, 0), best)
        peak = tl.maximum(peak, here)
    if greedy:
        tl.store(out + index, best.to(tl.int64))
    else:
        top_k, top_p, min_p = tl.load(top_ks + index), tl.load(top_ps + index), tl.load(min_ps + index)
        floor = tl.full((), 0, tl.int64)
        if (top_k > 0) & (top_k < V):
            floor = _threshold(row, V, temperature, peak, floor, top_k.to(tl.float64), False, BLOCK)
        total = tl.full((), 0.0, tl.float64)
        for start in tl.range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = _scaled(row, token, V, temperature)
            total += tl.sum(
                tl.where((token < V) & (_key(x) >= floor), tl.exp(x - peak), 0.0).to(tl.float64), 0
            )
        # Of the tokens that share the last probability within top-p, the first ones are kept, by id.
        num_ties = tl.full((), V, tl.int32).to(tl.float64)
        if top_p < 1:
            mass = total * top_p.to(tl.float64)
            tie = _threshold(row, V, temperature, peak, floor, mass, True, BLOCK)
            above, each = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
            for start in tl.range(0, V, BLOCK):
                token = start + tl.arange(0, BLOCK)
                x = _scaled(row, token, V, temperature)
                key, weight = _key(x), tl.exp(x - peak).to(tl.float64)
                above += tl.sum(tl.where((token < V) & (key > tie), weight, 0.0), 0)
                each = tl.maximum(each, tl.max(tl.where((token < V) & (key == tie), weight, 0.0), 0))
            floor = tie
            num_ties = tl.ceil((mass - above) / tl.maximum(each, 1e-300))
        token = _draw(row, V, temperature, peak, floor, num_ties, min_p, tl.load(uniforms + index), BLOCK)
        tl.store(out + index, token)


@triton.jit
def _draw(row, V, temperature, peak, floor, num_ties, min_p, uniform, BLOCK: tl.constexpr):
    """The first token whose cumulative weight exceeds its part of the total; the last that may be drawn, should none."""
    found, last = tl.full((), -1, tl.int64), tl.full((), 0, tl.int64)
    target = tl.full((), 0.0, tl.float64)
    for is_drawing in tl.static_range(2):
        before, ties = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        for start in tl.range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = _scaled(row, token, V, temperature)
            key, weight = _key(x), tl.exp(x - peak)
            is_tie = ((key == floor) & (token < V)).to(tl.float64)
            kept = (token < V) & (key >= floor) & (weight >= min_p)
            kept = kept & ((key > floor) | (ties + tl.cumsum(is_tie, 0) <= num_ties))
            weights = tl.where(kept, weight, 0.0).to(tl.float64)
            if is_drawing:
                over = (before + tl.cumsum(weights, 0) > target) & kept
                first = tl.min(tl.where(over, token, V), 0).to(tl.int64)
                found = tl.where((found < 0) & (first < V), first, found)
                last = tl.maximum(last, tl.max(tl.where(kept, token, 0), 0).to(tl.int64))
            before += tl.sum(weights, 0)
            ties += tl.sum(is_tie, 0)
        target = uniform * before
    return tl.where(found < 0, last, found)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """logits (N, V) float32 with contiguous rows; (N,) each: temperature (0: the likeliest), top_p (1: all) and min_p float32,
    top_k int32 (0: all), uniforms float64 in [0, 1) -> tokens (N,) int64."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        _sample_kernel[(len(logits),)](
            logits, temperature, top_k, top_p, min_p, uniforms, out, logits.shape[1], logits.stride(0),
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return out


def draw(logits: Tensor, draws: DrawShapes, masks: Masks | None = None) -> Tensor:
    """`Ops.draw`; rows of logits are contiguous."""
    if masks is not None:
        mask(logits, masks.rows, masks.bits)
    if not any(shape.temperature > 0 for shape in draws.shapes):
        return logits.argmax(-1)
    temperature, top_k, top_p, min_p, uniforms = draws.columns.contiguous().unbind(0)
    return sample(logits, temperature.float(), top_k.int(), top_p.float(), min_p.float(), uniforms)


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


@launchable()
def _logprob_kernel(logits, tokens, out, totals, V, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    peak, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for start in tl.range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, token < V, float("-inf"))
        now = tl.maximum(peak, tl.max(x, 0))
        base = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(x - base), 0)
        peak = now
    whole = peak + tl.log(total)
    tl.store(totals + index, whole)
    tl.store(out + index, tl.load(row + tl.load(tokens + index)) - whole)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """`Ops.logprobs`; rows of logits are contiguous."""
    out, totals = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    if len(logits):
        _logprob_kernel[(len(logits),)](
            logits, tokens, out, totals, logits.shape[1], logits.stride(0), BLOCK=_BLOCK, num_warps=8
        )
    top = logits.topk(num_top)
    return out, top.values - totals[:, None], top.indices

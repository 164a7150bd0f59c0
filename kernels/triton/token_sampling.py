"""Sampling a token of each row: temperature, then top-k, top-p, min-p, and one number through the inverse of the cumulative
distribution in token-id order. The same sample as kernels.torch.sampling.

What may be sampled is mostly few tokens: those within some distance from the likeliest, which one to four readings of the row
find, are listed, and all else is done over the list; over the row where there are more. Thresholds are found without sorting:
floats are compared as integers of the same order, whose bits are settled two at a time by counting, or adding up, what lies above
three candidates."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED

SEGMENTS_OF_ROW, WIDTH_OF_ROW = (4, 16) if INTERPRETED else (16, 128)
"""A row is cut into so many segments, of which so many tokens each are read at once: a warp reads its own."""
_MANY = 256 if INTERPRETED else 16384
"""The most tokens that are listed."""
NO_TOKEN = tl.constexpr(1 << 30)


@triton.jit
def _key(values):
    """float32 -> uint32 of the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def places(num, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr):
    """Cut `num` tokens into segments: the tokens of each, a multiple of WIDTH, and (SEGMENTS, WIDTH) places of the first ones."""
    size = tl.cdiv(num, SEGMENTS * WIDTH) * WIDTH
    return size, tl.arange(0, SEGMENTS)[:, None] * size + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _scaled(row, place, num, temperature):
    return tl.load(row + place, place < num, float("-inf")) / temperature


@triton.jit
def _add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def sum_all(values):
    return tl.sum(tl.sum(values, 1), 0)


@triton.jit
def best_of_places(row, V, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the largest logit that each place of a tile reads, float32, and the first token that has it, (SEGMENTS, WIDTH) each;
    and how many tokens a segment has."""
    size, first = places(V, SEGMENTS, WIDTH)
    top = tl.full((SEGMENTS, WIDTH), float("-inf"), tl.float32)
    at = tl.where(first < V, first, NO_TOKEN)
    for start in tl.range(0, size, WIDTH):
        x = tl.load(row + first + start, first + start < V, float("-inf")).to(tl.float32)
        at = tl.where(x > top, first + start, at)
        top = tl.maximum(top, x)
    return top, at, size


@triton.jit
def _enough(
    row, V, temperature, peak, top_k, top_p, MANY: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr
):
    """Return a distance from the peak within which all tokens lie that top-k, or else top-p, keeps; how many of each segment lie
    there, and all of them, more than MANY where no such distance was found; and all tokens' weight. It looks four times at
    most for a distance within which few lie."""
    size, first = places(V, SEGMENTS, WIDTH)
    near, far = 0.0, 24.0
    one, two, three = 3.0, 6.0, 12.0
    counts = tl.zeros((SEGMENTS,), tl.int32)
    num, left = MANY + 1, 4
    total = tl.full((), 0.0, tl.float64)
    while (num > SEGMENTS * WIDTH) & (left > 0):
        n1, n2 = tl.zeros((SEGMENTS, WIDTH), tl.int32), tl.zeros((SEGMENTS, WIDTH), tl.int32)
        n3, n4 = tl.zeros((SEGMENTS, WIDTH), tl.int32), tl.zeros((SEGMENTS, WIDTH), tl.int32)
        m1, m2 = tl.zeros((SEGMENTS, WIDTH), tl.float32), tl.zeros((SEGMENTS, WIDTH), tl.float32)
        m3, m4 = tl.zeros((SEGMENTS, WIDTH), tl.float32), tl.zeros((SEGMENTS, WIDTH), tl.float32)
        every = tl.zeros((SEGMENTS, WIDTH), tl.float64)
        for start in tl.range(0, size, WIDTH):
            away = peak - _scaled(row, first + start, V, temperature)
            weight = tl.exp(-away)
            n1 += (away <= one).to(tl.int32)
            n2 += (away <= two).to(tl.int32)
            n3 += (away <= three).to(tl.int32)
            n4 += (away <= far).to(tl.int32)
            m1 += tl.where(away <= one, weight, 0.0)
            m2 += tl.where(away <= two, weight, 0.0)
            m3 += tl.where(away <= three, weight, 0.0)
            m4 += tl.where(away <= far, weight, 0.0)
            every += weight.to(tl.float64)
        total = sum_all(every)
        wanted = (total * top_p * 1.00001).to(tl.float32)
        c1, c2, c3, c4 = tl.sum(n1, 1), tl.sum(n2, 1), tl.sum(n3, 1), tl.sum(n4, 1)
        if top_k > 0:
            r1, r2 = tl.sum(c1, 0) >= top_k, tl.sum(c2, 0) >= top_k
            r3, r4 = tl.sum(c3, 0) >= top_k, tl.sum(c4, 0) >= top_k
        else:
            r1, r2, r3, r4 = (
                sum_all(m1) >= wanted,
                sum_all(m2) >= wanted,
                sum_all(m3) >= wanted,
                sum_all(m4) >= wanted,
            )
        near = tl.where(r1, near, tl.where(r2, one, tl.where(r3, two, three)))
        far = tl.where(r1, one, tl.where(r2, two, tl.where(r3, three, far)))
        counts = tl.where(r1, c1, tl.where(r2, c2, tl.where(r3, c3, c4)))
        num = tl.where(r4, tl.sum(counts, 0), MANY + 1)
        left = tl.where(r4, left - 1, 0)
        step = (far - near) / 4
        one, two, three = near + step, near + 2 * step, near + 3 * step
    return far, counts, num, total


@triton.jit
def _list(
    row, V, temperature, peak, far, counts, logits, tokens, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr
):
    """List what lies within `far` of the peak, in the tokens' order."""
    size, first = places(V, SEGMENTS, WIDTH)
    before = tl.cumsum(counts, 0) - counts
    for start in tl.range(0, size, WIDTH):
        token = first + start
        x = tl.load(row + token, token < V, float("-inf"))
        kept = peak - x / temperature <= far
        ones = kept.to(tl.int32)
        to = before[:, None] + tl.cumsum(ones, 1) - ones
        tl.store(logits + to, x, kept)
        tl.store(tokens + to, token, kept)
        before += tl.sum(ones, 1)


@triton.jit
def _threshold(
    row, num, temperature, peak, least, floor, wanted, MASS: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The largest key t with at least `wanted` tokens (MASS: of exp(x - peak) summed) of keys >= t and >= `floor`. It is known to
    be at least `least`."""
    size, first = places(num, SEGMENTS, WIDTH)
    differ = (least ^ _key(peak)).to(tl.int64)
    shift = 0
    while (differ >> shift) > 3:
        shift += 2
    settled = ((least.to(tl.int64) >> (shift + 2)) << (shift + 2)).to(tl.uint32)
    while shift >= 0:
        unit = (tl.full((), 1, tl.int64) << shift).to(tl.uint32)
        kind: tl.constexpr = tl.float64 if MASS else tl.int32
        one, two, three = (
            tl.zeros((SEGMENTS, WIDTH), kind),
            tl.zeros((SEGMENTS, WIDTH), kind),
            tl.zeros((SEGMENTS, WIDTH), kind),
        )
        for start in tl.range(0, size, WIDTH):
            x = _scaled(row, first + start, num, temperature)
            key = _key(x)
            inside = (first + start < num) & (key >= floor)
            weight = tl.where(inside, tl.exp(x - peak), 0.0).to(tl.float64) if MASS else inside.to(tl.int32)
            one += tl.where(key >= settled + unit, weight, 0)
            two += tl.where(key >= settled + 2 * unit, weight, 0)
            three += tl.where(key >= settled + 3 * unit, weight, 0)
        sums = tl.reduce((tl.sum(one, 1), tl.sum(two, 1), tl.sum(three, 1)), 0, _add_three)
        reached = (
            (sums[0] >= wanted).to(tl.int32)
            + (sums[1] >= wanted).to(tl.int32)
            + (sums[2] >= wanted).to(tl.int32)
        )
        settled += reached.to(tl.uint32) * unit
        shift -= 2
    return settled


@launchable()
def _sample_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, out, few_logits, few_tokens, V, stride,
    MANY: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row of logits."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    temperature = tl.load(temperatures + index)
    top, at, _size = best_of_places(row, V, SEGMENTS, WIDTH)
    peak = tl.max(tl.max(top, 1), 0)
    if temperature <= 0:
        tl.store(out + index, tl.min(tl.min(tl.where(top == peak, at, NO_TOKEN), 1), 0).to(tl.int64))
    else:
        peak = peak / temperature
        top_k, top_p, min_p = tl.load(top_ks + index), tl.load(top_ps + index), tl.load(min_ps + index)
        top_k = tl.where(top_k < V, top_k, 0)
        num, least, floor = V, tl.full((), 0, tl.uint32), tl.full((), 0, tl.uint32)
        total = tl.full((), 0.0, tl.float64)
        is_few = False
        if ((top_k > 0) & (top_k <= MANY)) | ((top_k <= 0) & (top_p < 1)):
            far, counts, num_few, total = _enough(
                row, V, temperature, peak, top_k, top_p, MANY, SEGMENTS, WIDTH
            )
            if num_few <= MANY:
                _list(
                    row,
                    V,
                    temperature,
                    peak,
                    far,
                    counts,
                    few_logits + index * MANY,
                    few_tokens + index * MANY,
                    SEGMENTS,
                    WIDTH,
                )
                tl.debug_barrier()
                is_few = True
                row, num = few_logits + index * MANY, num_few
                least = _key(peak - far * 1.001)
        size, first = places(num, SEGMENTS, WIDTH)
        if top_k > 0:
            floor = _threshold(row, num, temperature, peak, least, floor, top_k, False, SEGMENTS, WIDTH)
        if (top_k > 0) & (top_p < 1):
            every = tl.zeros((SEGMENTS, WIDTH), tl.float64)
            for start in tl.range(0, size, WIDTH):
                x = _scaled(row, first + start, num, temperature)
                every += tl.where((first + start < num) & (_key(x) >= floor), tl.exp(x - peak), 0.0).to(
                    tl.float64
                )
            total = sum_all(every)
        mass = total * top_p.to(tl.float64)
        if top_p < 1:
            floor = _threshold(row, num, temperature, peak, least, floor, mass, True, SEGMENTS, WIDTH)
        place = _sample(
            row,
            num,
            temperature,
            peak,
            floor,
            top_p < 1,
            mass,
            min_p,
            tl.load(uniforms + index),
            SEGMENTS,
            WIDTH,
        )
        if is_few:
            place = tl.load(few_tokens + index * MANY + place)
        tl.store(out + index, place.to(tl.int64))


@triton.jit
def _sample(
    row, num, temperature, peak, floor, is_cut, mass, min_p, uniform, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The first token whose cumulative weight exceeds its part of the total; the last that may be sampled, should none. Of the
    tokens that share the last probability within top-p, the first ones are kept."""
    size, first = places(num, SEGMENTS, WIDTH)
    above, kept = tl.zeros((SEGMENTS, WIDTH), tl.float64), tl.zeros((SEGMENTS, WIDTH), tl.float64)
    ties = tl.zeros((SEGMENTS, WIDTH), tl.int32)
    each = tl.zeros((SEGMENTS, WIDTH), tl.float32)
    for start in tl.range(0, size, WIDTH):
        x = _scaled(row, first + start, num, temperature)
        key, weight = _key(x), tl.exp(x - peak)
        is_tie = (first + start < num) & (key == floor)
        weight = tl.where(first + start < num, weight, 0.0)
        more = tl.where(key > floor, weight, 0.0)
        above += more.to(tl.float64)
        kept += tl.where(more >= min_p, more, 0.0).to(tl.float64)
        ties += is_tie.to(tl.int32)
        each = tl.maximum(each, tl.where(is_tie, weight, 0.0))
    tie = tl.max(tl.max(each, 1), 0)
    num_ties = tl.where(
        is_cut, tl.ceil((mass - sum_all(above)) / tl.maximum(tie.to(tl.float64), 1e-300)), num.to(tl.float64)
    )
    segment, own_ties = tl.arange(0, SEGMENTS), tl.sum(ties, 1).to(tl.float64)
    kept_ties = tl.minimum(tl.maximum(num_ties - (tl.cumsum(own_ties, 0) - own_ties), 0.0), own_ties)
    weights = tl.sum(kept, 1) + kept_ties * tl.where(tie >= min_p, tie, 0.0).to(tl.float64)
    target = uniform * tl.sum(weights, 0)
    chosen = tl.min(tl.where(tl.cumsum(weights, 0) > target, segment, SEGMENTS), 0)
    chosen = tl.where(chosen < SEGMENTS, chosen, tl.max(tl.where(weights > 0, segment, 0), 0))
    before = tl.sum(tl.where(segment < chosen, weights, 0.0), 0)
    num_ties -= tl.sum(tl.where(segment < chosen, own_ties, 0.0), 0)
    found, last = -1, chosen * size
    for start in tl.range(chosen * size, tl.minimum((chosen + 1) * size, num), SEGMENTS * WIDTH):
        place = start + tl.arange(0, SEGMENTS * WIDTH)
        inside = place < tl.minimum((chosen + 1) * size, num)
        x = _scaled(row, place, num, temperature)
        key, weight = _key(x), tl.exp(x - peak)
        is_tie = (inside & (key == floor)).to(tl.int32)
        is_kept = (
            inside & (key >= floor) & (weight >= min_p) & ((key > floor) | (tl.cumsum(is_tie, 0) <= num_ties))
        )
        these = tl.where(is_kept, weight, 0.0).to(tl.float64)
        over = (before + tl.cumsum(these, 0) > target) & is_kept
        here = tl.min(tl.where(over, place, num), 0)
        found = tl.where((found < 0) & (here < num), here, found)
        last = tl.maximum(last, tl.max(tl.where(is_kept, place, 0), 0))
        before += tl.sum(these, 0)
        num_ties -= tl.sum(is_tie, 0)
    return tl.where(found < 0, last, found)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """`logits` (N, V) float32 with contiguous rows; (N,) each: temperature (0: the likeliest), top_p (1: all) and min_p float32,
    top_k int32 (0: all), uniforms float64 in [0, 1) -> tokens (N,) int64."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        few_logits = torch.empty((len(logits), _MANY), dtype=torch.float32, device=logits.device)
        _sample_kernel[(len(logits),)](
            logits, temperature, top_k, top_p, min_p, uniforms, out, few_logits, torch.empty_like(few_logits, dtype=torch.int32),
            logits.shape[1], logits.stride(0), MANY=_MANY,
            SEGMENTS=SEGMENTS_OF_ROW, WIDTH=WIDTH_OF_ROW, num_warps=SEGMENTS_OF_ROW,
        )  # fmt: skip
    return out

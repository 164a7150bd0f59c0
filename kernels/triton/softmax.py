"""A softmax over scores that come a tile at a time (Milakov and Gimelshein, 2018), in base 2."""

import triton
import triton.language as tl


@triton.jit
def soft_capped(scores, scale_log2, soft_cap, CAPPED: tl.constexpr):
    """Raw products -> scores, and what to multiply them by so that they are of base 2. tanh(z) = 1 - 2 / (exp(2z) + 1)."""
    log2e: tl.constexpr = 1.4426950408889634
    unit = scale_log2
    if CAPPED:
        doubled = scores * (2.0 * scale_log2 / soft_cap)
        scores = 1.0 - 2.0 / (tl.exp2(doubled) + 1.0)
        unit = soft_cap * log2e
    return scores, unit


@triton.jit
def online_softmax(scores, unit, largest, total, MASKED: tl.constexpr = True):
    """(M, N) scores, which times `unit` > 0 are of base 2; (M,) largest of those so far and sum relative to it.

    -> (M, N) weights and the (M,) factor of what was accumulated, both relative to the new largest; new largest and sum. MASKED:
    there may be rows that have seen nothing but -inf, which keep weights of zero."""
    now = tl.maximum(largest, tl.max(scores, 1) * unit)
    base = tl.where(now == float("-inf"), 0.0, now) if MASKED else now
    weights = tl.exp2(scores * unit - base[:, None])
    factor = tl.exp2(largest - base)
    return weights, factor, now, total * factor + tl.sum(weights, 1)


@triton.jit
def with_sink(largest, total, sinks, head, exists, SINKS: tl.constexpr):
    """The (M,) factor of what was accumulated, and the sum to divide it by, once each head's sink has joined the softmax."""
    if SINKS:
        sink = tl.load(sinks + head, exists, 0.0).to(tl.float32) * 1.4426950408889634
        now = tl.maximum(largest, sink)
        factor = tl.exp2(largest - now)
        total = total * factor + tl.exp2(sink - now)
    else:
        factor = tl.where(largest == float("-inf"), 0.0, 1.0)
    return factor, tl.where(total > 0, total, 1.0)

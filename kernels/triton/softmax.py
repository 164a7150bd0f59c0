"""A softmax over scores that come a tile at a time (Milakov and Gimelshein, 2018), in base 2."""

import triton
import triton.language as tl


@triton.jit
def soft_capped(scores, scale_log2, soft_cap, CAPPED: tl.constexpr):
    """Raw products -> scores times log2(e). tanh(z) = 1 - 2 / (exp(2z) + 1)."""
    log2e: tl.constexpr = 1.4426950408889634
    if CAPPED:
        doubled = scores * (2.0 * scale_log2 / soft_cap)
        scores = soft_cap * log2e * (1.0 - 2.0 / (tl.exp2(doubled) + 1.0))
    else:
        scores = scores * scale_log2
    return scores


@triton.jit
def online_softmax(scores, largest, total):
    """(M, N) scores of base 2, (M,) largest so far and sum relative to it.

    -> (M, N) weights and the (M,) factor of what was accumulated, both relative to the new largest; new largest and sum. A row
    that has seen nothing but -inf keeps weights of zero."""
    now = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(now == float("-inf"), 0.0, now)
    weights = tl.exp2(scores - base[:, None])
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

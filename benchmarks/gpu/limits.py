"""What this GPU reaches at best, measured, and how a kernel is timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton.testing import do_bench

from kernels.triton.platform import INTERPRETED


@dataclass(frozen=True, slots=True)
class Limits:
    copy_bytes_per_s: float
    """Read and written, by a copy of memory far larger than the L2."""
    flops: dict[str, float]
    """Operations per second of a square product, by the dtype of its operands; only those that this GPU and torch have."""

    def floor_s(self, num_bytes: float, num_flops: float, kind: str) -> float:
        """The least that must pass for so many bytes and operations."""
        products = num_flops / self.flops[kind] if num_flops and kind in self.flops else 0.0
        return max(num_bytes / self.copy_bytes_per_s, products)


def seconds(run: Callable[[], object]) -> float:
    """Median of about 100 ms of runs, each with a cold L2; one run of the clock in the interpreter, whose time means nothing."""
    if INTERPRETED:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    return do_bench(run, warmup=20, rep=100, return_mode="median") / 1e3


def measure(device: torch.device) -> Limits:
    gib = 1 << (12 if INTERPRETED else 31)
    source = torch.empty(gib, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * gib / seconds(lambda: target.copy_(source))
    size = 64 if INTERPRETED else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    flops = {"bfloat16": 2 * size**3 / seconds(lambda: left @ right)}
    if not INTERPRETED:
        eights = [(x * 8).to(torch.float8_e4m3fn) for x in (left, right)]
        one = torch.ones((), device=device)
        flops["float8"] = (
            2
            * size**3
            / seconds(lambda: torch._scaled_mm(eights[0], eights[1].T, one, one, out_dtype=torch.bfloat16))
        )
        ints = [(x * 8).to(torch.int8) for x in (left, right)]
        flops["int8"] = 2 * size**3 / seconds(lambda: torch._int_mm(ints[0], ints[1].T))
    return Limits(copied, flops)

"""What this GPU reaches at best, measured, and how a kernel is timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton.testing import do_bench

from kernels.triton.platform import INTERPRETED

Product = Callable[[torch.Tensor, torch.Tensor], object]


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


def replayed(run: Callable[[], object]) -> Callable[[], object]:
    """Return what replays `run` from a CUDA graph, as decode steps do: a slow host takes longer for some launches than a GPU for
    their kernels."""
    if INTERPRETED:
        return run
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_rate(device: torch.device) -> float:
    """Return bytes per second, read and written."""
    num_bytes = 1 << (12 if INTERPRETED else 31)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source))


def product_rate(device: torch.device) -> float:
    """Return operations per second of bfloat16."""
    return _rate(_operands(device), lambda a, b: a @ b)


def measure(device: torch.device) -> Limits:
    """Measure all of them. What this GPU or this torch cannot do is left out, with a word about it."""
    operands = _operands(device)
    found = {"bfloat16": _rate(operands, lambda a, b: a @ b)}
    if not INTERPRETED:
        one = torch.ones((), device=device)
        products: dict[str, tuple[torch.dtype, Product]] = {
            "float8": (
                torch.float8_e4m3fn,
                lambda a, b: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16),
            ),
            "int8": (torch.int8, lambda a, b: torch._int_mm(a, b.T)),
        }
        for kind, (dtype, product) in products.items():
            try:
                found[kind] = _rate([(x * 8).to(dtype) for x in operands], product)
            except RuntimeError as error:
                print(f"{kind} products have no limit here: {error}", flush=True)
    return Limits(copy_rate(device), found)


def _operands(device: torch.device) -> list[torch.Tensor]:
    size = 64 if INTERPRETED else 8192
    return [torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2)]


def _rate(operands: list[torch.Tensor], product: Product) -> float:
    left, right = operands
    return 2 * len(left) ** 3 / seconds(lambda: product(left, right))

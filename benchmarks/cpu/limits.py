"""What the machine does at the most: how fast it reads memory, and how fast it multiplies square matrices.

The multiplications are PyTorch's; where Baton's own of that type is faster, that counts. Where PyTorch has no instructions for
short types (AVX2), it takes minutes for them, and float32 stands for what it would multiply. Where the processor has tiles (AMX),
their rate in registers counts for bfloat16 and int8: products of this size reach a fifth of it."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.cpu.shapes import Shape
from kernels.cpu.library import Isa, fastest_exact, loaded, native, tiles
from kernels.cpu.linear import Layout, packed
from kernels.cpu.prepacked import INT4_GROUP

Limits = dict[str, float]
_READ_BYTES = 512 << 20
_SIZE = 2048
_TIMES = 4
_SPINS = 200_000
INT_PRODUCT: Any = getattr(torch, "_int_mm")  # noqa: B009 - what PyTorch has for it is private


def measure_limits(threads: int, smoke: bool = False) -> Limits:
    """GB/s that are read, and billions of operations a second by type, with two for each multiplication."""
    torch.set_num_threads(threads)
    size = _SIZE // 16 if smoke else _SIZE
    a, b = torch.randn(size, size), torch.randn(size, size)
    half_a, half_b = a.bfloat16(), b.bfloat16()
    int_a, int_b = (torch.randint(-127, 127, (size, size), dtype=torch.int8) for _ in range(2))
    products: dict[str, list[Callable[[], object]]] = {
        "float32": [lambda: a @ b],
        "bfloat16": [lambda: half_a @ half_b],
        "int8": [lambda: INT_PRODUCT(int_a, int_b)],
    }
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        products = dict.fromkeys(products, products["float32"])
    memory = torch.ones(_READ_BYTES // (64 if smoke else 1), dtype=torch.uint8)
    found: Limits = {}
    if (library := native()) is not None:
        isa = fastest_exact()
        read = _least(lambda: library.baton_read(isa, memory.data_ptr(), memory.numel(), threads))
        own = {"float32": Layout.FLOAT32, "int8": Layout.INT8}
        for name, layout in own.items():
            matrix = packed(b, layout, INT4_GROUP)
            products[name] = [*products[name], lambda matrix=matrix: matrix.product(a, None)]
    else:
        read = _least(lambda: memory.view(torch.int64).sum())
    found["read_gb_s"] = round(memory.numel() / read / 1e9, 2)
    for name, ways in products.items():
        found[f"{name}_gop_s"] = round(2 * size**3 / min(map(_least, ways)) / 1e9, 1)
    if tiles() == "processor":
        for name, layout in {"bfloat16": Layout.BFLOAT16, "int8": Layout.INT8}.items():
            rate = in_registers(Isa.AMX, layout, threads, _SPINS)
            found[f"{name}_gop_s"] = round(max(rate, found[f"{name}_gop_s"]), 1)
    return found


def in_registers(isa: Isa, layout: Layout, threads: int, spins: int) -> float:
    """Return how many billions of operations a second `threads` threads do together, in registers alone."""
    with ThreadPoolExecutor(threads) as pool:

        def spin() -> int:
            return sum(pool.map(lambda _: loaded().baton_spin(isa, layout, spins), range(threads)))

        operations = 2 * spin()
        return operations / _least(spin) / 1e9


def merged(before: Limits, again: Limits) -> Limits:
    """The best of both."""
    return {name: max(value, before.get(name, 0.0)) for name, value in again.items()}


def roofline(limits: Limits, shape: Shape, bits: int, op: str, batch: int) -> float:
    """Tokens a second that no engine passes with weights of so many bits: they are read once a step, and each token multiplies
    all of them; a prompt's do not need the head. The faster of the products that such weights allow counts."""
    fastest = "int8" if bits < 16 else max(("float32", "bfloat16"), key=lambda name: limits[f"{name}_gop_s"])
    gop_s = limits[f"{fastest}_gop_s"]
    if op == "prefill":
        return gop_s * 1e9 / (2 * shape.layer_numbers)
    numbers = shape.layer_numbers + shape.head_numbers
    step_s = max(numbers * bits / 8 / limits["read_gb_s"] / 1e9, 2 * numbers * batch / gop_s / 1e9)
    return batch / step_s


def _least(run: Callable[[], object]) -> float:
    run()
    taken: list[float] = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)

"""What of the processor's rate of multiplying a prompt's products reach, and what of the memory's those of one row.

    python -m benchmarks.cpu.cpu_products [--json FILE] [--rows 96 512 2048] [--rounds 40] [--smoke]

Matrices of a layer of Qwen2.5-0.5B, one thread. The rate of an instruction is that of a loop that multiplies and adds up in
registers, by the instruction that the way uses; oneDNN's bfloat16 is PyTorch's, with packed matrices, where the processor
allows it (not with AVX2 alone). `of bfloat16` rounds rows and uses the instruction for products of bfloat16, which is forced
here: Baton uses it where its rate is higher. `by tiles` is there where the processor has tiles, and goes by vectors for few
rows of int8 and int4 (`TILES_FROM` of `kernels/cpu/src/linear.cpp`). All take turns, by the processor's time, and the best of
the rounds counts, since others share the machine. `one row` multiplies with the matrix of a head in bfloat16, beside plain
reading of as many bytes."""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cpu.cpu_weights import HEAD, LAYER
from benchmarks.report import parser, write
from kernels.cpu.library import Isa, fastest_exact, fastest_of_bfloat16, instruction_sets, native, tiles
from kernels.cpu.linear import Layout, packed
from kernels.cpu.prepacked import INT4_GROUP, in_blocks, linear

PREDICTION = (
    "in every matrix int8 reaches 0.78 of its instruction's rate in registers with 96 rows and 0.85 with 512, int4, whose groups "
    "of 32 have whole steps, 0.74 and 0.78, bfloat16 made float32 0.82 of float32's instruction, and float32 0.80. With 2,048 "
    "rows the largest matrix loses a tenth more to memory that is new in each call. The instruction for products of bfloat16 has "
    "half of float32's rate on Intel's processors and is not chosen there; oneDNN's bfloat16 takes 1.9 times as long as Baton's. "
    "One row's product reads as fast as plain reading does"
)
SPINS = 100_000
SHAPES = {"qkv": LAYER[0], "output": LAYER[1], "gate and up": LAYER[2], "down": LAYER[3]}
ONEDNN = "oneDNN bfloat16"
Way = tuple[str, Isa, Layout]
"""(name, instruction set, layout)"""


def ways() -> list[Way]:
    exact = fastest_exact()
    made = [("float32", exact, Layout.FLOAT32), ("bfloat16", exact, Layout.BFLOAT16)]
    if Isa.AVX512_BF16 in instruction_sets():
        made.append(("of bfloat16", Isa.AVX512_BF16, Layout.BFLOAT16))
    made += [("int8", exact, Layout.INT8), ("int4", exact, Layout.STEPS4)]
    if tiles() == "processor":
        layouts = {"bfloat16": Layout.BFLOAT16, "int8": Layout.INT8, "int4": Layout.STEPS4}
        made += [(f"{name} by tiles", Isa.AMX, layout) for name, layout in layouts.items()]
    return made


def best(rounds: int, work: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Each one's best rate, of `rounds` in which all take turns; work: operations of one call."""
    found = dict.fromkeys(work, 0.0)
    for _ in range(rounds):
        for name, run in work.items():
            start = time.process_time()
            operations = run()
            found[name] = max(found[name], operations / (time.process_time() - start) / 1e9)
    return found


def spin(way: Way) -> Callable[[], float]:
    library: Any = native()
    return lambda: 2.0 * library.baton_spin(way[1], way[2], SPINS)


def products(shape: tuple[int, int], num_rows: int) -> dict[str, Callable[[], float]]:
    """{way: a product of so many rows with a matrix of that shape}"""
    matrix, x = 0.05 * torch.randn(shape), torch.randn(num_rows, shape[1])
    operations = 2.0 * num_rows * shape[0] * shape[1]

    def native_one(way: Way) -> Callable[[], float]:
        panels = packed(matrix, way[2], INT4_GROUP, way[1])
        return lambda: operations * (len(panels.product(x, None)) > 0)

    work = {way[0]: native_one(way) for way in ways()}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        rows, blocks = x.bfloat16(), in_blocks(matrix.bfloat16())
        work[ONEDNN] = lambda: operations * (len(linear(rows, blocks, None)) > 0)
    return work


def one_row(rounds: int, shape: tuple[int, int]) -> dict[str, float]:
    """GB/s of a product with one row, and of reading."""
    library: Any = native()
    panels, x = packed(0.05 * torch.randn(shape), Layout.BFLOAT16), torch.randn(1, shape[1])
    size = panels.data.numel()

    def multiply() -> float:
        panels.product(x, None)
        return size

    def read() -> float:
        library.baton_read(panels.isa, panels.data.data_ptr(), size, 1)
        return size

    return best(rounds, {"product": multiply, "reading": read})


def measured(num_rows: int, rounds: int, shapes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Each matrix's rates with so many rows, and what they are of their instruction's."""
    spins = {f"{way[0]} in registers": spin(way) for way in ways()}
    found = {name: best(rounds, spins | products(shape, num_rows)) for name, shape in shapes.items()}
    shares: dict[str, dict[str, float]] = {}
    for name, rates in found.items():
        limits = {way[0]: rates[f"{way[0]} in registers"] for way in ways()}
        shares[name] = {way: round(rates[way] / limit, 3) for way, limit in limits.items()}
        cells = "   ".join(f"{way} {rates[way]:.0f} ({share:.2f})" for way, share in shares[name].items())
        theirs = f"   {ONEDNN} {rates[ONEDNN]:.0f}" if ONEDNN in rates else ""
        print(f"{num_rows:5} {name:12} {cells}{theirs}", flush=True)
    return {"num_rows": num_rows, "gop_s": found, "share_of_rate_in_registers": shares}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, nargs="+", default=[96, 512, 2048])
    options.add_argument("--rounds", type=int, default=40)
    args = options.parse_args()
    rounds, counts = (1, [16]) if args.smoke else (args.rounds, args.rows)
    assert native() is not None, "this measures native kernels"
    torch.set_num_threads(1)
    print(f"predicted: {PREDICTION}")
    shapes = {"qkv": SHAPES["qkv"]} if args.smoke else SHAPES
    by_rows = [measured(num_rows, rounds, shapes) for num_rows in counts]
    read = one_row(rounds, (1024, 64) if args.smoke else HEAD)
    print(f"one row      {read['product']:.1f} GB/s of {read['reading']:.1f}")
    chosen = fastest_of_bfloat16()
    content = {
        "prediction": PREDICTION,
        "by_rows": by_rows,
        "one_row_gb_s": read,
        "chosen_for_bfloat16": chosen.name if chosen is not None else None,
    }
    write(args.json, f"benchmarks.cpu.cpu_products --rows {' '.join(map(str, counts))}", content)


if __name__ == "__main__":
    main()

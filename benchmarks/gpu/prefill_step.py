"""A prompt's prefill in one step, beside what its products alone would take: `python -m benchmarks.gpu.prefill_step --json FILE`
(one GPU, a minute). Weights are made up.

Predicted, before anything was run on a GPU: the large model reaches 0.65 of the measured rate of a square product from 2,048
tokens on, whose products are wide enough, and 0.5 at 512; the small model, whose products are narrow, 0.4 at 2,048.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.prefill_step --interpret-smoke` runs it once, tiny, without a GPU: its times mean
nothing."""

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.limits import measure as measure_limits
from benchmarks.gpu.rank import BLOCK_SIZE, Rank, prefill_plan
from benchmarks.gpu.session import Verdict, begin, parser, write
from benchmarks.gpu.shapes import SHAPES, Shape
from engine.execution.runner import Runner
from kernels.triton.platform import INTERPRETED

Row = dict[str, Any]
PROMPTS = (8, 24) if INTERPRETED else (512, 2048, 8192)
_ROUNDS = 1 if INTERPRETED else 8


@torch.inference_mode()
def measure(shape: Shape, device: torch.device, flops: float) -> Iterator[Row]:
    rank = Rank.of(shape, max(PROMPTS), device)
    runner = Runner(rank.model, rank.pool, BLOCK_SIZE)
    step = 0
    for tokens in PROMPTS:
        times: list[float] = []
        for round_number in range(_ROUNDS + 1):
            result = runner.step(prefill_plan(step, tokens))
            step += 1
            times += [result.duration_s] if round_number else []
        step_s = statistics.median(times)
        rate = shape.prefill_flops(tokens) / step_s
        yield {
            "model": shape.name,
            "tokens": tokens,
            "step_ms": 1e3 * step_s,
            "tflops": rate / 1e12,
            "of_product": rate / flops,
        }


def verdicts(rows: list[Row]) -> list[Verdict]:
    """The target is for the large model's prompts that fill a step."""
    return [
        Verdict(f"prefill of 8B, {row['tokens']} tokens, of the product's rate", row["of_product"], 0.65)
        for row in rows
        if row["model"] == "8B" and row["tokens"] >= 2048
    ]


def main() -> None:
    args = parser(__doc__).parse_args()
    device = begin(args.interpret_smoke)
    flops = measure_limits(device).flops["bfloat16"]
    rows: list[Row] = []

    def save(complete: bool) -> None:
        content = {"product_tflops": flops / 1e12, "steps": rows}
        write(args.json, "benchmarks.gpu.prefill_step", device, content, verdicts(rows), complete=complete)

    print(f"{'':6} {'tokens':>7} {'ms':>9} {'TFLOP/s':>8} {'of product':>10}")
    for shape in SHAPES:
        for row in measure(shape, device, flops):
            rows.append(row)
            save(complete=False)
            print(
                f"{row['model']:6} {row['tokens']:7} {row['step_ms']:9.2f} {row['tflops']:8.1f} {row['of_product']:10.2f}",
                flush=True,
            )
    save(complete=True)


if __name__ == "__main__":
    main()

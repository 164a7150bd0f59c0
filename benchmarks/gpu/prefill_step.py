"""A prompt's prefill in one step, beside what its products alone would take: `python -m benchmarks.gpu.prefill_step --json FILE`
(one GPU, a minute). Weights are made up. Prompts are launched behind each other, as an instance does it.

Predicted, before anything was run on a GPU: the large model reaches 0.65 of the measured rate of a square product from 2,048
tokens on, whose products are wide enough, and 0.5 at 512; the small model, whose products are narrow, 0.4 at 2,048.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.prefill_step --interpret-smoke` runs it once, tiny, without a GPU: its times mean
nothing."""

import itertools
import statistics
from functools import cached_property, partial
from itertools import pairwise

import torch

from benchmarks.gpu.limits import product_rate
from benchmarks.gpu.rank import Rank, ahead, prefill_plan
from benchmarks.gpu.session import Results, Row, Verdict, begin, parser
from benchmarks.gpu.shapes import SHAPES, Shape
from engine.execution.runner import Runner
from kernels.triton.platform import INTERPRETED

PROMPTS = (8, 24) if INTERPRETED else (2048, 8192, 512)
_WARM, _ROUNDS = (1, 1) if INTERPRETED else (2, 8)


class Bench:
    """One shape's rank, which is made when it is first asked for."""

    def __init__(self, shape: Shape, device: torch.device, flops: float) -> None:
        self._shape, self._device, self._flops = shape, device, flops
        self._steps = itertools.count()

    @cached_property
    def _runner(self) -> Runner:
        return Rank.of(self._shape, max(PROMPTS), self._device).runner(1)

    @torch.inference_mode()
    def prompt(self, tokens: int) -> Row:
        plans = (prefill_plan(step, tokens) for step in itertools.islice(self._steps, _WARM + _ROUNDS))
        ended = [at for at, _ in ahead(self._runner, plans)]
        step_s = statistics.median(end - start for start, end in pairwise(ended[_WARM - 1 :]))
        rate = self._shape.prefill_flops(tokens) / step_s
        return {
            "model": self._shape.name,
            "tokens": tokens,
            "step_ms": 1e3 * step_s,
            "tflops": rate / 1e12,
            "of_product": rate / self._flops,
        }


def verdicts(rows: dict[str, Row]) -> list[Verdict]:
    """The target is for the large model's prompts that fill a step."""
    return [
        Verdict(f"prefill of 8B, {row['tokens']} tokens, of the product's rate", row["of_product"], 0.65)
        for row in rows.values()
        if row["model"] == "8B" and row["tokens"] >= 2048
    ]


def main() -> None:
    args = parser(__doc__).parse_args()
    device = begin(args.interpret_smoke)
    results = Results(args.json, "benchmarks.gpu.prefill_step", device, verdicts)
    flops = product_rate(device)
    for shape in SHAPES:
        bench = Bench(shape, device, flops)
        names = {f"{shape.name}, {tokens} tokens": tokens for tokens in PROMPTS}
        for name in results.missing(names):
            results.make(name, partial(bench.prompt, names[name]))
    results.end()


if __name__ == "__main__":
    main()

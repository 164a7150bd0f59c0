"""Where a CPU's step spends its processor time, by the operations of the model, with native attention and with PyTorch's.

    python -m benchmarks.cpu.cpu_step [--json FILE] [--rounds 3] [--quantization int8] [--smoke]

Qwen2.5-0.5B's shape with weights that are made up (`model.load_format: dummy`), one thread, through the ranks' own runner: steps
of 1, 8 and 32 sequences with 512 and 2,048 tokens each, and one of 512 tokens of a prompt. Each operation is timed by the
processor time that passes during its calls, so that others' work on the machine counts little; `rest` is everything between the
calls: Python, the embedding, the choice of tokens. Layers are computed one operation after the other, also where one call would
compute them all: `cpu_fused.py` compares these two. Both ways of attention take turns; of the rounds the one with the least
total counts."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from benchmarks.cpu.cpu_weights import shape_of_model
from benchmarks.report import parser, write
from core.config.cluster_config import ClusterConfig, EngineConfig, ModelConfig
from engine.execution.step_meter import PromptPiece, StepMeter
from kernels.cpu.prepacked import WeightFormat, prepacked_ops
from kernels.ops import FeedForward, GatedBlock, Ops
from kernels.torch.paged_attention import PagedAttention
from kernels.torch.reference import no_fusing

PREDICTION = (
    "products take more than 0.8 of every step with 512 tokens, attention by PyTorch 0.3 of one of 32 with 2,048, all else below "
    "0.1; native attention takes half of PyTorch's time, for one sequence as long"
)
TIMED = ("linear", "paged_attention", "rope_write_kv", "rms_norm", "add_rms_norm", "feed_forward", "sample")
SETTINGS = {"bench": ((512, 2048), (1, 8, 32)), "smoke": ((16,), (1, 2))}
Shares = dict[str, float]
"""{operation: milliseconds of the processor}"""
Way = Literal["native", "torch"]
WAYS: tuple[Way, ...] = ("native", "torch")


class Clock:
    """Adds up what the calls of each operation take. `way` says whose attention the next step has."""

    def __init__(self) -> None:
        self.taken: defaultdict[str, float] = defaultdict(float)
        self.way: Way = "native"

    def timed(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.process_time()
            found = operation(*arguments)
            self.taken[name] += time.process_time() - start
            return found

        return run

    def watch(self, ops: Ops) -> Ops:
        by_way = {"native": ops.paged_attention, "torch": PagedAttention()}
        either = replace(ops, paged_attention=lambda *arguments: by_way[self.way](*arguments))
        timed = {name: self.timed(name, getattr(either, name)) for name in TIMED if name != "feed_forward"}

        def feed_forward(block: GatedBlock, in_order: FeedForward) -> FeedForward:
            return self.timed("feed_forward", ops.feed_forward(block, in_order))

        return replace(ops, fuse=no_fusing, feed_forward=feed_forward, **timed)


def shares(meter: StepMeter, clock: Clock, pieces: list[PromptPiece], rounds: int) -> dict[Way, Shares]:
    found: dict[Way, list[Shares]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):
        for way in WAYS:
            clock.way = way
            clock.taken.clear()
            start = time.process_time()
            meter.measure(pieces)
            total = 1e3 * (time.process_time() - start)
            parts = {name: 1e3 * clock.taken[name] for name in TIMED}
            found[way].append({"total": total, **parts, "rest": total - sum(parts.values())})
    return {way: min(rows, key=lambda parts: parts["total"]) for way, rows in found.items()}


def show(step: str, by_way: dict[Way, Shares]) -> None:
    for way, row in by_way.items():
        cells = " ".join(f"{row[name]:8.1f} ({row[name] / row['total']:.2f})" for name in (*TIMED, "rest"))
        print(f"{step:20} {way:6} {row['total']:9.1f} {cells}", flush=True)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    args = options.parse_args()
    contexts, batches = SETTINGS["smoke" if args.smoke else "bench"]
    clock = Clock()

    def ops(weights: WeightFormat) -> Ops:
        return clock.watch(prepacked_ops(weights))

    print(f"predicted: {PREDICTION}")
    print(f"{'':27} {'total':>9} " + " ".join(f"{name:>15}" for name in (*TIMED, "rest")))
    with tempfile.TemporaryDirectory() as name, patch("kernels.select.prepacked_ops", ops):
        shape_of_model(args.smoke).save_pretrained(name)
        model = ModelConfig(path=name, quantization=args.quantization, load_format="dummy")
        blocks = max(contexts) * max(batches) // 16 + 64
        engine = EngineConfig(num_threads=1, num_blocks=blocks, device="cpu", max_batch_tokens=1024)
        meter = StepMeter(ClusterConfig(model=model, engine=engine), Path(name))
        steps = {f"decode {b} at {n}": [PromptPiece(n - 1, 1)] * b for n in contexts for b in batches}
        steps[f"a prompt of {contexts[0]}"] = [PromptPiece(0, contexts[0])]
        found: dict[str, dict[Way, Shares]] = {}
        for step, pieces in steps.items():
            found[step] = shares(meter, clock, pieces, 0 if args.smoke else args.rounds)
            show(step, found[step])
        meter.close()
    content = {"prediction": PREDICTION, "quantization": args.quantization, "cpu_ms": found}
    write(args.json, f"benchmarks.cpu.cpu_step --quantization {args.quantization}", content)


if __name__ == "__main__":
    main()

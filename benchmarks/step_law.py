"""How far off predictions of steps with a piece of a prompt are: by one plane, and by the longer of reading and computing.

    python -m benchmarks.step_law [--json FILE] [--cpu-steps N]

Both learn from the same steps in the same order, some that only decode, some with a piece of a prompt beside up to 64 sequences,
and are asked for others of the same kind. Modelled devices are the roofline of `sim.catalogue` with 3 % of noise, and one step
in a hundred takes five times as long; those that are predicted have neither. The real one is the CPU engine on the embedded
model, with smaller steps: what is predicted has its noise, too.
Prediction, written first: where devices are the roofline, the plane is off by 8 % in the mean and the other by 1 %; on the CPU,
where reading and computing take turns, both are off by as much, 10 %."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from benchmarks.report import parser, write
from cluster.instance.rank_memory import memory_of_replica
from core.config import load
from core.steps import chunk_pairs
from engine.execution.step_meter import PromptPiece, StepMeter
from engine.planning.step_time_fit import StepFit, StepFits
from models.hub import resolve
from sim.catalogue import GPUS, MODELS, Gpu, step_cost

_H100 = GPUS["H100"]
DEVICES: dict[str, Gpu] = {
    "H100": _H100,
    "A100": GPUS["A100"],
    "L40S": GPUS["L40S"],
    "H100, memory x 1/2": replace(_H100, memory_bytes_per_s=_H100.memory_bytes_per_s / 2),
    "H100, memory x 2": replace(_H100, memory_bytes_per_s=_H100.memory_bytes_per_s * 2),
    "H100, compute x 1/2": replace(_H100, flop_per_s=_H100.flop_per_s / 2),
    "H100, compute x 2": replace(_H100, flop_per_s=_H100.flop_per_s * 2),
}
_NUM_STEPS = 1200
_TRAINED = 0.75


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest that steps are made of."""

    batch: int
    context: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Step:
    pieces: tuple[PromptPiece, ...]
    duration_s: float

    @property
    def sizes(self) -> tuple[int, int, int]:
        """New tokens, contexts, sequences."""
        tokens = sum(piece.count for piece in self.pieces)
        return tokens, tokens + sum(piece.start for piece in self.pieces), len(self.pieces)

    @property
    def num_pairs(self) -> float:
        """The pairs of the prompt, which comes last."""
        return chunk_pairs(self.pieces[-1].start, self.pieces[-1].count)

    @property
    def decodes(self) -> bool:
        return all(piece.count == 1 for piece in self.pieces)


def shapes(sizes: Sizes, num: int, seed: int) -> list[tuple[PromptPiece, ...]]:
    """Return steps in turn, two of three with a piece of a prompt."""
    rng, found = random.Random(seed), list[tuple[PromptPiece, ...]]()
    for number in range(num):
        batch = round(math.exp(rng.uniform(0, math.log(sizes.batch))))
        pieces = [PromptPiece(rng.randint(16, sizes.context), 1) for _ in range(batch)]
        if number % 3:
            count = round(math.exp(rng.uniform(math.log(16), math.log(sizes.chunk))))
            pieces.append(PromptPiece(rng.choice((0, rng.randint(0, sizes.context))), count))
        found.append(tuple(pieces))
    return found


def modelled(gpu: Gpu, num: int) -> list[Step]:
    cost, rng, found = step_cost(gpu, MODELS["llama-3.1-8b"]), random.Random(1), list[Step]()
    for number, pieces in enumerate(shapes(Sizes(64, 4000, 2048), num, 0)):
        step = Step(pieces, 0.0)
        tokens, context, seqs = step.sizes
        pairs = sum(chunk_pairs(piece.start, piece.count) for piece in pieces)
        true_s = cost.step_s(tokens, context, pairs, seqs)
        if number < _TRAINED * num:
            true_s *= 5 if number % 100 == 99 else rng.gauss(1, 0.03)
        found.append(Step(pieces, true_s))
    return found


def measured(num: int) -> list[Step]:
    """Return steps of the real CPU engine."""
    config = load(None, {}, {"model.path": "embedded"})
    folder = resolve(config.model.path)
    meter = StepMeter(config, folder, memory_of_replica(config, "decode", config.decode, None))
    steps = shapes(Sizes(16, 400, 256), num, 0)
    for pieces in steps[:20]:
        meter.measure([*pieces])
    found = [Step(pieces, meter.measure([*pieces])) for pieces in steps]
    meter.close()
    return found


def errors(steps: Sequence[Step]) -> dict[str, float]:
    """Return the mean, median and 95th percentile of what both are off by, in per cent, and microseconds of the processor to
    learn a step."""
    num = int(_TRAINED * len(steps))
    plane, law = StepFit(), StepFits()
    prompts = [step for step in steps[:num] if not step.decodes]
    began_at = time.process_time()
    for step in prompts:
        plane.observe(*step.sizes, step.duration_s, step.num_pairs)
        plane.model()
    plane_s, began_at = time.process_time() - began_at, time.process_time()
    for step in steps[:num]:
        if step.decodes:
            law.observe_decode(*step.sizes, step.duration_s)
        else:
            law.observe_mixed(*step.sizes, step.duration_s, step.num_pairs)
    law_s = time.process_time() - began_at
    mixed = [step for step in steps[num:] if not step.decodes]
    flat, models = plane.model(), law.models
    return {
        **_off("plane", mixed, lambda step: flat.step_s(*step.sizes, step.num_pairs)),
        **_off("law", mixed, lambda step: models.mixed_step_s(*step.sizes, step.num_pairs)),
        "plane_learns_us": round(1e6 * plane_s / len(prompts), 1),
        "law_learns_us": round(1e6 * law_s / num, 1),
    }


def _off(name: str, steps: Sequence[Step], predict: Callable[[Step], float]) -> dict[str, float]:
    off = sorted(abs(predict(step) / step.duration_s - 1) for step in steps)
    return {
        f"{name}_mean_percent": round(100 * fmean(off), 2),
        f"{name}_median_percent": round(100 * median(off), 2),
        f"{name}_p95_percent": round(100 * off[int(0.95 * len(off))], 2),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cpu-steps", type=int, default=600, help="Steps of the real engine.")
    args = options.parse_args()
    num, num_cpu = (60, 30) if args.smoke else (_NUM_STEPS, args.cpu_steps)
    found = {name: errors(modelled(gpu, num)) for name, gpu in DEVICES.items()}
    found["CPU engine"] = errors(measured(num_cpu))
    for name, row in found.items():
        print(f"{name:20} " + "  ".join(f"{key} {value:6.2f}" for key, value in row.items()))
    planes = [found[name]["plane_mean_percent"] for name in DEVICES]
    laws = [found[name]["law_mean_percent"] for name in DEVICES]
    means = {"plane_mean_percent": round(fmean(planes), 2), "law_mean_percent": round(fmean(laws), 2)}
    write(args.json, "benchmarks.step_law", {"modelled": means, "devices": found})


if __name__ == "__main__":
    main()

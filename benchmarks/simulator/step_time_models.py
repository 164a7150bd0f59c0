"""How far off predictions of steps are: with a piece of a prompt by one plane, and by the longer of reading and computing; where
experts are routed by a line, and by a model that knows which part of them a token uses.

    python -m benchmarks.simulator.step_time_models [--json FILE] [--cpu-steps N]

Both learn from the same steps in the same order, some that only decode, some with a piece of a prompt beside up to 64 sequences,
and are asked for others of the same kind. Modelled devices are the roofline of `sim.catalogue.catalogue` with 3 % of noise, and
one step in a hundred takes five times as long; those that are predicted have neither. The real one is the CPU engine on the
embedded model, with smaller steps: what is predicted has its noise, too. Models with routed experts decode up to 512 sequences; a
`skewed` one prefers some of its experts: how often each is used is log-normal, with a deviation of 1 of the logarithm.
Prediction, written first: where devices are the roofline, the plane is off by 8 % in the mean and the other by 1 %; on the CPU,
where reading and computing take turns, both are off by as much, 10 %. Of steps that only decode, where experts are routed: the
line is off by 20 % in the mean, the model by 1, and by 4 where the router prefers some."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from benchmarks.goodput.devices import DEVICES as SERVING
from benchmarks.report import parser, write
from cluster.instance.rank_memory import memory_of_replica
from core.config.cluster_config import load
from core.cost.steps import UNKNOWN_STEPS, StepModels, chunk_pairs, with_experts
from engine.execution.step_meter import PromptPiece, StepMeter
from engine.planning.step_time_fit import StepFit, StepFits
from models.files.hub import resolve
from sim.catalogue.catalogue import GPUS, MODELS, Gpu, step_cost
from sim.catalogue.cost import ModelledStep, StepCost

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
EXPERTS = ("MoE on 8", "Mixtral on 2", "Qwen3-30B", "gpt-oss-120b")
"""The devices of `benchmarks.goodput.devices` whose models have routed experts."""
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


@dataclass(frozen=True, slots=True)
class Skewed:
    """A device whose model uses some of its experts more often than others."""

    common: StepCost
    """What a step takes beside reading routed experts."""
    experts_read_s: float
    chances: tuple[float, ...]
    """How likely a token is to use each of them."""
    unread_decay: float

    def step_s(self, num_tokens: int, context_tokens: int, num_pairs: float, num_seqs: int) -> float:
        reads_s = self.common.memory_s(num_tokens, context_tokens, num_seqs)
        reads_s += self.experts_read_s * fmean(1 - (1 - chance) ** num_tokens for chance in self.chances)
        return self.common.overhead_s + max(self.common.compute_s(num_tokens, num_pairs), reads_s)


def skewed(cost: StepCost, num_experts: int = 256) -> Skewed:
    rng = random.Random(2)
    weights = [rng.lognormvariate(0, 1) for _ in range(num_experts)]
    mean = fmean(weights)
    return Skewed(
        replace(cost, experts_read_s=0.0),
        cost.experts_read_s,
        tuple(min(1.0, cost.expert_share * weight / mean) for weight in weights),
        cost.unread_decay,
    )


def modelled(cost: ModelledStep, sizes: Sizes, num: int) -> list[Step]:
    rng, found = random.Random(1), list[Step]()
    for number, pieces in enumerate(shapes(sizes, num, 0)):
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
    plane = StepFit()
    prompts = [step for step in steps[:num] if not step.decodes]
    began_at = time.process_time()
    for step in prompts:
        plane.observe(*step.sizes, step.duration_s, step.num_pairs)
        plane.model()
    plane_s, began_at = time.process_time() - began_at, time.process_time()
    models = learned(steps[:num], UNKNOWN_STEPS)
    model_s = time.process_time() - began_at
    mixed = [step for step in steps[num:] if not step.decodes]
    flat = plane.model()
    return {
        **_off("plane", mixed, lambda step: flat.step_s(*step.sizes, step.num_pairs)),
        **_off("model", mixed, lambda step: models.mixed_step_s(*step.sizes, step.num_pairs)),
        "plane_learns_us": round(1e6 * plane_s / len(prompts), 1),
        "model_learns_us": round(1e6 * model_s / num, 1),
    }


def experts_errors(cost: ModelledStep, num: int) -> dict[str, float]:
    """Return the same of steps that only decode and of those with a piece of a prompt, by a line of tokens and by the model that
    knows which part of the experts a token uses."""
    steps = modelled(cost, Sizes(512, 4000, 8192), num)
    num_trained, found = int(_TRAINED * num), dict[str, float]()
    decoding = [step for step in steps[num_trained:] if step.decodes]
    mixed = [step for step in steps[num_trained:] if not step.decodes]
    for name, known in (
        ("line", UNKNOWN_STEPS),
        ("model", with_experts(UNKNOWN_STEPS, cost.unread_decay)),
    ):
        began_at = time.process_time()
        models = learned(steps[:num_trained], known)
        took_s = time.process_time() - began_at
        found |= _off(f"{name}_decode", decoding, lambda step: models.decode.step_s(*step.sizes))  # noqa: B023
        found |= _off(
            f"{name}_prompt",
            mixed,
            lambda step: models.mixed_step_s(*step.sizes, step.num_pairs),  # noqa: B023
        )
        found[f"{name}_learns_us"] = round(1e6 * took_s / num_trained, 1)
    return found


def learned(steps: Sequence[Step], known: StepModels) -> StepModels:
    """Return what an instance that begins with `known` has learned from `steps`."""
    fits = StepFits(known)
    for step in steps:
        if step.decodes:
            fits.observe_decode(*step.sizes, step.duration_s)
        else:
            fits.observe_mixed(*step.sizes, step.duration_s, step.num_pairs)
    return fits.models


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
    found = {
        name: errors(modelled(step_cost(gpu, MODELS["llama-3.1-8b"]), Sizes(64, 4000, 2048), num))
        for name, gpu in DEVICES.items()
    }
    found["CPU engine"] = errors(measured(num_cpu))
    experts = dict[str, dict[str, float]]()
    for name in EXPERTS:
        gpu, model = (device := SERVING[name]).gpu, device.read
        assert model is not None
        cost = step_cost(gpu, model, device.tp)
        experts[name] = experts_errors(cost, num)
        experts[f"{name}, skewed"] = experts_errors(skewed(cost), num)
    for name, row in (found | experts).items():
        print(f"{name:20} " + "  ".join(f"{key} {value:6.2f}" for key, value in row.items()))
    planes = [found[name]["plane_mean_percent"] for name in DEVICES]
    found_by_models = [found[name]["model_mean_percent"] for name in DEVICES]
    means = {
        "plane_mean_percent": round(fmean(planes), 2),
        "model_mean_percent": round(fmean(found_by_models), 2),
    }
    ways = [f"{name}_{kind}_mean_percent" for name in ("line", "model") for kind in ("decode", "prompt")]
    routed = {way: round(fmean(row[way] for row in experts.values()), 2) for way in ways}
    write(
        args.json,
        "benchmarks.simulator.step_time_models",
        {"modelled": means, "routed": routed, "devices": found, "experts": experts},
    )


if __name__ == "__main__":
    main()

"""What it costs that transformers computes a model's layers: a step beside Baton's own code and beside transformers alone.

    python -m benchmarks.engine.transformers_backend [--json FILE] [--threads 2] [--rounds 5] [--smoke]

Steps of a model with Qwen2.5-0.5B's shape and random weights, which both can compute: 512 tokens of a prompt, and decode steps of
1, 8 and 32 sequences with 128 tokens each. `backend` is `model.implementation: transformers`, in float32, by the ranks' own
runner. `own` is Baton's code, in float32, too; both `auto` with the 16-bit matrices that are kept unless somebody says otherwise.
`transformers` is its model called over its own cache of one tensor for each layer, which neither pages nor batches sequences of
different lengths, with its attention by PyTorch and the next token by argmax. Ways are timed in turns, and the least of the
rounds counts."""

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.cpu.cpu_weights import STEPS, make_model
from benchmarks.report import least_in_turns, parser, show_steps, write
from core.config.cluster_config import ClusterConfig, EngineConfig, ModelConfig
from engine.execution.step_meter import PromptPiece, StepMeter

PREDICTION = (
    "backend 0.75 times transformers' own time for one sequence and 0.6 for 8, since its matrices are packed as Baton's own are, "
    "1.0 for a prompt; with auto 0.35 and 0.5; own at most 5 % less than the backend. (Before matrices were packed: predicted "
    "1.0 to 1.15, measured 1.03 to 1.08.)"
)
WAYS: dict[str, ModelConfig] = {
    "backend": ModelConfig(dtype="float32", implementation="transformers"),
    "backend, auto": ModelConfig(implementation="transformers"),
    "own": ModelConfig(dtype="float32"),
    "own, auto": ModelConfig(),
}
PEER = "transformers"


class Peer:
    """transformers' model alone."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def measure(self, pieces: list[PromptPiece]) -> float:
        """Seconds of one step over sequences of equal length."""
        start, count, rows = pieces[0].start, pieces[0].count, len(pieces)
        tokens = torch.randint(1, 1000, (rows, start + count))
        cache = DynamicCache(config=self._model.config)
        with warnings.catch_warnings():
            # Newer releases have another name for the cache, which older ones do not know.
            warnings.simplefilter("ignore", FutureWarning)
            if start:
                self._model(tokens[:, :start], past_key_values=cache, logits_to_keep=1)
            started = time.perf_counter()
            out = self._model(tokens[:, start:], past_key_values=cache, logits_to_keep=1)
            out.logits[:, -1].argmax(-1).tolist()
            return time.perf_counter() - started


def step_times(folder: Path, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each step by each way."""
    engine = EngineConfig(num_threads=threads, kv_bytes=256 << 20, device="cpu", max_batch_tokens=1024)
    meters = {
        way: StepMeter(ClusterConfig(model=model, engine=engine), folder) for way, model in WAYS.items()
    }
    measures = {**{way: meter.measure for way, meter in meters.items()}, PEER: Peer(folder).measure}
    found = least_in_turns(STEPS, measures, rounds)
    for meter in meters.values():
        meter.close()
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), args.smoke)
        times = step_times(Path(name), args.threads, 0 if args.smoke else args.rounds)
    shares = {
        step: {way: round(ms / by_way[PEER], 2) for way, ms in by_way.items()}
        for step, by_way in times.items()
    }
    show_steps(times, shares)
    content = {
        "prediction": PREDICTION,
        "threads": args.threads,
        "step_ms": times,
        "time_over_transformers": shares,
    }
    write(args.json, f"benchmarks.engine.transformers_backend --threads {args.threads}", content)


if __name__ == "__main__":
    main()

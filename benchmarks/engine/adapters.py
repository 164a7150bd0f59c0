"""What a decode step costs whose sequences have adapters, by the same step without.

    python -m benchmarks.engine.adapters [--json FILE] [--rounds 9] [--threads 1] [--smoke]

Qwen2.5-0.5B's shape in 16 bits and in int8 with weights that are made up (`model.load_format: dummy`), beside them eight adapters
of rank 16 for all linear modules, through the ranks' own runner: steps of 8 and 32 sequences with 128 tokens each, which have
one of 0, 1, 4 or 8 adapters, those with the same side by side, as the scheduler plans them. `bare` is a second runner, which has
loaded none. All take turns in one process; the medians of the processor's time are compared, since others share the machine."""

import json
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from benchmarks.cpu.cpu_weights import shape_of_model
from benchmarks.report import parser, write
from core.config.cluster_config import ClusterConfig, EngineConfig, ModelConfig
from engine.execution.step_meter import PromptPiece, StepMeter
from models.families.table import read_spec
from models.lora.targets import targets_of

PREDICTION = (
    "in 16 bits a step of 8 sequences takes 1.15, 1.3 and 1.45 times as long with 1, 4 and 8 adapters, one of 32 takes 1.1, 1.2 "
    "and 1.4; in int8, whose own products read half as much, 1.25, 1.5 and 1.9 with 8 sequences; loaded adapters that no "
    "sequence has cost nothing (1.00)"
)
NUM_ADAPTERS, RANK = 8, 16
CONTEXT, BATCHES, COUNTS = 128, (8, 32), (0, 1, 4, 8)
QUANTIZATIONS: tuple[Literal["none", "int8"], ...] = ("none", "int8")


def make_adapters(model: Path, folder: Path) -> dict[str, str]:
    """Write adapters as PEFT does. Returns their folders by name."""
    targets = targets_of(read_spec(model))
    paths: dict[str, str] = {}
    for number in range(NUM_ADAPTERS):
        torch.manual_seed(number)
        own = folder / f"adapter{number}"
        own.mkdir()
        tensors = {
            f"base_model.model.{module}.lora_{side}.weight": torch.randn(shape) * 0.01
            for module, (outputs, inputs) in targets.items()
            for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
        }
        save_file(tensors, own / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
        (own / "adapter_config.json").write_text(json.dumps(config))
        paths[own.name] = str(own)
    return paths


def measure(
    folder: Path, paths: dict[str, str], quantization: Literal["none", "int8"], threads: int, rounds: int
) -> list[dict[str, float | int | str]]:
    """A row for each batch and number of adapters, with medians in milliseconds."""
    engine = EngineConfig(num_threads=threads, num_blocks=1024, device="cpu", max_batch_tokens=1024)

    def meter(adapters: dict[str, str]) -> StepMeter:
        model = ModelConfig(
            path=str(folder), quantization=quantization, load_format="dummy", adapters=adapters
        )
        return StepMeter(ClusterConfig(model=model, engine=engine), folder)

    rows: list[dict[str, float | int | str]] = []
    with ExitStack() as stack:
        bare, ours = (stack.enter_context(closing(meter(adapters))) for adapters in ({}, paths))
        names = sorted(ours.size.adapter_keys)
        for batch in BATCHES:
            steps = {
                count: [
                    PromptPiece(CONTEXT - 1, 1, names[i * count // batch] if count else "")
                    for i in range(batch)
                ]
                for count in COUNTS
            }
            used: dict[int, list[float]] = {count: [] for count in (-1, *COUNTS)}
            for _ in range(rounds + 1):
                used[-1].append(_used_ms(bare, steps[0]))
                for count, step in steps.items():
                    used[count].append(_used_ms(ours, step))
            medians = {count: statistics.median(times[1:] or times) for count, times in used.items()}
            rows += [
                {
                    "quantization": quantization,
                    "batch": batch,
                    "adapters": count,
                    "bare_ms": medians[-1],
                    "step_ms": medians[count],
                    "ratio": medians[count] / medians[-1],
                }
                for count in COUNTS
            ]
    return rows


def _used_ms(meter: StepMeter, step: list[PromptPiece]) -> float:
    began_at = time.process_time()
    meter.measure(step)
    return 1e3 * (time.process_time() - began_at)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--threads", type=int, default=1)
    args = options.parse_args()
    print(f"predicted: {PREDICTION}")
    rows: list[dict[str, float | int | str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape_of_model(args.smoke).save_pretrained(folder / "model")
        paths = make_adapters(folder / "model", folder)
        for quantization in QUANTIZATIONS:
            rows += measure(
                folder / "model", paths, quantization, args.threads, 0 if args.smoke else args.rounds
            )
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
            )
        )
    write(
        args.json,
        f"benchmarks.engine.adapters --threads {args.threads}",
        {"prediction": PREDICTION, "results": rows},
    )


if __name__ == "__main__":
    main()

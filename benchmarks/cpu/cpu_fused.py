"""A CPU's decode step whose layers are one native call, beside the same step one operation after the other.

    python -m benchmarks.cpu.cpu_fused [--json FILE] [--rounds 15] [--threads 2] [--smoke]

Qwen2.5-0.5B's shape with weights that are made up (`model.load_format: dummy`), through the ranks' own runner: steps of 1, 8, 32
and 64 sequences with 128 tokens each. Both ways take turns in one process, with reading as many bytes as the weights have, as a
product reads panels. The medians of the rounds are compared, on the wall and by the processors' time, since others share the
machine; the share of reading is its median by the step's."""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch

from benchmarks.cpu.cpu_weights import shape_of_model
from benchmarks.report import parser, write
from core.config.cluster_config import ClusterConfig, EngineConfig, ModelConfig
from engine.execution.step_meter import PromptPiece, StepMeter
from kernels.cpu.library import fastest_exact, loaded
from kernels.cpu.prepacked import WeightFormat, bytes_per_number, prepacked_ops
from kernels.ops import Ops
from kernels.torch.reference import no_fusing

PREDICTION = (
    "with two threads one sequence's step takes 0.8 of the time with weights of 8 and 4 bits, and 0.9 with 16 bits; a step of 8 "
    "takes 0.9, and one of 64 as long as before"
)
Quantization = Literal["none", "int8", "int4"]
FORMATS: dict[Quantization, WeightFormat] = {"none": "half", "int8": "int8", "int4": "int4"}
CONTEXT, BATCHES = 128, (1, 8, 32, 64)
READ_BYTES = 128 << 20
Row = dict[str, float]


def one_by_one(weights: WeightFormat) -> Ops:
    return replace(prepacked_ops(weights), fuse=no_fusing)


def reader(threads: int, num_bytes: int) -> Callable[[], None]:
    memory, library, isa = torch.ones(num_bytes, dtype=torch.uint8), loaded(), fastest_exact()
    return lambda: library.baton_read(isa, memory.data_ptr(), num_bytes, threads)


def in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> Row:
    """Median milliseconds of each way, on the wall and of the processors."""
    found: dict[str, list[float]] = {f"{way}, {kind}": [] for way in ways for kind in ("wall", "processors")}
    for _ in range(rounds + 1):
        for way, run in ways.items():
            start, cpu_at = time.perf_counter(), time.process_time()
            run()
            found[f"{way}, wall"].append(1e3 * (time.perf_counter() - start))
            found[f"{way}, processors"].append(1e3 * (time.process_time() - cpu_at))
    return {name: statistics.median(times[1:] or times) for name, times in found.items()}


def measure(
    folder: Path, quantization: Quantization, threads: int, rounds: int, smoke: bool
) -> dict[str, Row]:
    """{step: medians and ratios}"""
    model = ModelConfig(path=str(folder), quantization=quantization, load_format="dummy")
    engine = EngineConfig(num_threads=threads, num_blocks=1024, device="cpu", max_batch_tokens=1024)
    config = ClusterConfig(model=model, engine=engine)
    read_bytes = READ_BYTES >> 10 if smoke else READ_BYTES
    weight_bytes = num_weights(smoke) * bytes_per_number(FORMATS[quantization], torch.float32)
    rows: dict[str, Row] = {}
    with ExitStack() as stack:
        fused = stack.enter_context(closing(StepMeter(config, folder)))
        with patch("kernels.select.prepacked_ops", one_by_one):
            plain = stack.enter_context(closing(StepMeter(config, folder)))
        for batch in BATCHES:
            pieces = [PromptPiece(CONTEXT - 1, 1)] * batch
            row = in_turns(
                {
                    "fused": lambda pieces=pieces: fused.measure(pieces),
                    "one by one": lambda pieces=pieces: plain.measure(pieces),
                    "read": reader(threads, read_bytes),
                },
                rounds,
            )
            least_ms = row["read, wall"] * weight_bytes / read_bytes
            ratios = {
                kind: row[f"fused, {kind}"] / row[f"one by one, {kind}"] for kind in ("wall", "processors")
            }
            shares = {
                f"{way}, share of reading": least_ms / row[f"{way}, wall"] for way in ("fused", "one by one")
            }
            rows[f"decode {batch}"] = row | ratios | shares
    return rows


def num_weights(smoke: bool) -> int:
    """Count what a step reads: the head is the embedding."""
    shape = shape_of_model(smoke)
    hidden, kv_heads = shape.hidden_size, shape.num_key_value_heads or shape.num_attention_heads
    attention = 2 * hidden + 2 * kv_heads * hidden // shape.num_attention_heads
    return hidden * (shape.num_hidden_layers * (attention + 3 * shape.intermediate_size) + shape.vocab_size)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    print(f"predicted: {PREDICTION}")
    found: dict[str, dict[str, Row]] = {}
    with tempfile.TemporaryDirectory() as name:
        shape_of_model(args.smoke).save_pretrained(name)
        for quantization in FORMATS:
            rounds = 0 if args.smoke else args.rounds
            found[quantization] = measure(Path(name), quantization, args.threads, rounds, args.smoke)
            for step, row in found[quantization].items():
                print(
                    f"{quantization:5} {step:10} "
                    + "  ".join(f"{way} {value:.2f}" for way, value in row.items())
                )
    write(
        args.json,
        f"benchmarks.cpu.cpu_fused --threads {args.threads}",
        {"prediction": PREDICTION, "results": found},
    )


if __name__ == "__main__":
    main()

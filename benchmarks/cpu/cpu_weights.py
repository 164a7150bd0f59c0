"""How a CPU keeps a model's matrices: what a step costs, what of the memory's rate it reaches, and what is lost.

    python -m benchmarks.cpu.cpu_weights [--json FILE] [--threads 2] [--rounds 5] [--smoke]

Steps of a model with Qwen2.5-0.5B's shape and random weights, by the ranks' own runner: 512 tokens of a prompt, and decode steps
of 1, 8 and 32 sequences with 128 tokens each. Ways are timed in turns, and the least of the rounds counts, since others share the
machine: on the wall, and of all threads' processors, which others lengthen less. `full`, `half`, `int8` and `int4` are the native
kernels'; oneDNN and FBGEMM are what computed before. `products` are all matrices' products with one row, without the rest of a
step, beside plain reading of as many bytes. The loss is the embedded model's over 4,096 tokens of the standard library, in nats a
token."""

import argparse
import inspect
import random
import tempfile
import textwrap
import time
import typing
from collections.abc import Callable, Generator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.cpu.cpu_ways import fbgemm_half, fbgemm_int8, onednn
from benchmarks.report import least_in_turns, parser, show_steps, write
from core.config.cluster_config import ClusterConfig, EngineConfig, ModelConfig
from engine.execution.step_meter import PromptPiece, StepMeter
from kernels.cpu.library import fastest_exact, native
from kernels.cpu.linear import Layout, Panels, packed
from kernels.cpu.prepacked import INT4_GROUP, WeightFormat, bytes_per_number
from kernels.ops import Ops
from models.files.hub import resolve
from models.registry import LoadOptions, load_model
from models.text.tokenizer import Tokenizer
from tests.models.checkpoints import CONTEXT, Paged

PREDICTION = (
    "products with one row reach 0.85 of the memory's rate with 16 and 8 bits, 0.75 with 4. A step of one sequence is 1.2 times "
    "(half) and 1.7 times (int8) as quick as FBGEMM's, int4 1.4 times as int8; of 8 sequences 1.8 times (half); of 32 2.3 times "
    "(half) and 1.4 times (int8); a prompt 1.3 times (half) and 1.5 times (int8); full 1.4 times as quick as oneDNN's for one "
    "sequence and as long for a prompt. int8 loses less than FBGEMM's 0.006 nats, int4 up to 0.1"
)
FORMER: dict[str, tuple[ModelConfig, Callable[[], Ops]]] = {
    "oneDNN full": (ModelConfig(dtype="float32"), onednn),
    "FBGEMM half": (ModelConfig(dtype="auto"), fbgemm_half),
    "FBGEMM int8": (ModelConfig(dtype="auto", quantization="int8"), fbgemm_int8),
}
NATIVE: dict[WeightFormat, ModelConfig] = {
    "full": ModelConfig(dtype="float32"),
    "half": ModelConfig(dtype="auto"),
    "int8": ModelConfig(dtype="auto", quantization="int8"),
    "int4": ModelConfig(dtype="auto", quantization="int4"),
}
AGAINST: dict[WeightFormat, str] = {
    "full": "oneDNN full",
    "half": "FBGEMM half",
    "int8": "FBGEMM int8",
    "int4": "FBGEMM int8",
}
"""What each way takes the place of, or the smallest that there was."""
LAYOUTS: dict[WeightFormat, Layout] = {
    "full": Layout.FLOAT32,
    "half": Layout.BFLOAT16,
    "int8": Layout.INT8,
    "int4": Layout.STEPS4,
}
LAYER = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
HEAD = (151_936, 896)
STEPS = {
    "prefill 512": [PromptPiece(0, 512)],
    "decode 1": [PromptPiece(128, 1)],
    "decode 8": [PromptPiece(128, 1)] * 8,
    "decode 32": [PromptPiece(128, 1)] * 32,
}


def shape_of_model(smoke: bool) -> Qwen2Config:
    """Qwen2.5-0.5B's, in bfloat16; small in smoke mode."""
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
        vocab_size=1024 if smoke else 151_936,
        hidden_size=64 if smoke else 896,
        intermediate_size=128 if smoke else 4864,
        num_hidden_layers=2 if smoke else 24,
        num_attention_heads=2 if smoke else 14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )


def make_model(folder: Path, smoke: bool) -> None:
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(shape_of_model(smoke))
    model.to(torch.bfloat16).save_pretrained(folder)


@contextmanager
def kept(ops: Callable[[], Ops]) -> Generator[None]:
    """Models that are loaded meanwhile have these operations."""
    with patch("kernels.select.prepacked_ops", lambda _: ops()):
        yield


Times = dict[str, dict[str, float]]
"""{step: {way: milliseconds}}"""


def step_times(folder: Path, threads: int, rounds: int, ways: AbstractSet[str]) -> tuple[Times, Times]:
    """Each step's time by each of `ways`, in turns: on the wall, and of all threads' processors."""
    meters: dict[str, StepMeter] = {}

    def start(way: str, model: ModelConfig) -> None:
        engine = EngineConfig(num_threads=threads, kv_bytes=256 << 20, device="cpu", max_batch_tokens=1024)
        meters[way] = StepMeter(ClusterConfig(model=model, engine=engine), folder)

    for way in sorted(ways & FORMER.keys()):
        model, ops = FORMER[way]
        with kept(ops):
            start(way, model)
    for way, model in NATIVE.items():
        if way in ways:
            start(way, model)
    cpu: Times = {step: dict.fromkeys(meters, float("inf")) for step in STEPS}

    def measured(way: str, step: str) -> float:
        start = time.process_time()
        took = meters[way].measure(STEPS[step])
        cpu[step][way] = min(cpu[step][way], 1e3 * (time.process_time() - start))
        return took

    wall = least_in_turns(
        {step: step for step in STEPS}, {way: partial(measured, way) for way in meters}, rounds
    )
    for meter in meters.values():
        meter.close()
    return wall, cpu


def product_times(threads: int, rounds: int, smoke: bool) -> dict[str, dict[str, float]]:
    """{way: bytes of all matrices, milliseconds of their products with one row, of reading as much, and the ratio of the two}."""
    torch.set_num_threads(threads)
    library, isa = native(), fastest_exact()
    assert library is not None, "this measures native kernels"
    found: dict[str, dict[str, float]] = {}
    for way, layout in LAYOUTS.items():
        shapes = [*LAYER * (1 if smoke else 24), *(() if smoke else (HEAD,))]
        matrices = [packed(0.05 * torch.randn(shape), layout, INT4_GROUP) for shape in shapes]
        rows = {shape: torch.randn(1, shape[1]) for shape in {*shapes}}
        num_bytes = int(sum(n * k for n, k in shapes) * bytes_per_number(way, torch.float32))
        memory = torch.ones(num_bytes, dtype=torch.uint8)

        def multiply(matrices: list[Panels] = matrices, rows: dict[Any, Tensor] = rows) -> None:
            for matrix in matrices:
                matrix.product(rows[matrix.shape], None)

        def read(memory: Tensor = memory) -> None:
            library.baton_read(isa, memory.data_ptr(), memory.numel(), threads)

        took = least_in_turns({"": None}, {"products": timed(multiply), "read": timed(read)}, 4 * rounds)[""]
        share = round(took["read"] / took["products"], 3)
        found[way] = {"bytes": num_bytes, **took, "share": share, "read_gb_s": num_bytes / took["read"] / 1e6}
    return found


def timed(run: Callable[[], None]) -> Callable[[None], float]:
    def seconds(_: None) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    return seconds


def by_former(times: Times) -> Times:
    """How many times as quick each native way is as the one that it takes the place of."""
    return {
        step: {way: round(by_way[former] / by_way[way], 2) for way, former in AGAINST.items()}
        for step, by_way in times.items()
    }


def losses(num_tokens: int) -> dict[str, float]:
    """Nats a token of the embedded model on modules of the standard library, `CONTEXT` tokens at a time."""
    folder = resolve("embedded")
    text = "".join(map(inspect.getsource, (argparse, inspect, textwrap, typing)))
    ids = Tokenizer(folder).encode(text)[:num_tokens]
    starts = range(0, len(ids) - CONTEXT, CONTEXT)
    found: dict[str, float] = {}
    for weights in NATIVE:
        paged = Paged(
            load_model(folder, "float32", torch.device("cpu"), options=LoadOptions(weights=weights)),
            1,
            random.Random(0),
        )
        total = 0.0
        for start in starts:
            piece = ids[start : start + CONTEXT + 1]
            logits = paged.step([(0, 0, piece[:-1])])[0]
            total += float(cross_entropy(logits, torch.tensor(piece[1:]), reduction="sum"))
        found[weights] = total / (len(starts) * CONTEXT)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    rounds = 0 if args.smoke else args.rounds
    products = product_times(args.threads, rounds, args.smoke)
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), args.smoke)
        # The float32 models have a run of their own: all models at once would take twelve gigabytes.
        wide = {"oneDNN full", "full"}
        parts = [
            step_times(Path(name), args.threads, rounds, ways) for ways in (wide, {*FORMER, *NATIVE} - wide)
        ]
    times, cpu_times = ({step: parts[0][i][step] | parts[1][i][step] for step in STEPS} for i in (0, 1))
    loss = losses(512 if args.smoke else 4096)
    for each in (times, cpu_times):
        show_steps(
            each,
            {step: dict.fromkeys(each[step], 1.0) | found for step, found in by_former(each).items()},
            "x",
        )
    print(
        "products     "
        + "   ".join(f"{way} {found['share']:.2f} of reading" for way, found in products.items())
    )
    print("loss         " + "   ".join(f"{way} {nats:.4f}" for way, nats in loss.items()))
    content = {
        "prediction": PREDICTION,
        "threads": args.threads,
        "isa": fastest_exact().name,
        "products": products,
        "step_ms": times,
        "speed_over_former": by_former(times),
        "step_cpu_ms": cpu_times,
        "cpu_speed_over_former": by_former(cpu_times),
        "loss": loss,
    }
    write(args.json, f"benchmarks.cpu.cpu_weights --threads {args.threads}", content)


if __name__ == "__main__":
    main()

"""How a CPU keeps a model's matrices: what a step costs, and what it loses.

    python -m benchmarks.cpu_weights [--json FILE] [--threads 2] [--rounds 5] [--smoke]

Steps of a model with Qwen2.5-0.5B's shape and random weights, by the ranks' own runner: 512 tokens of a prompt, and decode steps
of 1, 8 and 32 sequences with 128 tokens each. Ways are timed in turns, and the least of the rounds counts, since others share the
machine. `plain` is PyTorch's product with the float32 matrix as it lies: all steps were so before. `full` is float32 in oneDNN's
layout. `float16` is what `model.dtype: auto` keeps of a 16-bit checkpoint. `int8` is `model.quantization: int8`. The loss is the
embedded model's over 4,096 tokens of the standard library, in nats a token."""

import argparse
import inspect
import random
import tempfile
import textwrap
import typing
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.report import least_in_turns, parser, show_steps, write
from core.config import ClusterConfig, EngineConfig, ModelConfig
from engine.execution.step_meter import PromptPiece, StepMeter
from kernels.torch.prepacked import WeightFormat
from kernels.torch.reference import reference_ops
from models.hub import resolve
from models.registry import load_model
from models.tokenizer import Tokenizer
from tests.models.checkpoints import CONTEXT, Paged

PREDICTION = (
    "decode of one sequence 2 times (full), 2.8 times (float16) and 4 times (int8) as quick as plain; of 8 at least 2 times; a "
    "prompt 1.0 to 1.3 times, 1.6 with int8; float16 loses nothing, int8 up to 0.02 nats"
)
WAYS: dict[str, ModelConfig] = {
    "plain": ModelConfig(dtype="float32"),
    "full": ModelConfig(dtype="float32"),
    "float16": ModelConfig(dtype="auto"),
    "int8": ModelConfig(dtype="auto", quantization="int8"),
}
STEPS = {
    "prefill 512": [PromptPiece(0, 512)],
    "decode 1": [PromptPiece(128, 1)],
    "decode 8": [PromptPiece(128, 1)] * 8,
    "decode 32": [PromptPiece(128, 1)] * 32,
}


def make_model(folder: Path, smoke: bool) -> None:
    """Qwen2.5-0.5B's shape, in bfloat16."""
    config = Qwen2Config(
        vocab_size=1024 if smoke else 151_936,
        hidden_size=64 if smoke else 896,
        intermediate_size=128 if smoke else 4864,
        num_hidden_layers=2 if smoke else 24,
        num_attention_heads=2 if smoke else 14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


@contextmanager
def kept(way: str) -> Generator[None]:
    """Models that are loaded meanwhile keep matrices so."""
    if way != "plain":
        yield
        return
    with patch("kernels.select.prepacked_ops", lambda _: reference_ops()):
        yield


def step_times(folder: Path, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each step by each way."""
    meters: dict[str, StepMeter] = {}
    for way, model in WAYS.items():
        engine = EngineConfig(num_threads=threads, kv_bytes=256 << 20, device="cpu", max_batch_tokens=1024)
        with kept(way):
            meters[way] = StepMeter(ClusterConfig(model=model, engine=engine), folder)
    found = least_in_turns(STEPS, {way: meter.measure for way, meter in meters.items()}, rounds)
    for meter in meters.values():
        meter.close()
    return found


def losses(num_tokens: int) -> dict[str, float]:
    """Nats a token of the embedded model on modules of the standard library, `CONTEXT` tokens at a time."""
    folder = resolve("embedded")
    text = "".join(map(inspect.getsource, (argparse, inspect, textwrap, typing)))
    ids = Tokenizer(folder).encode(text)[:num_tokens]
    starts = range(0, len(ids) - CONTEXT, CONTEXT)
    ways: tuple[WeightFormat, ...] = ("full", "float16", "int8")
    found: dict[str, float] = {}
    for weights in ways:
        paged = Paged(
            load_model(folder, "float32", torch.device("cpu"), weights=weights), 1, random.Random(0)
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
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), args.smoke)
        times = step_times(Path(name), args.threads, 0 if args.smoke else args.rounds)
    ratios = {
        step: {way: round(by_way["plain"] / ms, 2) for way, ms in by_way.items()}
        for step, by_way in times.items()
    }
    loss = losses(512 if args.smoke else 4096)
    show_steps(times, ratios, "x")
    print("loss         " + "   ".join(f"{way} {nats:.4f}" for way, nats in loss.items()))
    content = {
        "prediction": PREDICTION,
        "threads": args.threads,
        "step_ms": times,
        "speed_over_plain": ratios,
        "loss": loss,
    }
    write(args.json, f"benchmarks.cpu_weights --threads {args.threads}", content)


if __name__ == "__main__":
    main()

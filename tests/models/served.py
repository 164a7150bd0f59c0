"""Tiny models that can be served: with the embedded model's tokenizer, and without an end of sequence."""

import random
import shutil
from pathlib import Path
from typing import Any

import torch

from models.files.hub import resolve
from tests.models.checkpoints import FAMILIES, make

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_served(folder: Path, family: str, draw: int) -> Any:
    """The reference; `folder` is what a server takes as its model."""
    return make_served_as(folder, FAMILIES[family](random.Random(f"{family}{draw}"), draw))


def make_served_as(folder: Path, config: Any) -> Any:
    """The same, of transformers' `config` with another vocabulary."""
    config.vocab_size, config.eos_token_id = 4096, None
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = 4096
    reference = make(folder, config, seed=2)
    reference.generation_config.eos_token_id = None
    for name in TOKENIZER:
        shutil.copy(resolve("embedded") / name, folder / name)
    return reference


def some_prompts(seed: int, count: int, shortest: int = 5) -> list[list[int]]:
    """Prompts of `shortest` and up to 55 more tokens; every other one begins as the one before it does."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for i in range(count):
        shared = prompts[-1][: rng.randint(1, min(30, len(prompts[-1])))] if i % 2 else []
        prompts.append(shared + [rng.randrange(2, 4096) for _ in range(rng.randint(shortest, shortest + 25))])
    return prompts


def greedy(reference: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    with torch.inference_mode():
        out = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt) :].tolist())

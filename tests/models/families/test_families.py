"""Every family against transformers, over randomly drawn tiny configurations."""

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.kept_model import tensors_of
from models.registry import load_model
from tests.models.checkpoints import COMPRESSED, CPU, FAMILIES, HYBRID, VOCAB, Paged, make
from tests.models.continuation import continuation

ALL = {**FAMILIES, **HYBRID, **COMPRESSED}
CASES = [
    pytest.param(family, i, marks=pytest.mark.turns(3, number=place + i))
    for place, family in enumerate(ALL)
    for i in range(6)
]
"""Each day has two of a family's configurations."""


@pytest.mark.parametrize(("family", "i"), CASES)
def test_logits_and_greedy_tokens_equal_transformers(family: str, i: int, tmp_path: Path) -> None:
    rng = random.Random(f"{family}{i}")
    reference = make(tmp_path, ALL[family](rng, i), seed=i)
    model = load_model(tmp_path, "float32", CPU)
    prompts = [
        [rng.randrange(2, VOCAB) for _ in range(n)] for n in (rng.randint(20, 50), rng.randint(1, 12), 33)
    ]
    with torch.inference_mode():
        expected = [reference(torch.tensor([p])).logits[0] for p in prompts]
    paged = Paged(model, len(prompts), rng)
    got: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        parts = []
        for s, prompt in enumerate(prompts):
            count = min(rng.choice((0, 1, 3, 8, 17)), len(prompt) - done[s])
            if count:
                parts.append((s, done[s], prompt[done[s] : done[s] + count]))
                done[s] += count
        if parts:
            for (s, _, _), logits in zip(parts, paged.step(parts), strict=True):
                got[s].append(logits)
    for rows, want in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.cat(rows), want, atol=1e-4, rtol=1e-4)
    check_greedy(reference, paged, prompts)


def check_greedy(reference: Any, paged: Paged, prompts: list[list[int]]) -> None:
    """40 tokens each, decoding all sequences together."""
    texts = [list(p) for p in prompts]
    for step in range(40):
        # A recurrent state has each token once: the prompts are computed anew.
        starts = [len(text) - 1 if step else 0 for text in texts]
        parts = [(s, start, texts[s][start:]) for s, start in enumerate(starts)]
        for text, logits in zip(texts, paged.step(parts), strict=True):
            last = logits[-1].clone()
            last[1] = -torch.inf  # the end-of-sequence id is hidden
            text.append(int(last.argmax()))
    for prompt, text in zip(prompts, texts, strict=True):
        said = text[len(prompt) :]
        assert said == continuation(reference, prompt, said, 40, barred=[1])


@pytest.mark.parametrize("family", ALL)
def test_weights_are_gone_when_nobody_uses_the_model(family: str, tmp_path: Path) -> None:
    """A search for garbage would free them, and keep all else in the process from running meanwhile."""
    make(tmp_path, ALL[family](random.Random(family), 0), seed=0)
    model = load_model(tmp_path, "float32", CPU)
    gc.collect()
    gc.disable()
    try:
        weights = [weakref.ref(tensor) for tensor in tensors_of(model)]
        assert len(weights) > 10
        del model
        assert not [weight for weight in weights if weight() is not None]
    finally:
        gc.enable()

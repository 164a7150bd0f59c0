"""One forward pass over an output tells what `generate` says token by token."""

import random
from typing import Any

import pytest
import torch

from tests.models.checkpoints import FAMILIES, VOCAB, make
from tests.models.continuation import continuation

PROMPT, LENGTH = (5, 9, 33, 2, 40), 30


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make(tmp_path_factory.mktemp("model"), FAMILIES["gemma2"](random.Random(1), 0), seed=1)
    model.generation_config.eos_token_id = None
    return model


def generated(reference: Any, count: int, ends: list[int], barred: list[int]) -> list[int]:
    out = reference.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=ends or None,
        suppress_tokens=barred or None,
        pad_token_id=0,
    )
    return out[0, len(PROMPT) :].tolist()


def test_what_generate_says_is_its_own_continuation(reference: Any) -> None:
    for seed in range(4):
        tokens = random.Random(seed).sample(range(VOCAB), 8)
        ends, barred = tokens[:seed], tokens[4:]
        said = generated(reference, LENGTH, ends, barred)
        assert continuation(reference, PROMPT, said, LENGTH, ends=ends, barred=barred) == said


def test_what_is_wrong_too_short_or_too_long_is_not(reference: Any) -> None:
    said = generated(reference, LENGTH, [], [])
    wrong = [*said[:7], (said[7] + 1) % VOCAB, *said[8:]]
    assert continuation(reference, PROMPT, wrong, LENGTH) == said[:8]
    assert continuation(reference, PROMPT, said[:9], LENGTH) == said[:10]
    assert continuation(reference, PROMPT, said, LENGTH - 2) == said[:-2]
    assert continuation(reference, PROMPT, [], LENGTH) == said[:1]
    end = said[5]
    assert continuation(reference, PROMPT, said, LENGTH, ends=[end]) == said[: said.index(end) + 1]

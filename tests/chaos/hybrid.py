"""A tiny model with recurrent layers in a chaos cluster. transformers, which made its checkpoint, says what is right."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.models.checkpoints import HYBRID
from tests.models.continuation import continuation
from tests.models.served import make_served_as

VOCAB = 4096
OVERRIDES: dict[str, Any] = {"engine.num_blocks": 600, "engine.num_threads": 1}
"""A recurrent state takes some 50 blocks: there is room for seven sequences, and checkpoints soon make way for others."""


class HybridModel:
    def __init__(self, folder: Path, family: str) -> None:
        """`family` is one of `HYBRID`."""
        folder.mkdir(parents=True)
        config = HYBRID[family](random.Random(3), 0)
        config.max_position_embeddings = 256
        self._reference = make_served_as(folder, config)
        self.overrides: dict[str, Any] = OVERRIDES | {"model.path": str(folder)}

    def prompt(self, number: int, num_tokens: int) -> tuple[int, ...]:
        rng = random.Random(number)
        return tuple(rng.randrange(VOCAB) for _ in range(num_tokens))

    def undisturbed(self, prompt: Sequence[int], said: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple(continuation(self._reference, prompt, said, count))

"""What a chaos cluster computes with, as its clients see it."""

from collections.abc import Sequence
from typing import Any, Protocol

from tests.chaos.witness import undisturbed


class Model(Protocol):
    overrides: dict[str, Any]
    """What its instances need in their configuration."""

    def prompt(self, number: int, num_tokens: int) -> tuple[int, ...]:
        """Return another one for each number. No two have a block in common."""
        ...

    def undisturbed(self, prompt: Sequence[int], said: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the tokens of a run in which nothing goes wrong, at least up to where `said` differs from them."""
        ...


class WitnessModel:
    """The device of `tests/chaos/witness.py`."""

    def __init__(self) -> None:
        self.overrides: dict[str, Any] = {}

    def prompt(self, number: int, num_tokens: int) -> tuple[int, ...]:
        return tuple(1000 * number + i for i in range(num_tokens))

    def undisturbed(self, prompt: Sequence[int], said: Sequence[int], count: int) -> tuple[int, ...]:
        return undisturbed(prompt, count)


WITNESS = WitnessModel()

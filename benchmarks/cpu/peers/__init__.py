"""What each peer's module does: `prepare` and `load`. They run in the peer's environment, which has nothing of Baton's needs.

Whole modules are imported by name, since each environment lacks the others' packages."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol


class Stamp(NamedTuple):
    """An instant: seconds of the wall, and of this process's processors."""

    wall_s: float
    cpu_s: float


def now() -> Stamp:
    return Stamp(time.perf_counter(), time.process_time())


class Engine(Protocol):
    """A loaded model. All tokens are sampled greedily and nothing ends a sequence before its length."""

    def prefill(self, prompt: list[int]) -> tuple[Stamp, Stamp]:
        """Return when the prompt was given and when its next token was there."""
        ...

    def decode(self, prompts: list[list[int]], steps: int) -> list[Stamp]:
        """Return `steps` + 1 instants: when the last sequence had its first token, and when all had each further one."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: Engine
    format: str
    """What the weights and the products are in, in the peer's own words."""
    version: str
    instructions: str = ""
    """The kernels that multiply, in the peer's own words; empty: oneDNN's log says it, or nobody."""


class Peer(Protocol):
    """A module of this package."""

    def prepare(self, checkpoint: Path, target: Path, bits: int) -> None:
        """Write to the new folder `target` what `load` needs. Raises Unsupported. Those of `AS_IT_IS` have no such function."""
        ...

    def load(self, checkpoint: Path, target: Path, bits: int, threads: int) -> Loaded:
        """Raises Unsupported."""
        ...


class Unsupported(Exception):
    """The peer has no such precision; the text says why."""


PEERS = ("baton", "transformers", "llama_cpp", "openvino", "ctranslate2", "vllm")
"""In the order in which they take turns."""
AS_IT_IS = ("baton", "transformers")
"""The peers that read the checkpoint itself, and are in Baton's own environment."""


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, 1000) for _ in range(count)]


def steps_together(advance: Callable[[], int], batch: int, steps: int) -> list[Stamp]:
    """Call `advance`, which computes a step and returns how many sequences have a token, until all of `batch` have one, and then
    `steps` times. Return the instants from when all had one."""
    while advance() < batch:
        pass
    stamps = [now()]
    for _ in range(steps):
        advance()
        stamps.append(now())
    return stamps


SLACK = 64
"""Tokens more than there are steps, for sequences that begin while others wait for their first token."""

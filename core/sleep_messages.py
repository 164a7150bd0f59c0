"""The messages by which a model's instances go to sleep and wake up (docs/adr/094-sleep-is-an-end-and-a-start.md).

frontend  -> scheduler   AskSleep, AskWake, KeepAwake
scheduler -> frontend    SleepAnswer
scheduler -> instance    GoToSleep, WakeUp
instance  -> scheduler   Asleep
"""

from dataclasses import dataclass
from typing import Literal

SleepLevel = int
"""1: weights stay in host memory. 2: weights are on disk only. The process stays in both."""
SleepState = Literal["falling asleep", "asleep", "waking"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoToSleep:
    """Take no new sequences, and give memory back when those that run are over."""

    level: SleepLevel
    pauses: bool = False
    """Sequences that run stop now, and go on after waking. Otherwise they are finished, for `timeout_s` at the most."""
    timeout_s: float = 0.0
    held: bool = False
    """Requests do not wake the instance: an operator does."""
    drops: bool = False
    """The KV in lower tiers is given up, too."""


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Take memory again, and serve. For an instance that is falling asleep: wake up after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asleep:
    """An instance that does not serve now, but may. It says so to every scheduler when something of it changes."""

    address: str
    state: SleepState
    level: SleepLevel
    prefills: bool
    decodes: bool
    held: bool = False
    wake_s: float = 0.0
    """How long waking is predicted to take, from its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSleep:
    """An operator wants all instances of the model asleep, until AskWake or, with `on_demand`, until a request comes."""

    nonce: int
    level: SleepLevel
    pauses: bool = False
    timeout_s: float = 0.0
    drops: bool = False


@dataclass(frozen=True, slots=True)
class AskWake:
    """An operator wants all instances of the model awake."""

    nonce: int


@dataclass(frozen=True, slots=True)
class SleepAnswer:
    """The scheduler has passed it on; the state is in `Status.sleepers`."""

    nonce: int
    why: str = ""
    """Why it has not; empty where it has."""


@dataclass(frozen=True, slots=True)
class KeepAwake:
    """A client says how long the model shall stay awake after its request (Ollama's `keep_alive`)."""

    seconds: float
    """Infinite: for ever. 0: it may sleep at once."""

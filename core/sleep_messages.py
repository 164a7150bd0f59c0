"""The messages by which a model's instances go to sleep and wake up (docs/adr/094-sleep-is-an-end-and-a-start.md), and those of
models that share memory (docs/adr/095-models-that-share-memory.md).

frontend  -> scheduler   AskSleep, AskWake, KeepAwake
scheduler -> frontend    SleepAnswer
scheduler -> instance    GoToSleep, WakeUp
instance  -> scheduler   Asleep
scheduler -> group       ModelDemand
group     -> scheduler   GroupOrder
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
    why: str = ""
    """Why it is held, where that is not because an operator wants it."""


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


@dataclass(frozen=True, slots=True)
class WaitingDemand:
    """Requests that wait, of one priority, and due at about the same time."""

    priority: int
    num: int
    left_s: float
    """Until their first tokens are due; negative once they are late."""


@dataclass(frozen=True, slots=True)
class ArrivedDemand:
    """Requests of one class that have come since the scheduler began."""

    priority: int
    target_s: float
    """How long after its arrival a request's first token is due."""
    num: int


GroupState = Literal["serving", "waking", "falling asleep", "asleep", "held", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """What one of several models that share memory is asked for, and whether it has some of that memory."""

    model: str
    state: GroupState
    """`asleep` only where every instance has said so: then it has no memory. `held`: the same, and it must not wake up."""
    order: tuple[int, int] = (0, 0)
    """The epoch and the number of the last GroupOrder that was carried out."""
    waiting: tuple[WaitingDemand, ...] = ()
    arrived: tuple[ArrivedDemand, ...] = ()
    num_running: int = 0
    age: float = 0.0
    """How long the oldest request has waited, as a share of how long it may."""
    wake_s: float = 0.0
    sleeps_in_s: float = 0.0
    """How long it stays awake at the least."""


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """A model shall have memory, or give it back. Orders that are not newer than the last one are ignored."""

    epoch: int
    """The epoch of the group's owner: one that comes later has a higher one."""
    number: int
    awake: bool | None
    """None: it stays as it is."""


SleepMessage = (
    GoToSleep | WakeUp | Asleep | AskSleep | AskWake | SleepAnswer | KeepAwake | ModelDemand | GroupOrder
)

"""The messages by which ingresses share limits (docs/adr/112-tenants.md).

An ingress takes shares of a limit ahead of need and gives back what it does not use. The scheduler that it asks answers from a
book of what all ingresses have taken, and tells the other schedulers, whose books are copies."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of something may be taken by all ingresses together: per minute, or of sequences at once."""

    whose: str
    """For people as well: `tenant 'acme'`, `key 'key_3f'`, `model 'qwen'`."""
    what: Literal["requests", "tokens", "sequences"]
    most: int


@dataclass(frozen=True, slots=True)
class Taken:
    """Amounts of a limit: (how many seconds ago, amount). A negative amount is given back, as of when it was taken. Of sequences
    there is one amount: all that the ingress has now."""

    limit: Limit
    amounts: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedShare:
    """`taken` is counted anyway. Nothing more is granted where `least` is not there, else up to `wanted`."""

    taken: Taken
    least: int = 0
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class AskShares:
    nonce: int
    asked: tuple[AskedShare, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    granted: int
    free: int
    """What is left of the limit for all ingresses; below zero where too much was taken."""
    wait_s: float = 0.0
    """Where nothing is granted: when it may be. Infinite: never."""
    reset_s: float = 0.0
    """When all of the limit is free again, if nobody takes more."""


@dataclass(frozen=True, slots=True)
class SharesGranted:
    """One for each that was asked for, in that order."""

    nonce: int
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class SharesTaken:
    """What an ingress has taken, for the schedulers that it has not asked."""

    ingress: str
    taken: tuple[Taken, ...]


@dataclass(frozen=True, slots=True)
class LimitBookCopy:
    """A scheduler's whole book, for one that it has just found."""

    taken: tuple[SharesTaken, ...]

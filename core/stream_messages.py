"""How a frontend goes on with an answer that another one began: what it asks decode instances, and what they keep."""

from dataclasses import dataclass

from core.types import Resumption, TokenOut

MISMATCH = "idempotency_mismatch"
ANOTHER_REQUEST = (
    "Idempotency-Key belongs to another request: its path or its body was not this one. Send the same again, or a "
    "header of its own"
)


def are_different(one: Resumption | None, another: Resumption | None) -> bool:
    """Return whether two requests under one name are not the same one sent again. Of some it is not known."""
    return one is not None and another is not None and b"" != one.digest != another.digest != b""


@dataclass(frozen=True, slots=True)
class FindStream:
    """Ask for the sequences of an answer whose client has come back."""

    nonce: int
    stream: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSequence:
    """One attempt that an instance has, or has ended lately."""

    request_id: str
    attempt: int
    num_sent: int
    """How many of its tokens were sent to a frontend."""
    num_noted: int = 0
    """How many of them are in the ledger of usage, or will be: a living frontend has them and has not said yet what it noted."""
    runs: bool
    """Whether it is generated still; a frontend attaches to it then."""
    tokens: tuple[TokenOut, ...] = ()
    """All of its tokens, where it does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFound:
    """The sequences of a stream; none where the instance has none of this owner. The rest is as in `Resumption`."""

    nonce: int
    sequences: tuple[KeptSequence, ...] = ()
    begun_at: int = 0
    digest: bytes = b""
    record: bytes = b""


@dataclass(frozen=True, slots=True)
class AttachReader:
    """Send the sender this attempt's tokens, too: those that there are, and all that follow."""

    request_id: str
    attempt: int
    owner: str


@dataclass(frozen=True, slots=True)
class DetachReader:
    """The sender reads this attempt no more, but its client may come back: what was generated is kept for a while."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class UsageNoted:
    """The sender has written down the use of an attempt's first tokens, and reads it no more."""

    request_id: str
    attempt: int
    num_tokens: int

"""What names an answer. All ids, seeds and times in it follow from that, so that any ingress gives the same answer again."""

import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Protocol

from cluster.ingress.delivery.kept_streams import KeptStream
from core.types import Request, Resumption

_SEEDS = -1
_WRITTEN = re.compile(r"([0-9a-f]{32})-([0-9a-f]{1,10})")


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known of a sequence that has begun before; its tenant is not asked to pay for that twice."""

    num_paid: int = -1
    """How many of its tokens count in the tenant's limits; -1: not even the prompt."""
    num_noted: int = 0
    """How many are in the ledger of usage, or will be. None while an ingress that was lost had them."""
    kept_at: str = ""
    """The instance that has them."""


class NewId(Protocol):
    def __call__(self, choice: int = 0) -> str: ...


def _now() -> int:
    return int(time.time())


@dataclass(slots=True, eq=False, kw_only=True)
class AnswerIdentity:
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """32 hexadecimal digits, which nobody guesses."""
    created_at: int = field(default_factory=_now)
    resumption: Resumption | None = None
    """None: the answer ends with its connection."""
    after: tuple[int, ...] = ()
    """How many of each choice's events the client has."""
    kept: KeptStream | None = None
    """What instances have of it already."""
    is_repeated: bool = False
    """Whether its request may have come before."""
    pays: bool = True
    """Whether the tenant pays for what this connection reads: of a background response, whoever generates it does."""
    _counts: Counter[int] = field(default_factory=Counter[int])

    @property
    def written(self) -> str:
        """What the ids of its events begin with; empty where they have none."""
        return f"{self.name}-{self.created_at:x}" if self.resumption is not None else ""

    def new_id(self, choice: int = 0) -> str:
        """Return 32 hexadecimal digits: a choice's next id."""
        self._counts[choice] += 1
        return sha256(f"{self.name}/{choice}/{self._counts[choice]}".encode()).hexdigest()[:32]

    def new_seed(self) -> int:
        return int(self.new_id(_SEEDS), 16)

    def of_sequence(self, request: Request, number: int) -> Request:
        """Return the request as the answer's sequence of this number, which may have begun already."""
        resumption = self.resumption
        if resumption is None:
            return request
        owned = sha256(f"{resumption.owner}\n{self.name}".encode()).hexdigest()[:20]
        request = replace(request, id=f"{owned}-{number}")
        resumption = resumption if number == 0 else replace(resumption, record=b"")
        if self.kept is None:
            return replace(request, resumption=resumption)
        return self.kept.resumed(request, resumption)

    def begun(self, request: Request) -> Begun:
        """Return what is known of a sequence that may have begun before."""
        kept = self.kept
        address, found = ("", None) if kept is None else kept.sequences.get(request.id, ("", None))
        if not self.pays:
            return Begun(sys.maxsize, sys.maxsize, address)
        if kept is None:
            return Begun()
        return Begun(0, 0) if found is None else Begun(found.num_sent, found.num_noted, address)

    def keep_record(self, encoded: Callable[[], bytes]) -> None:
        """Give instances what an ingress needs to ask again, if the answer may be resumed."""
        if self.resumption is not None:
            self.resumption = replace(self.resumption, record=encoded())


def parsed_name(written: str) -> tuple[str, int] | None:
    """Return (name, created_at) from what an event's id begins with; None where it is something else."""
    found = _WRITTEN.fullmatch(written)
    return (found[1], int(found[2], 16)) if found is not None else None

"""The seam to the store: records by an id, each of a kind and an owner, with leases on those that somebody works on.

Every method is one transaction, and raises StoreUnavailable where the database does not answer in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.errors import BatonError


class LeaseLost(BatonError):
    """The record is held by somebody else, or it is deleted. Nothing was written."""


class NoRoom(BatonError):
    """The bound would be exceeded. Nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecord:
    """Instants are the database's, so hosts need no common clock."""

    id: str
    kind: str
    owner: str = ""
    body: bytes = b""
    state: str = ""
    """What `find` looks for."""
    parent: str | None = None
    """The record with which it is deleted."""
    position: int = 0
    """Where it stands among its parent's children."""
    num_bytes: int = 0
    """What counts for bounds."""
    lives_s: float | None = None
    """Written only: how long after this write it exists. None: until it is deleted."""
    holder: str = ""
    """Written only: who claims it in the same step, for `lease_s`. Empty: the lease stays as it is."""
    lease_s: float = 0.0
    is_held: bool = False
    """Read only: whether its lease runs."""
    version: int = 0
    """Read only: it grows with each write."""


@dataclass(frozen=True, slots=True)
class Held:
    """A write happens only while `holder` has claimed the record `id`, and nobody can claim it meanwhile."""

    id: str
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """All records of a kind, of one owner if it is named, have up to `num_bytes` after the write."""

    kind: str
    num_bytes: int
    owner: str | None = None
    makes_room: bool
    """Whether the least recently used are deleted; else the write raises NoRoom."""


class Store(Protocol):
    @property
    def is_up(self) -> bool:
        """Whether the next call is tried: the last one a moment ago has not failed."""
        ...

    async def put(
        self, records: Sequence[StoreRecord], *, held: Held | None = None, bound: Bound | None = None
    ) -> None:
        """Write all of the records or none, over older ones of their ids. Raises LeaseLost and NoRoom."""
        ...

    async def replace(
        self, record: StoreRecord, *, held: Held | None = None, bound: Bound | None = None
    ) -> bool:
        """Write a record unless it was written or deleted since it was read, and return whether it is. Raises LeaseLost and
        NoRoom."""
        ...

    async def get(self, record_id: str, *, touch: bool = False) -> StoreRecord | None:
        """Return a record. `touch`: it counts as used now."""
        ...

    async def find(
        self,
        kind: str,
        *,
        ids: Sequence[str] | None = None,
        owners: Sequence[str] | None = None,
        state: str | None = None,
    ) -> list[StoreRecord]:
        """Return the records of a kind, the newest first: all, or those that have one of each that is given."""
        ...

    async def children(self, parent: str, position: int, num_positions: int) -> list[StoreRecord]:
        """Return in order the children at `num_positions` positions; first the one that begins at or before `position`."""
        ...

    async def delete(self, record_id: str) -> None:
        """Delete a record and its children. One that is not there is no error."""
        ...

    async def claim(self, record_id: str, holder: str, lease_s: float) -> StoreRecord | None:
        """Claim a record and return it; None where somebody else holds it, or it does not exist."""
        ...

    async def renew(self, record_ids: Sequence[str], holder: str, lease_s: float) -> frozenset[str]:
        """Let leases run for `lease_s` more. Returns the ids of those that `holder` still has."""
        ...

    async def release(self, record_id: str, holder: str) -> None:
        """End a lease, if `holder` has it."""
        ...

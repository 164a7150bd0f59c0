"""The messages by which a cluster agrees on the adapters that are loaded while it runs (docs/adr/115-weights-and-adapters.md).

The scheduler that leads owns the list; everybody else has a copy. A copy of a later version replaces an earlier one, wherever it
comes from, so the list outlives any process as long as one of the others lives."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    key: str
    """Its name and revision, as requests carry them."""
    folder: str
    state: Literal["loading", "serving", "retiring"]
    """`loading`: instances are to have it, and no request may name it yet. `retiring`: no new request may."""


@dataclass(frozen=True, slots=True, order=True)
class ListVersion:
    """Orders lists; of two schedulers that have both led for a while, one comes after the other."""

    number: int = 0
    writer: str = ""


@dataclass(frozen=True, slots=True)
class AdapterList:
    """The latest list that the sender knows."""

    version: ListVersion
    adapters: tuple[ListedAdapter, ...]


EMPTY_LIST = AdapterList(ListVersion(), ())


@dataclass(frozen=True, slots=True)
class AdaptersHeld:
    """An instance has what this version lists, but for what `failed`: (key, why)."""

    version: ListVersion
    failed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class AdaptersUsed:
    """An ingress goes by this version. Of the adapters that retire its running requests have `in_use`."""

    version: ListVersion
    in_use: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    nonce: int
    key: str
    folder: str
    in_place: bool
    """Another revision of that name may be there: it retires."""


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    nonce: int
    name: str


@dataclass(frozen=True, slots=True)
class AdapterChanged:
    """What was asked for is so everywhere; or it is not, and `why` says why."""

    nonce: int
    why: str = ""
    status: int = 200
    """As in HTTP."""

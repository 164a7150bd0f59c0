"""The sessions of several groups of ranks together. A session may be known to several of them."""

from collections.abc import Sequence as SeqOf

from core.reports import SessionCounts
from core.types import Request
from engine.planning.sessions import SessionCare


class GroupSessions:
    """A SessionCare."""

    def __init__(self, groups: SeqOf[SessionCare]) -> None:
        self._groups = groups

    @property
    def next_due_at(self) -> float:
        return min(group.next_due_at for group in self._groups)

    @property
    def counts(self) -> SessionCounts:
        each = [group.counts for group in self._groups]
        return SessionCounts(
            pinned_blocks=sum(one.pinned_blocks for one in each),
            cut=sum(one.cut for one in each),
            prefetched=sum(one.prefetched for one in each),
        )

    def begins(self, request: Request, now: float) -> None:
        for group in self._groups:
            group.begins(request, now)

    def read_due(self, now: float) -> None:
        for group in self._groups:
            group.read_due(now)

    def release(self, tenant: str, name: str) -> bool:
        return bool(sum(group.release(tenant, name) for group in self._groups))

    def prefetch(self, tenant: str, name: str) -> bool:
        return bool(sum(group.prefetch(tenant, name) for group in self._groups))

"""What clients have said of KV that nobody uses now (`core.types.CacheHints`): what stays, for how long, and when it is wanted
again. Owned by StepScheduler.

The tokens of sessions whose turn is over are remembered for a while. When the next turn is expected, what lower tiers alone have
of them is read back, into blocks that are neither used nor pinned. A session is known where its last turn was served."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Protocol

from core.reports import SessionCounts
from core.types import Request, SamplingParams
from engine.cache.prefix_run import Pin
from engine.cache.radix_cache import RadixCache
from engine.planning.block_ledger import BlockLedger
from engine.planning.deadlines import Deadlines
from engine.planning.pinning import Pinning
from engine.planning.prefixes import CachedPrefix, Prefixes, Restore
from engine.planning.sequence import Sequence
from engine.planning.turn_gaps import TurnGaps

_MOST_SESSIONS = 4096
_MOST_TOKENS = 64_000_000
"""The most tokens of all sessions that are remembered, together. A token takes 4 bytes."""
_Key = tuple[str, str]
"""(tenant, session)"""


@dataclass(slots=True, eq=False)
class _Session:
    request: Request
    """Its last turn, without its tokens."""
    tokens: "array[int]"
    """The prompt and the answer of its last turn."""
    gaps: TurnGaps = field(default_factory=TurnGaps)
    ended_at: float = 0.0
    is_idle: bool = False
    """Whether no turn is known to run."""
    late_at: float = -inf
    """Until when its next turn is expected."""

    @property
    def key(self) -> _Key:
        return self.request.tenant, self.request.hints.session

    @property
    def known(self) -> Request:
        """A request whose prompt is all that is known of it."""
        return replace(self.request, prompt=tuple(self.tokens))


class SessionCare(Protocol):
    """What an engine asks of Sessions, or of those of several groups of ranks."""

    @property
    def next_due_at(self) -> float: ...
    @property
    def counts(self) -> SessionCounts: ...
    def begins(self, request: Request, now: float) -> None: ...
    def read_due(self, now: float) -> None: ...
    def release(self, tenant: str, name: str) -> bool: ...
    def prefetch(self, tenant: str, name: str) -> bool: ...


class Sessions:
    """A PrefixPlace, for what is read back."""

    def __init__(
        self,
        cache: RadixCache,
        ledger: BlockLedger,
        prefixes: Prefixes,
        pinning: Pinning,
        longest_pin_s: float,
    ) -> None:
        self._cache, self._ledger, self._prefixes = cache, ledger, prefixes
        self._pinning, self._longest_pin_s = pinning, longest_pin_s
        self._all: dict[_Key, _Session] = {}
        """What has ended last comes last."""
        self._gaps: dict[str, TurnGaps] = {}
        """By tenant."""
        self._due = Deadlines[_Key]()
        """When each session is to be read back."""
        self._num_tokens = self._num_prefetched = 0
        self._now = 0.0
        """As of the last step, or of the last look at what is due."""

    @property
    def counts(self) -> SessionCounts:
        return SessionCounts(
            pinned_blocks=self._pinning.num_blocks,
            cut=self._pinning.num_cut,
            prefetched=self._num_prefetched,
        )

    @property
    def next_due_at(self) -> float:
        """When the first session is to be read back; in the endless future where none is."""
        return self._due.next_at

    def begins(self, request: Request, now: float) -> None:
        """Note that a request has come, which may be the next turn of a session."""
        session = self._all.get((request.tenant, request.hints.session))
        if session is None:
            return
        self._due.drop(session.key)
        if session.is_idle:
            session.is_idle = False
            for gaps in (session.gaps, self._gaps.setdefault(request.tenant, TurnGaps(of_tenant=True))):
                gaps.add(now - session.ended_at)

    def ends(self, seq: Sequence) -> None:
        """Note that a sequence leaves. It still has its blocks."""
        request, hints = seq.request, seq.request.hints
        self._pinning.served(request.tenant, request.weight)
        if hints.session and not request.retain:
            self.release(request.tenant, hints.session)
            return
        if hints.ttl_s and self._cache.enabled and (kept := self._ledger.kept(seq)):
            key = (request.tenant, hints.session) if hints.session else seq.key
            ends_at = self._now + min(hints.ttl_s, self._longest_pin_s)
            self._pinning.pin(key, ends_at, kept, seq.twins, tenant=request.tenant, weight=request.weight)
        if hints.session:
            self._remember(request, seq.tokens)

    def release(self, tenant: str, name: str) -> bool:
        """End a session. Its blocks are given up first. Returns whether it was known."""
        self._pinning.unpin((tenant, name))
        session = self._all.get((tenant, name))
        if session is None:
            return False
        self._forget(session)
        if blocks := self._prefixes.cached_blocks(session.known):
            last = Pin(self._now)
            self._cache.pin(last, len(blocks), blocks)
            self._cache.unpin(last, wanted=False)
        return True

    def prefetch(self, tenant: str, name: str) -> bool:
        """Let a session's KV be read back with what is due next. Returns whether the session is known."""
        session = self._all.get((tenant, name))
        if session is not None:
            self._due.set(session.key, self._now)
        return session is not None

    def pass_by(self, now: float) -> None:
        """Note the time, and end what is pinned no longer."""
        self._now = now
        self._pinning.pass_by(now)

    def read_due(self, now: float) -> None:
        """Begin to read back the sessions that are due."""
        self.pass_by(now)
        for key in self._due.take(now):
            request = self._all[key].known
            self._prefixes.read(self, request, partial(self._is_back, key, request))

    def cached_prefix(self, request: Request) -> CachedPrefix:
        return self._prefixes.cached_prefix(request)

    def begin_restore(self, request: Request, num_full: int) -> Restore | None:
        """As Prefixes does, but leave alone what is pinned, and as much again for a request that comes meanwhile."""
        return self._prefixes.begin_restore(request, num_full, self._pinning.num_idle + num_full)

    def _is_back(self, key: _Key, request: Request, found: bool) -> None:  # noqa: FBT001 (readers call it)
        if not found:
            return
        self._num_prefetched += 1
        late_at = session.late_at if (session := self._all.get(key)) is not None else -inf
        ends_at = max(late_at, self._pinning.ends_at(key))
        blocks = self._prefixes.cached_blocks(request)
        if blocks and ends_at > self._now:
            self._pinning.pin(key, ends_at, blocks, tenant=request.tenant, weight=request.weight)

    def _remember(self, request: Request, tokens: Iterable[int]) -> None:
        before = self._all.get((request.tenant, request.hints.session))
        if before is not None:
            self._forget(before)
        bare = replace(request, prompt=(), emitted=(), images=(), sampling=SamplingParams())
        session = _Session(bare, array("I", tokens))
        if before is not None:
            session.gaps = before.gaps
        session.is_idle, session.ended_at = True, self._now
        self._all[session.key] = session
        self._num_tokens += len(session.tokens)
        self._expect(session)
        while len(self._all) > _MOST_SESSIONS or (self._num_tokens > _MOST_TOKENS and len(self._all) > 1):
            self._forget(next(iter(self._all.values())))

    def _forget(self, session: _Session) -> None:
        del self._all[session.key]
        self._num_tokens -= len(session.tokens)
        self._due.drop(session.key)

    def _expect(self, session: _Session) -> None:
        """Have a session's KV read back in time, if its next turn can be expected at all."""
        after_s = session.request.hints.prefetch_s
        if after_s is None:
            of_tenant = self._gaps.get(session.request.tenant)
            expected = session.gaps.expected_s or (of_tenant.expected_s if of_tenant is not None else None)
            if expected is not None:
                self._due.set(session.key, self._now + expected[0])
                session.late_at = self._now + expected[1]
        elif after_s < inf:
            self._due.set(session.key, self._now + after_s)

"""What is cached of requests' prefixes, and what comes back to the cache from lower tiers. Owned by StepScheduler."""

from collections.abc import Callable
from collections.abc import Sequence as SeqOf
from dataclasses import dataclass
from typing import Protocol

from core.types import Request
from engine.cache.radix_cache import Kept, RadixCache
from engine.cache.state_checkpoints import CheckpointKept
from engine.planning.block_ledger import BlockLedger
from engine.planning.sequence import Sequence
from engine.planning.sequence_table import SequenceTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Fresh blocks that a lower tier fills with the KV that follows a cached prefix, and with the recurrent state behind it. No
    sequence sees them until they are published."""

    tokens: tuple[int, ...]
    salt: str
    prefix: tuple[int, ...]
    """The cached blocks before them, which are kept meanwhile."""
    blocks: tuple[int, ...]
    state: tuple[int, ...]

    @property
    def fresh(self) -> tuple[int, ...]:
        return self.blocks + self.state


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """How many full blocks of a request's prefix are cached."""

    num_kept: int
    num_usable: int
    """The blocks from which the request can go on: where sequences have states, up to the last checkpoint; otherwise all."""


class PrefixPlace(Protocol):
    """A pool of blocks with its prefix cache: an instance's, or that of one of its groups of ranks."""

    def cached_prefix(self, request: Request) -> CachedPrefix:
        """Return how much of the request's prefix is cached."""
        ...

    def begin_restore(self, request: Request, num_full: int) -> Restore | None:
        """Reserve blocks for those of the request's first `num_full` blocks that are not cached, and for the recurrent state
        behind them. Returns None while there are not enough to spare."""
        ...


ReadBack = Callable[[PrefixPlace, Request, Callable[[bool], None]], int]
"""Begins to read into a place what lower tiers have of a request's prefix beyond its cache. Returns how many of the first blocks
are to be there then; 0: nothing is read. Otherwise the third argument is called later, with whether anything of use has come."""


Keep = Callable[[Request, SeqOf[int]], None]
"""Has lower tiers keep these blocks, which have the KV of a request's first tokens and may be overwritten then."""


class Prefixes:
    """The PrefixSource of one group of ranks. Invariant: a restore refers to its blocks, and to the cached ones before them."""

    def __init__(self, cache: RadixCache, ledger: BlockLedger, table: SequenceTable) -> None:
        self._cache, self._ledger, self._table, self._pool = cache, ledger, table, ledger.pool
        self._restores: dict[int, tuple[Restore, list[int]]] = {}
        """By its first fresh block: a restore that is under way, and the cached blocks in place of which it has twins. It refers
        to them, so that no cached block is in use while its prefix could be evicted."""
        self.read_back: ReadBack | None = None
        self.keep: Keep | None = None
        """As `on_return` was given them."""

    @property
    def held_blocks(self) -> list[int]:
        """The blocks that restores refer to, which are under way."""
        every = self._restores.values()
        return [block for one, twins in every for block in (*one.prefix, *one.fresh, *twins)]

    def cached_blocks(self, request: Request) -> tuple[int, ...]:
        return self._cache.match(request.tokens, request.prefix_salt, partial=False).blocks

    def cached_prefix(self, request: Request) -> CachedPrefix:
        blocks = self.cached_blocks(request)
        has_states = self._ledger.num_state_blocks > 0
        return CachedPrefix(
            len(blocks), self._cache.checkpoints.last(blocks)[0] if has_states else len(blocks)
        )

    def begin_restore(self, request: Request, num_full: int, num_spare: int = 0) -> Restore | None:
        """As a PrefixPlace. `num_spare` blocks are left as well as the headroom of those that run."""
        prefix = self.cached_blocks(request)[:num_full]
        num_fresh, num_states = num_full - len(prefix), self._ledger.num_state_blocks
        idle = sum(self._pool.refs(block) == 0 for block in prefix)
        num_left = self._ledger.num_available - idle - self._table.headroom - num_spare
        if num_left < num_fresh + num_states:
            return None
        self._pool.share(prefix)
        if num_states and not self._cache.checkpoints.begin(num_states):
            self._give_back([*reversed(prefix)])
            return None
        fresh = self._ledger.take(num_fresh + num_states)
        restore = Restore(
            tokens=request.tokens,
            salt=request.prefix_salt,
            prefix=prefix,
            blocks=tuple(fresh[:num_fresh]),
            state=tuple(fresh[num_fresh:]),
        )
        self._restores[restore.fresh[0]] = restore, []
        return restore

    def publish_restore(self, restore: Restore, count: int) -> None:
        blocks = [*restore.prefix, *restore.blocks[:count]]
        twins = self._cache.insert(restore.tokens, len(blocks), blocks, restore.salt, len(restore.prefix))
        self._pool.share(twins)
        self._restores[restore.fresh[0]] = restore, twins
        if restore.state:
            self._pool.share(restore.state)
            if count == len(restore.fresh):
                self._cache.keep_checkpoint([*restore.state], blocks, len(blocks), twins, len(blocks))
            else:
                self._cache.checkpoints.drop([*restore.state])

    def end_restore(self, restore: Restore) -> None:
        _, twins = self._restores.pop(restore.fresh[0])
        blocks = [*reversed(restore.blocks), *reversed(twins), *reversed(restore.prefix)]
        self._give_back([*restore.state, *blocks])

    def on_kept(self, hear: Kept, hear_checkpoint: CheckpointKept) -> None:
        self._cache.on_kept, self._cache.checkpoints.on_kept = hear, hear_checkpoint

    def on_return(self, read: ReadBack, keep: Keep | None = None) -> None:
        self.read_back, self.keep = read, keep

    def read(self, place: PrefixPlace, request: Request, then: Callable[[bool], None]) -> int:
        """As a ReadBack. Without lower tiers there is nothing to read."""
        return self.read_back(place, request, then) if self.read_back is not None else 0

    def may_return(self, seq: Sequence) -> bool:
        """Return whether the sequence, if it is preempted, may find its KV in lower tiers."""
        return self.read_back is not None and (seq.request.reuses_prefix or seq.num_output > 0)

    def keep_below(self, seq: Sequence) -> None:
        """Have lower tiers keep the KV of a preempted sequence, which is about to lose its blocks."""
        if self.read_back is not None:
            seq.num_below = seq.num_kept * self._ledger.block_size
        if self.keep is not None and self.may_return(seq):
            self.keep(seq.with_output, self._ledger.kept(seq))

    def drain_cache_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._cache.drain_events()

    def replay_cache_events(self) -> None:
        self._cache.replay_events()

    def drop_cache(self) -> int:
        return self._cache.drop()

    def _give_back(self, blocks: list[int]) -> None:
        self._cache.release(self._pool.drop(blocks))

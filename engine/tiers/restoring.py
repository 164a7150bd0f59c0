"""Reads a request's blocks first when its prefix lies in a lower tier; then the request goes on like any other. So does a
sequence that was preempted.

The request waits until its blocks are in the device's pool. Damage is noticed on reading, before anything is computed from it,
and the prefix ends there."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence

from core.errors import RequestError
from core.reports import TierCounts
from core.types import Request
from engine.planning.planner_protocol import PrefixSource
from engine.planning.prefixes import PrefixPlace, Restore
from engine.tiers.block_digests import child_digest, prefix_digests, root_digest, state_digests
from engine.tiers.held_blocks import HeldBlocks
from engine.tiers.held_checkpoints import HeldCheckpoints
from engine.tiers.tier_store import TierStore

log = logging.getLogger(__name__)

_MIN_BLOCKS = 1
_MAX_TENANTS = 4096


class Restoring:
    """Holds requests back while their prefix is read. The engine owns it. `forward` calls back at once, or when the request can
    find its blocks in the prefix cache, `prefixes`. This has those of preempted sequences read (`on_return`)."""

    def __init__(
        self,
        prefixes: PrefixSource,
        store: TierStore,
        block_size: int,
        num_state_blocks: int = 0,
    ) -> None:
        """`num_state_blocks`: of each sequence's recurrent state, without which a prefix is of no use."""
        self._prefixes, self._store, self._block_size = prefixes, store, block_size
        self._num_state_blocks = num_state_blocks
        self._roots: dict[str, bytes] = {}
        self._digests: dict[int, bytes] = {}
        """By block of the pool, the digest of what it held when it was last kept."""
        self._under_way: dict[str, asyncio.Task[None]] = {}
        """By its key, what is being read for a request that has come."""
        self._returning: set[asyncio.Task[None]] = set()
        """What is being read for preempted sequences, which the scheduler knows."""
        self._reading: dict[bytes, asyncio.Task[None]] = {}
        """By the first block that it reads, what reads a prefix. Whoever goes on from there waits for it."""
        self._cancelled: set[str] = set()
        self._closing = False
        self._freed: Callable[[], None] = lambda: None
        self._failed: Callable[[Exception], None] = lambda _: None
        self._publishing = False
        """Whether the cache begins to keep blocks that have come from below, which need not be saved."""
        below = store.__contains__
        self._blocks = None if num_state_blocks else HeldBlocks(prefixes, below)
        self._checkpoints = HeldCheckpoints(prefixes, below) if num_state_blocks else None
        held = self._blocks or self._checkpoints
        assert held is not None
        self._held = held
        store.on_gone = self._held.gone
        prefixes.on_kept(self._kept, self._checkpoint_kept)
        prefixes.on_return(self._bring_back, self._keep_all)

    @property
    def num_waiting(self) -> int:
        return len(self._under_way)

    @property
    def counts(self) -> TierCounts:
        return self._store.counts

    def listen(self, freed: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Call `freed` whenever blocks that were being loaded are free for others, and `failed` with what leaves a request
        without an end, or blocks without an owner."""
        self._freed, self._failed = freed, failed

    def forward(self, request: Request, then: Callable[[], None]) -> None:
        """Pass a request on when its prefix is read. Raises RequestError for a request that is waiting here already."""
        if request.key in self._under_way:
            raise RequestError(f"request {request.key} is already here")
        if (reading := self._being_read(request)) is not None:
            self._holds(request.key, self._forward_behind(reading, request, then))
            return
        restore, digests = self._begin(self._prefixes, request)
        if restore is None:
            then()
            return
        self._holds(request.key, self._forward(request.key, restore, digests, then))

    def _holds(self, key: str, work: Coroutine[None, None, None]) -> None:
        """Hold a request back until `work` is done, which passes it on."""
        self._under_way[key] = task = asyncio.create_task(work)
        task.add_done_callback(self._done)

    def abort(self, key: str) -> bool:
        """Do not go on with the request. Returns True when it was waiting here. The scheduler aborts preempted sequences."""
        if key not in self._under_way:
            return False
        self._cancelled.add(key)
        return True

    def drain_cache_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As `CacheEvents.drain_cache_events`."""
        return self._held.drain_cache_events()

    def replay_cache_events(self) -> None:
        """As `CacheEvents.replay_cache_events`."""
        self._held.replay_cache_events()

    def drop(self) -> tuple[int, int]:
        """Give up all that lies below. Returns how many blocks that were, in host memory and on disk."""
        return self._store.drop()

    async def close(self) -> None:
        """End, after what is being loaded: nobody may free blocks under a thread that fills them."""
        self._closing = True
        self._cancelled |= set(self._under_way)
        await self.settled()
        await self._store.close()

    async def settled(self) -> None:
        """Wait until nothing is being loaded any more."""
        await asyncio.gather(*self._under_way.values(), *self._returning, return_exceptions=True)

    def _bring_back(self, place: PrefixPlace, request: Request, then: Callable[[bool], None]) -> int:
        """An `engine.planning.prefixes.ReadBack`."""
        restore, digests = (None, []) if self._closing else self._begin(place, request)
        if restore is None:
            return 0
        task = asyncio.create_task(self._go_on(request.key, restore, digests, then))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)
        task.add_done_callback(self._done)
        return len(restore.prefix) + len(restore.blocks)

    def _keep_all(self, request: Request, blocks: Sequence[int]) -> None:
        """An `engine.planning.prefixes.Keep`."""
        digests = prefix_digests(self._root(request.prefix_salt), request.tokens, self._block_size)
        before = b""
        for digest, block in zip(digests, blocks, strict=False):
            self._store.keep(digest, block, before)
            before = digest

    def _begin(self, place: PrefixPlace, request: Request) -> tuple[Restore | None, list[bytes]]:
        cached = place.cached_prefix(request)
        limit = (len(request.tokens) - 1) // self._block_size  # one token is left to compute
        if cached.num_usable >= limit or not request.reuses_prefix:
            return None, []
        all_digests = prefix_digests(self._root(request.prefix_salt), request.tokens, self._block_size)
        digests = [*itertools.islice(all_digests, cached.num_kept)]
        rest = itertools.islice(all_digests, limit - cached.num_kept)
        digests += itertools.takewhile(self._store.__contains__, rest)
        num_full, state = self._last_with_state(digests, cached.num_usable)
        if num_full - cached.num_usable < _MIN_BLOCKS:
            return None, []
        return place.begin_restore(request, num_full), digests[cached.num_kept : num_full] + state

    def _being_read(self, request: Request) -> "asyncio.Task[None] | None":
        """Return what already reads the block that comes next in a request's prefix, for its session or for another request."""
        if not self._reading or not request.reuses_prefix:
            return None
        num_kept = self._prefixes.cached_prefix(request).num_kept
        digests = prefix_digests(self._root(request.prefix_salt), request.tokens, self._block_size)
        return self._reading.get(next(itertools.islice(digests, num_kept, None), b""))

    def _last_with_state(self, digests: list[bytes], least: int) -> tuple[int, list[bytes]]:
        """Return how many of a prefix's blocks have a recurrent state behind them below, and the names of its blocks. Fewer than
        `least` are not wanted. Without states that is all of them."""
        if not self._num_state_blocks:
            return len(digests), []
        for num_full in range(len(digests), least, -1):
            state = [*state_digests(digests[num_full - 1], self._num_state_blocks)]
            if all(map(self._store.__contains__, state)):
                return num_full, state
        return least, []

    async def _forward(
        self, key: str, restore: Restore, digests: list[bytes], then: Callable[[], None]
    ) -> None:
        await self._restore(key, restore, digests)
        if self._may_go_on(key):
            then()

    async def _forward_behind(
        self, reading: "asyncio.Task[None]", request: Request, then: Callable[[], None]
    ) -> None:
        await asyncio.wait([reading])
        if self._may_go_on(request.key):
            self.forward(request, then)

    def _may_go_on(self, key: str) -> bool:
        """Hold a request back no longer. Returns whether it was not aborted."""
        del self._under_way[key]
        was_cancelled = key in self._cancelled
        self._cancelled.discard(key)
        return not was_cancelled

    async def _go_on(
        self, key: str, restore: Restore, digests: list[bytes], then: Callable[[bool], None]
    ) -> None:
        then(await self._restore(key, restore, digests))
        self._freed()

    async def _restore(self, key: str, restore: Restore, digests: list[bytes]) -> bool:
        """Read and publish what a restore is for. Returns whether anything of use has come: a state is of none without all that
        belongs to it."""
        contents: list[bytes] = []
        task = asyncio.current_task()
        assert task is not None
        self._reading.setdefault(digests[0], task)
        try:
            contents = await self._store.fetch(digests)
            await self._store.fill(restore.fresh[: len(contents)], contents)
        except Exception:
            contents = []
            log.exception("request %s: loading its prefix failed; it is computed", key)
        finally:
            if self._reading.get(digests[0]) is task:
                del self._reading[digests[0]]
        blocks = restore.fresh[: len(contents)]
        self._publish(restore, len(blocks))
        self._prefixes.end_restore(restore)
        self._freed()
        return len(blocks) == len(restore.fresh) or (bool(blocks) and not restore.state)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failed(error)

    def _publish(self, restore: Restore, count: int) -> None:
        self._publishing = True
        self._prefixes.publish_restore(restore, count)
        self._publishing = False

    def _kept(self, salt: str, parent: int, tokens: tuple[int, ...], block: int, block_hash: int) -> None:
        before = self._digests[parent] if parent >= 0 else b""
        digest = self._digests[block] = child_digest(before or self._root(salt), tokens)
        if self._blocks is not None:
            self._blocks.kept(digest, block_hash)
        self._lies_behind(digest, block, before)

    def _checkpoint_kept(self, block: int, state: tuple[int, ...], path: Sequence[int]) -> None:
        before = self._digests[block]
        digests = [*state_digests(before, len(state))]
        for digest, part in zip(digests, state, strict=True):
            self._lies_behind(digest, part, before)
        if self._checkpoints is not None:
            self._checkpoints.kept(digests, path)

    def _lies_behind(self, digest: bytes, block: int, before: bytes) -> None:
        """A block of the pool, of which lower tiers are to have a copy, follows the block `before`."""
        if self._publishing:
            self._store.learn(digest, before)
        else:
            self._store.save(digest, block, before)

    def _root(self, salt: str) -> bytes:
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= _MAX_TENANTS:
                self._roots.clear()
            root = self._roots[salt] = root_digest(self._store.root, salt)
        return root

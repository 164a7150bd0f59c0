"""The prefix cache: a tree of full blocks, one root for each tenant, compared token by token.

Blocks between which nothing branches are one node, a run (`prefix_run`). So a prompt that nobody shares costs a few objects, not
a few for each block. Invariant: a block's ancestors hold exactly the tokens before it, and are referenced whenever it is. Blocks
that nobody refers to and nothing follows are evicted, in the order that `eviction_order` gives."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from core.errors import Bug
from core.kv import hash_chain, root_hash
from engine.cache.block_pool import BlockPool
from engine.cache.eviction_order import EvictionOrder
from engine.cache.prefix_run import Pin, Run, depth_shared, num_equal
from engine.cache.state_checkpoints import StateCheckpoints

_MAX_SIBLINGS_SCANNED = 64

HashesOf = Callable[[int, Sequence[int], int], list[int]]
"""(previous block's hash, tokens, block size) -> the blocks' hashes: core.kv.hash_chain, or a cache of its results."""

Kept = Callable[[str, int, tuple[int, ...], int, int], None]
"""Called with each block that is newly kept: its tenant, the kept block before it (-1: none), its tokens, the block, its hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """Cached KV of a prefix: full blocks, and perhaps the first `partial_tokens` tokens of one more."""

    blocks: tuple[int, ...]
    partial_block: int = -1
    partial_tokens: int = 0
    state: tuple[int, ...] = ()
    """The blocks of the checkpoint of the recurrent state behind `blocks`, to be copied, where sequences have states."""
    num_alike: int = 0
    """The number of full blocks that are cached of the prefix, where there is a checkpoint behind the first of them alone."""
    end: Run | None = field(default=None, compare=False, repr=False)
    """The run in which the match ends."""
    num_changes: int = field(default=0, compare=False, repr=False)
    """`end.num_changes` when the match was found."""


class RadixCache:
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        hashes_of: HashesOf = hash_chain,
        *,
        enabled: bool = True,
        has_states: bool = False,
    ) -> None:
        """`has_states`: what is kept of a prefix is of use up to a checkpoint of a recurrent state, and told of so far."""
        self._pool, self._block_size, self.enabled = pool, block_size, enabled
        self._has_states, self._hashes_of = has_states, hashes_of
        self.on_kept: Kept | None = None
        self._roots: dict[str, Run] = {}
        self._runs: dict[Run, None] = {}
        """All runs but the roots."""
        self._run_of: list[Run | None] = [None] * pool.blocks.stop
        """The run of each block; None where it is not kept."""
        self._order = EvictionOrder(pool, self._runs.keys())
        self.checkpoints = StateCheckpoints(
            pool, partial(self._note, is_kept=True), partial(self._note, is_kept=False)
        )
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    @property
    def num_evictable(self) -> int:
        """The number of cached blocks that nobody refers to. They are as good as free."""
        return self._pool.num_blocks - self._pool.num_free - self._pool.num_used

    @property
    def num_runs(self) -> int:
        return len(self._runs)

    @property
    def num_candidates(self) -> int:
        """The number of runs from which blocks may be given up, outdated entries included."""
        return self._order.num_entries

    def match(self, tokens: Sequence[int], salt: str, *, partial: bool) -> PrefixMatch:
        """Find the longest cached prefix that leaves at least one token to compute. Takes no reference."""
        run = self._roots.get(salt)
        if run is None:
            return PrefixMatch(blocks=())
        size, limit = self._block_size, len(tokens) - 1
        blocks: list[int] = []
        start = count = 0
        while count == len(run.blocks) and start + size <= limit:
            child = run.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            run, count = child, child.num_common(0, tokens, start, limit, size)
            blocks += run.blocks[:count]
            start += count * size
        best, best_length = -1, 0
        if partial:
            wanted = tokens[start : min(start + size, limit)]
            best, best_length = _longest_common(_next_blocks(run, count, size), wanted)
        return PrefixMatch(
            blocks=tuple(blocks),
            partial_block=best,
            partial_tokens=best_length,
            end=run,
            num_changes=run.num_changes,
        )

    def still_finds(self, match: PrefixMatch) -> bool:
        """Return whether the same tokens would still have this match: the run where it ends has not changed."""
        return match.end is not None and match.end.num_changes == match.num_changes

    def insert(
        self,
        tokens: Sequence[int],
        num_full: int,
        blocks: Sequence[int],
        salt: str,
        num_known: int = 0,
        twins: Sequence[int] = (),
    ) -> list[int]:
        """Keep the first `num_full` blocks of a sequence, whose KV is complete. An earlier call handled `num_known` of them and
        returned `twins`.

        Where another block with the same prefix is kept already, the sequence's own stays private. Such twins are returned. The
        sequence must refer to them too, so that no cached block is in use while its prefix could be evicted."""
        if not self.enabled:
            return []
        size, index = self._block_size, num_known
        run, at = self._last_known(blocks, num_known, twins) if num_known else (self._root(salt), 0)
        more: list[int] = []
        while index < num_full:
            if at == len(run.blocks):
                child = run.children.get(tuple(tokens[index * size : (index + 1) * size]))
                if child is None:
                    break
                run, at = child, 0
            count = run.num_common(at, tokens, index * size, num_full * size, size)
            kept, own = run.blocks[at : at + count], blocks[index : index + count]
            more += [block for block, mine in zip(kept, own, strict=True) if block != mine]
            index, at = index + count, at + count
            if at < len(run.blocks):
                break
        if index < num_full:
            if at < len(run.blocks):
                run = self._split(run, at)
            self._keep(run, [*tokens[index * size : num_full * size]], [*blocks[index:num_full]], salt)
        return more

    def keep_checkpoint(
        self,
        state: list[int],
        blocks: Sequence[int],
        num_known: int,
        twins: Sequence[int],
        num_saved: int,
    ) -> int:
        """Keep a checkpoint that has been made of a sequence's state behind its first `num_known` blocks, which `insert` has
        handled. Returns the cached block that it is at, or -1 where there is one already. `num_saved` is as in
        `StateCheckpoints.keep`."""
        run, at = self._last_known(blocks, num_known, twins)
        block, path = run.blocks[at - 1], run.hashes[:at]
        while (parent := run.parent) is not None and parent.blocks:
            run, path = parent, [*parent.hashes, *path]
        return block if self.checkpoints.keep(state, block, path, num_saved) else -1

    def release(self, idle_blocks: Sequence[int], *, wanted: bool = True) -> None:
        """Offer cached blocks that nobody refers to any more (as BlockPool.drop reports) for eviction.

        Unless they are `wanted` they go first. This leaves out the blocks from which several sequences have gone on, those that
        are pinned, and what these follow."""
        if self.checkpoints.num_blocks:  # which are not in the tree themselves
            idle_blocks = [block for block in idle_blocks if self._run_of[block] is not None]
        runs = self._cut_out(idle_blocks)
        shared = depth_shared(runs)
        for run in runs:
            self._order.fell_idle(run, wanted=wanted or run.depth <= shared)

    def pin(self, pin: Pin, most: int, blocks: Sequence[int], twins: Sequence[int] = ()) -> None:
        """Pin the first of a sequence's `blocks`, at `most`, all of which `insert` has handled and none was given up since."""
        run: Run | None = self._last_known(blocks, len(blocks), twins)[0]
        depth = min(len(blocks), most)
        while run is not None and run.blocks:
            above = run.parent
            if (count := depth - run.depth + len(run.blocks)) > 0:
                pinned = self._split(run, count) if count < len(run.blocks) else run
                pinned.pin(pin)
                self._order.offer(pinned)
            run = above

    def unpin(self, pin: Pin, *, wanted: bool = True) -> None:
        """End a pin. Unless its blocks are `wanted`, they go first, but for those that `release` leaves out."""
        runs = [*pin.runs]
        for run in runs:
            run.unpin(pin)
        shared = depth_shared(runs)
        for run in runs:
            run.wanted = run.wanted and (wanted or run.depth <= shared)
            self._order.offer(run)

    def num_idle_of(self, pins: Iterable[Pin]) -> int:
        """Return the number of their blocks that nobody refers to."""
        return sum(map(self._order.num_idle, {run for pin in pins for run in pin.runs}))

    def evict(self, count: int) -> None:
        """Give `count` blocks back to the pool, or more, since a checkpoint goes as a whole. The caller has checked
        `num_evictable`."""
        while count > 0:
            run = self._order.first()
            if run is not None:
                count -= self._give_up(run, self._order.num_to_go(run, count))
            elif freed := self.checkpoints.give_up():
                count -= freed
            else:
                raise Bug(f"{count} blocks are to be given up, and none can be")

    def drop(self) -> int:
        """Give up every block that nobody refers to. Returns how many those were."""
        count = self.num_evictable
        self.evict(count)
        return count

    def drain_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the hashes (core.kv.block_hashes) of blocks kept and given up since the last call."""
        events = tuple(self._added), tuple(self._removed)
        self._added.clear()
        self._removed.clear()
        return events

    def replay_events(self) -> None:
        """Report everything that is kept as if it were new."""
        self._removed.clear()
        kept = itertools.chain.from_iterable(run.hashes for run in self._runs)
        self._added = dict.fromkeys(self.checkpoints.reached_from if self._has_states else kept)

    def check_integrity(self) -> None:
        """Raise Bug where the tree and the pool disagree."""
        size, num_kept = self._block_size, 0
        for run in self._runs:
            before = run.parent
            if before is None or before.children.get(run.tokens_of(size, 0)) is not run:
                raise Bug(f"cached blocks {run.blocks} are not where the prefix tree says")
            if run.depth != before.depth + len(run.blocks) or len(run.tokens) != size * len(run.blocks):
                raise Bug(f"cached blocks {run.blocks} are at {run.depth} with {len(run.tokens)} tokens")
            for block in run.blocks:
                if self._run_of[block] is not run:
                    raise Bug(f"cached block {block} is not in the run that it should be in")
            refs = [self._pool.refs(block) > 0 for block in (*before.blocks[-1:], *run.blocks)]
            if sorted(refs, reverse=True) != refs:
                raise Bug(f"one of the cached blocks {run.blocks} is in use but its prefix is not")
            if before.blocks and not before.pins.keys() >= run.pins.keys():
                raise Bug(f"cached blocks {run.blocks} are pinned, and what they follow is not")
            num_kept += len(run.blocks)
        if num_kept != sum(run is not None for run in self._run_of):
            raise Bug(f"{num_kept} blocks are in the prefix tree, and others are said to be")
        self.checkpoints.check_integrity([run is not None for run in self._run_of])
        idle = sum(map(self._order.num_idle, self._runs)) + self.checkpoints.num_idle
        if self.num_evictable != idle:
            raise Bug(f"{self.num_evictable} blocks look evictable, the tree knows {idle}")

    def _root(self, salt: str) -> Run:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Run(
                tokens=[], blocks=[], hashes=[root_hash(salt)], parent=None, depth=0
            )
        return root

    def _run_with(self, block: int) -> Run:
        run = self._run_of[block]
        if run is None:
            raise Bug(f"block {block} is not cached")
        return run

    def _last_known(self, blocks: Sequence[int], num_known: int, twins: Sequence[int]) -> tuple[Run, int]:
        """Return the run with the last block that was handled, and how many of the run's blocks that covers. A sequence refers to
        everything that is kept of its prefix, so its last kept block, or its last twin, is still there."""
        block = blocks[num_known - 1]
        if self._run_of[block] is None:
            block = twins[-1]
        run = self._run_with(block)
        at = num_known - run.depth + len(run.blocks)
        if not 0 < at <= len(run.blocks) or run.blocks[at - 1] != block:
            raise Bug(f"block {block} is not kept at {num_known}, where its sequence has it")
        return run, at

    def _split(self, run: Run, count: int) -> Run:
        """Make the first `count` blocks a run of their own, which the rest follows, and return it."""
        upper = run.split(count, self._block_size)
        self._runs[upper] = None
        for block in upper.blocks:
            self._run_of[block] = upper
        return upper

    def _keep(self, run: Run, tokens: list[int], blocks: list[int], salt: str) -> None:
        """Keep what follows the last block of `run`, nothing of which is kept yet."""
        size = self._block_size
        hashes = self._hashes_of(run.hashes[-1], tokens, size)
        before = run.blocks[-1] if run.blocks else -1
        if run.blocks and not run.children and not run.pins:  # what follows is not pinned
            run.extend(tokens, blocks, hashes)
        else:
            depth = run.depth + len(blocks)
            child = Run(tokens=tokens, blocks=blocks, hashes=hashes, parent=run, depth=depth)
            run.children[child.tokens_of(size, 0)] = child
            run.num_changes += 1
            self._runs[child] = None
            run = child
        for block in blocks:
            if self._run_of[block] is not None:
                raise Bug(f"block {block} is cached for another prefix")
            self._run_of[block] = run
        self._pool.keep(blocks)
        if not self._has_states:
            self._note(hashes, is_kept=True)
        if self.on_kept is not None:
            for at, (block, its_hash) in enumerate(zip(blocks, hashes, strict=True)):
                self.on_kept(salt, before, tuple(tokens[at * size : (at + 1) * size]), block, its_hash)
                before = block

    def _cut_out(self, blocks: Sequence[int]) -> list[Run]:
        """Return runs that have exactly these blocks, by splitting others. The blocks come run by run, each run's last block
        first."""
        runs: list[Run] = []
        done = 0
        while done < len(blocks):
            run = self._run_with(blocks[done])
            end = len(run.blocks) if run.blocks[-1] == blocks[done] else run.blocks.index(blocks[done]) + 1
            if end < len(run.blocks):
                run = self._split(run, end)
            theirs = [*blocks[done : done + end]]
            mine = run.blocks[end - len(theirs) : end]
            mine.reverse()
            count = num_equal(mine, theirs)
            if count < end:
                self._split(run, end - count)
            runs.append(run)
            done += count
        return runs

    def _give_up(self, run: Run, count: int) -> int:
        """Give up the run's last `count` blocks, with checkpoints at them. Returns how many blocks that frees."""
        before, key = run.parent, run.tokens_of(self._block_size, 0)
        assert before is not None
        blocks, hashes = run.blocks[: -count - 1 : -1], run.hashes[: -count - 1 : -1]
        run.truncate(count, self._block_size)
        for block in blocks:
            self._run_of[block] = None
        self._pool.forget(blocks)
        num_freed = count + sum(map(self.checkpoints.gone, blocks))
        if not self._has_states:
            self._note(hashes, is_kept=False)
        if not run.blocks:
            del before.children[key], self._runs[run]
            for pin in [*run.pins]:
                run.unpin(pin)
            before.num_changes += 1
            run = before
        self._order.offer(run)
        return num_freed

    def _note(self, hashes: Sequence[int], *, is_kept: bool) -> None:
        if is_kept:
            _record(hashes, self._added, self._removed)
        else:
            _record(hashes, self._removed, self._added)


def _record(hashes: Sequence[int], happened: dict[int, None], opposite: dict[int, None]) -> None:
    """Note what happened to these blocks for the next `drain_events`. A change that undoes an unreported one cancels it."""
    if not opposite:
        happened.update(dict.fromkeys(hashes))
        return
    for block_hash in hashes:
        if opposite.pop(block_hash, 0) == 0:
            happened[block_hash] = None


def _next_blocks(run: Run, count: int, size: int) -> list[tuple[tuple[int, ...], int]]:
    """Return the tokens and the block of each continuation behind the first `count` blocks of `run`, at most the newest few."""
    if count < len(run.blocks):
        return [(run.tokens_of(size, count), run.blocks[count])]
    newest = itertools.islice(reversed(run.children.items()), _MAX_SIBLINGS_SCANNED)
    return [(tokens, child.blocks[0]) for tokens, child in newest]


def _longest_common(blocks: Sequence[tuple[tuple[int, ...], int]], wanted: Sequence[int]) -> tuple[int, int]:
    """Return the block that shares the most leading tokens with `wanted`, and how many it shares: (-1, 0) if none."""
    best, best_length = -1, 0
    for tokens, block in blocks:
        length = next(
            (i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b),
            min(len(tokens), len(wanted)),
        )
        if length > best_length:
            best, best_length = block, length
    return best, best_length

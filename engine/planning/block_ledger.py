"""Which blocks each sequence has, and what the prefix cache keeps of them. Owned by StepScheduler.

Invariant: every reference that the pool counts belongs to a sequence, to a step that copies from or makes a checkpoint of a state
in the block, or to a restore."""

import itertools
from collections.abc import Container, Iterable
from collections.abc import Sequence as SeqOf
from dataclasses import dataclass

from core.errors import Bug
from core.kv import num_blocks_for
from core.plan import BlockCopy, StepPlan
from core.types import Request
from engine.cache.block_pool import BlockPool
from engine.cache.prefix_run import num_equal
from engine.cache.radix_cache import PrefixMatch, RadixCache
from engine.planning.checkpointing import Checkpointing
from engine.planning.sequence import Sequence

_REST_BLOCKS = 3
"""Where the beginning of a sequence is here, at most so many blocks behind it are computed here, too. The last is not full, and
copies of two more may have been on their way when an instance was lost."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Blocks for a request's known tokens. The first `matched_tokens` (whole blocks) are in the cache already."""

    key: str
    block_ids: tuple[int, ...]
    matched_tokens: int
    num_tokens: int
    computes_rest: bool = False
    """Whether the rest is so short that it is to be computed here. Where sequences have states, blocks are found for it then."""

    @classmethod
    def of(cls, seq: Sequence, matched_tokens: int, *, computes_rest: bool) -> "Reservation":
        return cls(
            key=seq.key,
            block_ids=seq.table,
            matched_tokens=matched_tokens,
            num_tokens=len(seq.tokens),
            computes_rest=computes_rest,
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """A request's match with the prefix cache, when `num_tokens` of its tokens were known."""

    request: Request
    tokens: SeqOf[int]
    num_tokens: int
    match: PrefixMatch


class BlockLedger:
    def __init__(
        self, pool: BlockPool, cache: RadixCache, block_size: int, num_state_blocks: int = 0
    ) -> None:
        """`num_state_blocks`: of each sequence, before those of its tokens. They have its recurrent state."""
        self._pool, self._cache = pool, cache
        self.block_size, self.num_state_blocks = block_size, num_state_blocks
        self._checkpointing = Checkpointing(pool, cache, block_size, num_state_blocks)
        self._copy_sources: dict[int, list[int]] = {}
        """By step, the blocks that are referenced until it is committed because it copies from them."""
        self._restores: dict[int, tuple[Restore, list[int]]] = {}
        """By its first fresh block: a restore that is under way, and the cached blocks in place of which it has twins. It refers
        to them, so that no cached block is in use while its prefix could be evicted."""
        self._found: dict[bool, _Found] = {}
        """The last match with part of a block, and the last one without. The same request, waiting for room, mostly asks
        again."""
        self.num_queried_tokens = self.num_hit_tokens = 0
        """The known tokens of admitted sequences, and how many of them were cached."""

    @property
    def num_available(self) -> int:
        """The number of unused blocks and of those that the prefix cache would give up."""
        return self._pool.num_free + self._cache.num_evictable

    @property
    def num_restores(self) -> int:
        """The number of restores that are under way."""
        return len(self._restores)

    def find(self, request: Request, tokens: SeqOf[int], *, partial: bool) -> PrefixMatch:
        """Match the first `tokens` of `request` as RadixCache.match does; where sequences have states, up to a checkpoint. An
        earlier match is used again while it would still be found."""
        if not request.reuses_prefix and len(tokens) == len(request.prompt):
            return PrefixMatch(blocks=())
        found = self._found.get(partial)
        if (
            found is None
            or found.request is not request
            or found.num_tokens != len(tokens)
            or not self._cache.still_finds(found.match)
        ):
            match = self._cache.match(tokens, request.prefix_salt, partial=partial)
            found = self._found[partial] = _Found(request, tokens, len(tokens), match)
        return self._with_state(found.match) if self.num_state_blocks else found.match

    def find_at(self, sibling: Sequence, num_computed: int, seq: Sequence, match: PrefixMatch) -> PrefixMatch:
        """`match`, or what `sibling`, with the KV of its first `num_computed` tokens, has more of `seq`'s beginning: a block that
        is not full is not in the prefix cache."""
        if (
            not seq.request.reuses_prefix
            or sibling.request.prefix_salt != seq.request.prefix_salt
            or self.num_state_blocks
        ):
            return match
        size, blocks = self.block_size, match.blocks
        end = min(len(seq.tokens) - 1, num_computed, len(sibling.tokens))
        alike = num_equal(sibling.tokens[:end], [*seq.tokens[:end]])
        if not self._cache.enabled:
            blocks = tuple(sibling.block_ids[: alike // size])
        num_partial = min(alike - len(blocks) * size, size)
        if num_partial <= match.partial_tokens:
            return PrefixMatch(blocks=blocks) if len(blocks) > len(match.blocks) else match
        return PrefixMatch(
            blocks=blocks, partial_block=sibling.block_ids[len(blocks)], partial_tokens=num_partial
        )

    def admit(self, seq: Sequence, match: PrefixMatch, num_tokens: int, headroom: int) -> bool:
        """Give a new sequence its cached prefix and fresh blocks for the rest, leaving `headroom` for those that run."""
        if not self.has_room(match, num_tokens, headroom):
            return False
        needed = self.num_needed(num_tokens) - len(match.blocks)
        self._pool.share(match.blocks)
        self._pool.share(match.state)
        if match.partial_tokens:
            self._pool.share([match.partial_block])
        fresh, first = self._take(needed), self.num_state_blocks
        seq.grow([*fresh[:first], *match.blocks, *fresh[first:]])
        seq.num_kept = len(match.blocks)
        self._checkpointing.admitted(seq, match)
        seq.num_computed = len(match.blocks) * self.block_size
        if seq.num_cached < 0:
            seq.num_cached = seq.num_computed + match.partial_tokens
        self.num_queried_tokens += len(seq.tokens)
        self.num_hit_tokens += seq.num_computed
        return True

    def has_room(self, match: PrefixMatch, num_tokens: int, headroom: int) -> bool:
        """Return whether a sequence with this match can get blocks for so many tokens, and `headroom` are left."""
        needed = self.num_needed(num_tokens) - len(match.blocks)
        idle = sum(self._pool.refs(block) == 0 for block in match.blocks)
        idle += sum(self._pool.refs(block) == 0 for block in match.state)
        idle += match.partial_tokens > 0 and self._pool.refs(match.partial_block) == 0
        return self.num_available - idle >= needed + headroom

    def copies(self, seq: Sequence, match: PrefixMatch, step: int) -> list[BlockCopy]:
        """Return the copies of a match into blocks that `admit` gave fresh: of a partly equal block's beginning, of a state."""
        copies: list[BlockCopy] = []
        if match.state:
            self._cache.checkpoints.touch(match.blocks[-1])
            copies = self._whole(match.state, seq.block_ids)
        if match.partial_tokens:
            destination = seq.block_ids[len(match.blocks)]
            seq.num_computed += match.partial_tokens
            self.num_hit_tokens += match.partial_tokens
            copies.append(BlockCopy(match.partial_block, destination, match.partial_tokens))
        if copies:
            self._copy_sources.setdefault(step, []).extend(copy.src for copy in copies)
        return copies

    def has_come(self, seq: Sequence) -> None:
        """Offer the cache what another instance has computed of a sequence. If it goes on, its state is kept where the next block
        ends."""
        self.offer(seq, seq.num_computed)
        self._checkpointing.has_come(seq)

    def leave_state(self, seq: Sequence) -> None:
        """Make the state of a sequence that ends a checkpoint, where it ends with a block and no step is in flight."""
        self._checkpointing.leave_state(seq)

    def begins_near(self, request: Request, match: PrefixMatch) -> bool:
        """Return whether what a request lacks of its KV is so little that it is to be computed here, whoever else could."""
        num_blocks = _REST_BLOCKS if match.blocks else 1
        if match.state and request.emitted:  # nobody who is asked for it has more of what was generated
            num_blocks += self._checkpointing.num_apart
        return len(request.tokens) <= (len(match.blocks) + num_blocks) * self.block_size

    def before_checkpoint(self, seq: Sequence, count: int) -> int:
        """Return how many of its next `count` tokens are to be computed before a checkpoint is made."""
        return self._checkpointing.before(seq, count)

    def checkpoint(self, seq: Sequence, step: int, headroom: int) -> list[BlockCopy]:
        """Return the copies that make a checkpoint of the state that `step` finds, where one is to be made, the budget allows it
        and `headroom` blocks are left for those that run."""
        if not seq.checkpoints:
            return []
        num_spare = self.num_available - headroom
        return self._whole(seq.block_ids, self._checkpointing.make(seq, step, num_spare, self._take))

    def committed(self, step: int) -> None:
        self._checkpointing.committed(step)
        self._give_back(self._copy_sources.pop(step, []))

    def undo_copies(self, seq: Sequence, plan: StepPlan) -> None:
        """Let what a plan that was taken back would have copied into the sequence be computed."""
        own = self._token_blocks(seq)
        for copy in plan.copies:
            if copy.dst in own:
                seq.num_computed = min(seq.num_computed, own.index(copy.dst) * self.block_size)

    def uncomputed(self, seq: Sequence) -> list[int]:
        """Return the sequence's blocks that do not have all of their KV yet."""
        return self._token_blocks(seq)[seq.num_computed // self.block_size :]

    def relies_on(self, seq: Sequence, blocks: Container[int]) -> bool:
        """Return whether any of `blocks` is one that the sequence takes for computed."""
        full = self._token_blocks(seq)[: seq.num_computed // self.block_size]
        return any(block in blocks for block in full)

    def kept(self, seq: Sequence) -> list[int]:
        """Return the sequence's leading blocks that are full, and whose KV the prefix cache has been offered."""
        return self._token_blocks(seq)[: seq.num_kept]

    def _token_blocks(self, seq: Sequence) -> list[int]:
        """Return the sequence's blocks without those of its recurrent state."""
        return seq.block_ids[self.num_state_blocks :]

    def undone(self, step: int) -> None:
        """Give back what `committed` would: the step was taken back."""
        self._checkpointing.undone(step)
        self._give_back(self._copy_sources.pop(step, []))

    def num_needed(self, num_tokens: int) -> int:
        """Return the number of blocks of a sequence with the KV of so many tokens."""
        return self.num_state_blocks + num_blocks_for(num_tokens, self.block_size)

    def grow(self, seq: Sequence, count: int) -> None:
        """Give the sequence more blocks. The caller has checked `num_available`."""
        seq.grow(self._take(count))

    def room(self, seq: Sequence, count: int, headroom: int) -> int:
        """Return how many of `count` tokens behind the known ones find room in the sequence's blocks. It gets more for them
        where `headroom` are left for those that run."""
        known = seq.num_planned_tokens
        needed = self.num_needed(known + count) - len(seq.block_ids)
        if 0 < needed <= self.num_available - headroom:
            self.grow(seq, needed)
        return min(count, self.capacity(seq) - known)

    def capacity(self, seq: Sequence) -> int:
        """Return the number of tokens whose KV the sequence's blocks have room for."""
        return (len(seq.block_ids) - self.num_state_blocks) * self.block_size

    def offer(self, seq: Sequence, num_tokens: int) -> None:
        """Offer the cache the full blocks of the sequence's first `num_tokens` tokens, whose KV is complete."""
        num_full = min(num_tokens, len(seq.tokens)) // self.block_size
        if num_full > seq.num_kept:
            twins = self._cache.insert(
                seq.tokens,
                num_full,
                self._token_blocks(seq),
                seq.request.prefix_salt,
                seq.num_kept,
                seq.twins,
            )
            self._pool.share(twins)
            seq.twins += twins
            seq.num_kept = num_full

    def strip(self, seq: Sequence) -> None:
        blocks = [*reversed(seq.block_ids), *reversed(seq.twins)]
        self._cache.release(self._pool.drop(blocks), wanted=seq.request.retain)
        seq.block_ids, seq.table, seq.twins = [], (), []
        seq.num_kept = seq.num_computed = 0
        self._checkpointing.stripped(seq)

    def cached_prefix(self, request: Request) -> CachedPrefix:
        blocks = self._cache.match(request.tokens, request.prefix_salt, partial=False).blocks
        has_states = self.num_state_blocks > 0
        return CachedPrefix(
            len(blocks), self._cache.checkpoints.last(blocks)[0] if has_states else len(blocks)
        )

    def begin_restore(self, request: Request, num_full: int, headroom: int) -> Restore | None:
        prefix = self._cache.match(request.tokens, request.prefix_salt, partial=False).blocks[:num_full]
        num_fresh, num_states = num_full - len(prefix), self.num_state_blocks
        idle = sum(self._pool.refs(block) == 0 for block in prefix)
        if self.num_available - idle < num_fresh + num_states + headroom:
            return None
        self._pool.share(prefix)
        if num_states and not self._cache.checkpoints.begin(num_states):
            self._give_back([*reversed(prefix)])
            return None
        fresh = self._take(num_fresh + num_states)
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

    def check_integrity(self, seqs: Iterable[Sequence]) -> None:
        """Raise Bug where the sequences, the pool and the prefix cache disagree."""
        refs = [0] * self._pool.blocks.stop
        held = [block for blocks in self._copy_sources.values() for block in blocks]
        held += self._checkpointing.held_blocks
        for restore, twins in self._restores.values():
            held += [*restore.prefix, *restore.fresh, *twins]
        for block in itertools.chain(held, *(itertools.chain(s.block_ids, s.twins) for s in seqs)):
            refs[block] += 1
        self._pool.check_integrity(refs)
        self._cache.check_integrity()
        for partial, found in self._found.items():
            tokens, salt = found.tokens[: found.num_tokens], found.request.prefix_salt
            if (
                self._cache.still_finds(found.match)
                and self._cache.match(tokens, salt, partial=partial) != found.match
            ):
                raise Bug(f"what {found.request.key} has in the prefix cache has changed unnoticed")

    def _with_state(self, match: PrefixMatch) -> PrefixMatch:
        """Return as much of a match as has a checkpoint behind it."""
        count, state = self._cache.checkpoints.last(match.blocks)
        return PrefixMatch(blocks=match.blocks[:count], state=state, num_alike=len(match.blocks))

    def _whole(self, sources: SeqOf[int], destinations: SeqOf[int]) -> list[BlockCopy]:
        """Return the copies of a state."""
        pairs = zip(sources, destinations, strict=False)
        return [BlockCopy(source, destination, self.block_size) for source, destination in pairs]

    def _take(self, count: int) -> list[int]:
        if (short := count - self._pool.num_free) > 0:
            self._cache.evict(short)
        return self._pool.take(count)

    def _give_back(self, blocks: list[int]) -> None:
        self._cache.release(self._pool.drop(blocks))

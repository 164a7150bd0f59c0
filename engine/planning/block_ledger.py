"""Which blocks each sequence has, and what the prefix cache keeps of them. Owned by StepScheduler.

Invariant: every reference that the pool counts belongs to a sequence, to a step that copies from or makes a checkpoint of a state
in the block, or to a restore."""

import itertools
from collections.abc import Iterable
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
        self.pool, self._cache = pool, cache
        self.block_size, self.num_state_blocks = block_size, num_state_blocks
        self.checkpointing = Checkpointing(pool, cache, block_size, num_state_blocks)
        self._copy_sources: dict[int, list[int]] = {}
        """By step, the blocks that are referenced until it is committed because it copies from them."""
        self._found: dict[bool, _Found] = {}
        """The last match with part of a block, and the last one without. The same request, waiting for room, mostly asks
        again."""
        self.num_queried_tokens = self.num_hit_tokens = 0
        """The known tokens of admitted sequences, and how many of them were cached."""

    @property
    def num_available(self) -> int:
        """The number of unused blocks and of those that the prefix cache would give up."""
        return self.pool.num_free + self._cache.num_evictable

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
        self.pool.share(match.blocks)
        self.pool.share(match.state)
        if match.partial_tokens:
            self.pool.share([match.partial_block])
        fresh, first = self.take(needed), self.num_state_blocks
        seq.grow([*fresh[:first], *match.blocks, *fresh[first:]])
        seq.num_kept = len(match.blocks)
        self.checkpointing.admitted(seq, match)
        seq.num_computed = len(match.blocks) * self.block_size
        if seq.num_cached < 0:
            seq.num_cached = seq.num_computed + match.partial_tokens
        self.num_queried_tokens += len(seq.tokens)
        self.num_hit_tokens += seq.num_computed
        return True

    def has_room(self, match: PrefixMatch, num_tokens: int, headroom: int) -> bool:
        """Return whether a sequence with this match can get blocks for so many tokens, and `headroom` are left."""
        needed = self.num_needed(num_tokens) - len(match.blocks)
        idle = sum(self.pool.refs(block) == 0 for block in match.blocks)
        idle += sum(self.pool.refs(block) == 0 for block in match.state)
        idle += match.partial_tokens > 0 and self.pool.refs(match.partial_block) == 0
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
        self.checkpointing.has_come(seq)

    def checkpoint(self, seq: Sequence, step: int, headroom: int) -> list[BlockCopy]:
        """Return the copies that make a checkpoint of the state that `step` finds, where one is to be made, the budget allows it
        and `headroom` blocks are left for those that run."""
        if not seq.checkpoints:
            return []
        num_spare = self.num_available - headroom
        return self._whole(seq.block_ids, self.checkpointing.make(seq, step, num_spare, self.take))

    def committed(self, step: int) -> None:
        self.checkpointing.committed(step)
        self._give_back(self._copy_sources.pop(step, []))

    def undone(self, plan: StepPlan, seqs: Iterable[Sequence]) -> None:
        """Give back what `committed` would: the plan was taken back. Let what it would have copied into `seqs` be computed."""
        for seq in seqs:
            own = self._token_blocks(seq)
            for copy in plan.copies:
                if copy.dst in own:
                    seq.num_computed = min(seq.num_computed, own.index(copy.dst) * self.block_size)
        self.checkpointing.undone(plan.step)
        self._give_back(self._copy_sources.pop(plan.step, []))

    def relying(self, seqs: SeqOf[Sequence]) -> set[Sequence]:
        """Return those of `seqs` that take blocks for computed which one of them is still to compute."""
        num_full = {seq: seq.num_computed // self.block_size for seq in seqs}
        missing = {block for seq in seqs for block in self._token_blocks(seq)[num_full[seq] :]}
        return {seq for seq in seqs if not missing.isdisjoint(self._token_blocks(seq)[: num_full[seq]])}

    def kept(self, seq: Sequence) -> list[int]:
        """Return the sequence's leading blocks that are full, and whose KV the prefix cache has been offered."""
        return self._token_blocks(seq)[: seq.num_kept]

    def _token_blocks(self, seq: Sequence) -> list[int]:
        """Return the sequence's blocks without those of its recurrent state."""
        return seq.block_ids[self.num_state_blocks :]

    def num_needed(self, num_tokens: int) -> int:
        """Return the number of blocks of a sequence with the KV of so many tokens."""
        return self.num_state_blocks + num_blocks_for(num_tokens, self.block_size)

    def grow(self, seq: Sequence, count: int) -> None:
        """Give the sequence more blocks. The caller has checked `num_available`."""
        seq.grow(self.take(count))

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
            self.pool.share(twins)
            seq.twins += twins
            seq.num_kept = num_full

    def strip(self, seq: Sequence) -> None:
        blocks = [*reversed(seq.block_ids), *reversed(seq.twins)]
        self._cache.release(self.pool.drop(blocks), wanted=seq.request.retain)
        seq.block_ids, seq.table, seq.twins = [], (), []
        seq.num_kept = seq.num_computed = 0
        self.checkpointing.stripped(seq)

    def check_integrity(self, seqs: Iterable[Sequence], restored: Iterable[int] = ()) -> None:
        """Raise Bug where the sequences, the blocks that restores have, the pool and the prefix cache disagree."""
        refs = [0] * self.pool.blocks.stop
        held = [*restored, *self.checkpointing.held_blocks]
        held += [block for blocks in self._copy_sources.values() for block in blocks]
        for block in itertools.chain(held, *(itertools.chain(s.block_ids, s.twins) for s in seqs)):
            refs[block] += 1
        self.pool.check_integrity(refs)
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

    def take(self, count: int) -> list[int]:
        """Take blocks, given up by the prefix cache where too few are free. The caller has checked `num_available`."""
        if (short := count - self.pool.num_free) > 0:
            self._cache.evict(short)
        return self.pool.take(count)

    def _give_back(self, blocks: list[int]) -> None:
        self._cache.release(self.pool.drop(blocks))

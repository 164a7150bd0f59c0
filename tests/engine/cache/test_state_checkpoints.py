"""Checkpoints of recurrent states beside the cached blocks behind which they stand."""

from dataclasses import dataclass

import pytest

from core.errors import Bug
from core.kv import block_hashes
from engine.cache.block_pool import BlockPool
from engine.cache.radix_cache import RadixCache

SIZE, STATE = 2, 3


@dataclass(slots=True)
class Kept:
    pool: BlockPool
    cache: RadixCache

    def keep(self, tokens: list[int]) -> list[int]:
        """Cache full blocks that nobody refers to."""
        count = len(tokens) // SIZE
        blocks = self.pool.take(count)
        twins = self.cache.insert(tokens, count, blocks, "")
        self.cache.release(self.pool.drop(blocks[::-1]))
        return [*twins, *blocks[len(twins) :]]

    def checkpoint(self, blocks: list[int], count: int) -> bool:
        """Make one behind the first `count` blocks of a prefix; for a sequence that has left if that is 0."""
        if not self.cache.checkpoints.begin(STATE):
            return False
        self.cache.evict(max(0, STATE - self.pool.num_free))
        state = self.pool.take(STATE)
        if count:
            self.cache.keep_checkpoint(state, blocks, count, [], 0)
        else:
            self.cache.checkpoints.drop(state)
        self.check()
        return True

    def num_found(self, tokens: list[int]) -> int:
        blocks = self.cache.match(tokens, "", partial=False).blocks
        return self.cache.checkpoints.last(blocks)[0]

    def check(self) -> None:
        self.pool.check_integrity([self.pool.refs(block) for block in self.pool.blocks])
        self.cache.check_integrity()


def kept(num_blocks: int) -> Kept:
    pool = BlockPool(num_blocks)
    return Kept(pool, RadixCache(pool, SIZE, has_states=True))


def test_a_prefix_ends_at_its_last_checkpoint() -> None:
    cached = kept(40)
    tokens = list(range(20))
    blocks = cached.keep(tokens)
    assert cached.num_found(tokens) == 0
    assert cached.checkpoint(blocks, 3)
    assert cached.checkpoint(blocks, 7)
    assert cached.num_found([*tokens, 99]) == 7
    assert cached.num_found([*tokens[:14], 99]) == 7
    assert cached.num_found([*tokens[:13], 99]) == 3
    assert cached.num_found([99, *tokens]) == 0


def test_the_budget_holds_and_what_was_not_used_for_longest_goes() -> None:
    cached = kept(14)  # two checkpoints are within half of them
    blocks = cached.keep(list(range(8)))
    assert cached.checkpoint(blocks, 1)
    assert cached.checkpoint(blocks, 2)
    cached.cache.checkpoints.touch(blocks[0])
    assert cached.checkpoint(blocks, 3)
    assert cached.cache.checkpoints.num_blocks == 2 * STATE
    assert cached.num_found([0, 1, 2, 3, 9]) == 1, "the second one has gone"
    assert cached.num_found([0, 1, 2, 3, 4, 5, 9]) == 3


def test_a_checkpoint_that_is_being_copied_stays() -> None:
    cached = kept(7)
    blocks = cached.keep([1, 2])
    assert cached.checkpoint(blocks, 1)
    _, state = cached.cache.checkpoints.last((blocks[0],))
    cached.pool.share(blocks)
    cached.pool.share(state)
    assert not cached.checkpoint(blocks, 0), "the budget has room for one"
    cached.cache.release(cached.pool.drop([*state, *blocks]))
    assert cached.checkpoint(blocks, 0), "it may go again"
    assert cached.num_found([1, 2, 3]) == 0


def test_the_second_of_two_alike_and_one_without_a_place_are_freed_at_once() -> None:
    cached = kept(40)
    blocks = cached.keep([1, 2])
    for count in (1, 1, 0):
        assert cached.checkpoint(blocks, count)
    assert cached.cache.checkpoints.num_blocks == STATE
    assert cached.pool.num_free == 40 - 1 - STATE


def test_eviction_gives_back_every_block() -> None:
    """Also of a checkpoint whose cached block is in use."""
    cached = kept(40)
    tokens = list(range(16))
    blocks = cached.keep(tokens)
    for count in (2, 8):
        assert cached.checkpoint(blocks, count)
    cached.pool.share(blocks[:2])
    assert cached.cache.num_evictable == 6 + 2 * STATE
    cached.cache.evict(1)
    assert cached.pool.num_free == 40 - 8 - STATE + 1, "a block goes with its checkpoint"
    cached.cache.evict(5 + 1)
    assert cached.num_found([*tokens, 99]) == 0
    assert cached.pool.num_free == 38
    with pytest.raises(Bug, match="none can be"):
        cached.cache.evict(1)
    cached.cache.release(cached.pool.drop(blocks[1::-1]))
    cached.cache.evict(2)
    assert cached.pool.num_free == 40
    cached.check()


def test_only_blocks_that_lead_to_a_checkpoint_are_told_of() -> None:
    cached = kept(60)
    tokens, other = list(range(20)), [*range(8), *range(50, 62)]
    hashes, others = block_hashes(tokens, SIZE), block_hashes(other, SIZE)
    blocks, others_blocks = cached.keep(tokens), cached.keep(other)
    assert cached.cache.drain_events() == ((), ())
    cached.checkpoint(blocks, 6)
    assert cached.cache.drain_events() == (tuple(hashes[:6]), ())
    cached.checkpoint(others_blocks, 5)
    assert cached.cache.drain_events() == ((others[4],), ())
    cached.cache.replay_events()
    assert set(cached.cache.drain_events()[0]) == {*hashes[:6], others[4]}
    assert cached.cache.checkpoints.give_up() == STATE
    assert cached.cache.drain_events() == ((), tuple(hashes[4:6]))
    cached.cache.evict(cached.cache.num_evictable)
    assert cached.cache.drain_events() == ((), (*hashes[:4], others[4]))
    assert cached.pool.num_free == 60


def test_where_the_budget_does_not_suffice_no_checkpoint_is_given_up() -> None:
    cached = kept(20)  # of which 10 may be checkpoints'
    first, second = list(range(4)), list(range(10, 14))
    blocks = cached.keep(first)
    assert cached.checkpoint(blocks, 2)
    assert cached.checkpoint(cached.keep(second), 2)
    assert not cached.cache.checkpoints.begin(11)
    assert cached.num_found([*first, 99]) == cached.num_found([*second, 99]) == 2
    cached.check()

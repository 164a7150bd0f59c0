"""The prefix tree of runs does what a tree of blocks does: the same is found, kept, reported and given up, in the same order."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.block_pool import BlockPool
from engine.cache.prefix_run import Pin
from engine.cache.radix_cache import PrefixMatch, RadixCache
from tests.engine.cache.plain_cache import PlainCache

NUM_BLOCKS = 24


@dataclass(kw_only=True)
class Running:
    tokens: list[int]
    num_cached: int
    blocks: tuple[list[int], list[int]]
    """In either cache: the same ones, or something is wrong."""
    num_kept: int = 0
    twins: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))


class Both:
    """A cache and its model, which are asked the same."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pools = BlockPool(NUM_BLOCKS), BlockPool(NUM_BLOCKS)
        self.cache = RadixCache(self.pools[0], size)
        self.model = PlainCache(self.pools[1], size)
        self.running: list[Running] = []
        self.pins: dict[str, Pin] = {}
        self.num_pins = 0
        self.found = deque[tuple[list[int], PrefixMatch]](maxlen=6)
        """What was looked for last."""

    def begin(self, prompt: list[int]) -> None:
        match = self.cache.match(prompt, "", partial=True)
        self.found.append((prompt, match))
        found = match.blocks
        assert found == self.model.match(prompt)
        assert match.partial_tokens == self.model.next_block(prompt, len(found))
        idle = sum(self.pools[0].refs(block) == 0 for block in found)
        missing = -(-len(prompt) // self.size) - len(found)
        if self.pools[0].num_free + self.cache.num_evictable - idle < missing:
            return
        blocks: list[list[int]] = []
        for cache, pool in zip((self.cache, self.model), self.pools, strict=True):
            pool.share(found)
            if missing > pool.num_free:
                cache.evict(missing - pool.num_free)
            blocks.append([*found, *pool.take(missing)])
        assert blocks[0] == blocks[1], "other blocks were given up"
        self.running.append(
            Running(tokens=prompt, num_cached=len(found), blocks=(blocks[0], blocks[1]), num_kept=len(found))
        )

    def advance(self, which: int, count: int) -> None:
        """Keep `count` more blocks of one that runs."""
        run = self.running[which % len(self.running)]
        num_full = min(run.num_kept + count, len(run.tokens) // self.size)
        if num_full <= run.num_kept:
            return
        twins = self.cache.insert(run.tokens, num_full, run.blocks[0], "", run.num_kept, run.twins[0])
        assert twins == self.model.insert(run.tokens, num_full, run.blocks[1], run.num_kept)
        for pool, known in zip(self.pools, run.twins, strict=True):
            pool.share(twins)
            known += twins
        run.num_kept = num_full

    def end(self, which: int, wanted: bool) -> None:
        run = self.running.pop(which % len(self.running))
        idle = [
            pool.drop([*reversed(blocks), *reversed(twins)])
            for pool, blocks, twins in zip(self.pools, run.blocks, run.twins, strict=True)
        ]
        self.cache.release(idle[0], wanted=wanted)
        self.model.release(idle[1], wanted=wanted)

    def pin(self, which: int, most: int, ends_at: float) -> None:
        """Pin the first blocks of one that runs, as far as they are kept."""
        run = self.running[which % len(self.running)]
        if not run.num_kept:
            return
        name, pin = f"pin {self.num_pins}", Pin(ends_at)
        self.num_pins += 1
        self.pins[name] = pin
        self.cache.pin(pin, most, run.blocks[0][: run.num_kept], run.twins[0])
        self.model.pin(name, ends_at, run.tokens, min(run.num_kept, most))

    def unpin(self, which: int, wanted: bool) -> None:
        if self.pins:
            name = [*self.pins][which % len(self.pins)]
            self.cache.unpin(self.pins.pop(name), wanted=wanted)
            self.model.unpin(name, wanted=wanted)

    def borrow(self, prompt: list[int]) -> None:
        """The first cached block is referred to for a moment, without a sequence: as a copy from it does."""
        for block in self.cache.match(prompt, "", partial=False).blocks[:1]:
            for cache, pool in zip((self.cache, self.model), self.pools, strict=True):
                pool.share([block])
                cache.release(pool.drop([block]), wanted=True)

    def check(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_idle_of(self.pins.values()) == self.model.num_pinned()
        added, removed = self.cache.drain_events()
        assert (set(added), set(removed)) == self.model.events
        for known in self.model.events:
            known.clear()
        for prompt, match in self.found:
            if self.cache.still_finds(match):
                assert self.cache.match(prompt, "", partial=True) == match


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
STEPS = st.one_of(
    st.tuples(st.just("begin"), PROMPTS),
    st.tuples(st.just("advance"), st.integers(0, 9), st.integers(1, 6)),
    st.tuples(st.just("end"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("borrow"), PROMPTS),
    st.tuples(st.just("pin"), st.integers(0, 9), st.integers(0, 8), st.sampled_from([1.0, 2.0])),
    st.tuples(st.just("unpin"), st.integers(0, 9), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), st.lists(STEPS, max_size=120))
def test_it_does_what_a_tree_of_blocks_does(size: int, steps: list[tuple[str, object]]) -> None:
    both = Both(size)
    for name, *args in steps:
        if name in ("begin", "borrow", "unpin") or both.running:
            getattr(both, name)(*args)
            both.check()


@pytest.mark.parametrize("size", [1, 3])
def test_it_does_so_for_long_too(size: int) -> None:
    """Thousands of turns: what is out of date in the heap is dropped."""
    rng, both = np.random.default_rng(size), Both(size)
    for _ in range(4000):
        kind = rng.random()
        if kind < 0.35:
            both.begin([int(t) for t in rng.integers(0, 2 if kind < 0.3 else 9, rng.integers(1, 30))])
        elif both.running and kind < 0.7:
            both.advance(int(rng.integers(9)), int(rng.integers(1, 7)))
        elif both.running and kind < 0.8:
            both.pin(int(rng.integers(9)), int(rng.integers(9)), float(rng.integers(3)))
        elif kind < 0.85 + 0.05 * (len(both.pins) > 5):
            both.unpin(int(rng.integers(9)), wanted=bool(rng.random() < 0.5))
        elif both.running:
            both.end(int(rng.integers(9)), bool(rng.random() < 0.8))
        both.check()


def test_a_prompt_that_nobody_shares_is_one_run_however_it_comes_and_goes() -> None:
    pool = BlockPool(100)
    cache = RadixCache(pool, 2)
    prompt, blocks = list(range(100)), pool.take(50)
    for num_full in range(10, 51, 10):
        cache.insert(prompt, num_full, blocks, "", num_full - 10)
    cache.release(pool.drop([*reversed(blocks)]))
    assert cache.num_runs == 1
    cache.evict(20)
    assert cache.num_runs == 1
    assert cache.match(prompt, "", partial=False).blocks == tuple(blocks[:30])


def test_what_is_used_again_and_again_leaves_no_candidates_behind() -> None:
    pool = BlockPool(8)
    cache = RadixCache(pool, 1)
    for _ in range(1000):
        match = cache.match([1, 2, 3], "", partial=False)
        pool.share(match.blocks)
        blocks = [*match.blocks, *pool.take(3 - len(match.blocks))]
        cache.insert([1, 2, 3], 3, blocks, "", len(match.blocks))
        cache.release(pool.drop([*reversed(blocks)]))
    assert cache.num_candidates < 500


class Prompts:
    """A prefix cache of one-token blocks that serves prompts one after another."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache(self.pool, 1)

    def serve(self, prompt: tuple[int, ...], *, wanted: bool = True) -> int:
        """How many of its blocks were cached."""
        found = self.cache.match((*prompt, -1), "", partial=False).blocks
        self.pool.share(found)
        missing = len(prompt) - len(found)
        if missing > self.pool.num_free:
            self.cache.evict(missing - self.pool.num_free)
        blocks = [*found, *self.pool.take(missing)]
        self.cache.insert(prompt, len(prompt), blocks, "", len(found))
        self.cache.release(self.pool.drop([*reversed(blocks)]), wanted=wanted)
        self.cache.check_integrity()
        return len(found)

    def cached(self, prompt: tuple[int, ...]) -> int:
        return len(self.cache.match((*prompt, -1), "", partial=False).blocks)


@given(st.lists(st.integers(0, 9), max_size=200), st.integers(1, 8))
def test_it_evicts_what_a_plain_lru_evicts(prompts: list[int], size: int) -> None:
    served, plain = Prompts(size), OrderedDict[int, None]()
    for number in prompts:
        assert served.serve((number,)) == (number in plain)
        plain[number] = None
        plain.move_to_end(number)
        if len(plain) > size:
            plain.popitem(last=False)


def test_what_nobody_will_ask_for_goes_first_but_not_what_others_go_on_from() -> None:
    served = Prompts(12)
    served.serve((1, 2, 3, 4))
    served.serve((1, 2, 5, 6))
    served.serve((1, 2, 7, 8), wanted=False)
    served.serve((20, 21))
    served.serve((30, 31, 32, 33))
    assert served.cached((1, 2, 7)) == 2, "its own blocks are gone"
    assert served.cached((1, 2, 3, 4)) == 4
    assert served.cached((20, 21)) == 2

"""Which cached blocks go first: LRU against a plain one, hit density against its definition and against LRU where it should win."""

import math
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache import eviction_policy
from engine.cache.block_pool import BlockPool
from engine.cache.eviction_policy import Eviction, HitDensity, LeastRecentlyUsed
from engine.cache.radix_cache import RadixCache


class Cache:
    """A prefix cache of one-token blocks that serves prompts one after another."""

    def __init__(self, num_blocks: int, policy: Eviction) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache(self.pool, 1, True, policy)

    def serve(self, prompt: tuple[int, ...], *, priority: int = 0, wanted: bool = True) -> int:
        """How many of its blocks were cached."""
        found = self.cache.match((*prompt, -1), "", partial=False).blocks
        self.cache.use(found)
        self.pool.share(found)
        missing = len(prompt) - len(found)
        if missing > self.pool.num_free:
            self.cache.evict(missing - self.pool.num_free)
        blocks = [*found, *self.pool.take(missing)]
        self.cache.insert(prompt, len(prompt), blocks, "", len(found))
        self.cache.release(self.pool.drop([*reversed(blocks)]), priority, wanted)
        self.cache.check_integrity()
        return len(found)

    def cached(self, prompt: tuple[int, ...]) -> int:
        return len(self.cache.match((*prompt, -1), "", partial=False).blocks)


@given(st.lists(st.integers(0, 9), max_size=200), st.integers(1, 8))
def test_lru_evicts_what_a_plain_lru_evicts(prompts: list[int], size: int) -> None:
    cache, plain = Cache(size, LeastRecentlyUsed()), OrderedDict[int, None]()
    for number in prompts:
        assert cache.serve((number,)) == (number in plain)
        plain[number] = None
        plain.move_to_end(number)
        if len(plain) > size:
            plain.popitem(last=False)


@given(st.integers(0, 2**22))
def test_an_ages_bucket_is_the_one_whose_range_holds_it(age: int) -> None:
    begins = eviction_policy._BEGINS  # pyright: ignore[reportPrivateUsage]
    bucket = eviction_policy._bucket(age)  # pyright: ignore[reportPrivateUsage]
    assert begins[bucket] <= age
    assert age < begins[bucket + 1] or math.isclose(age, begins[bucket + 1])


def test_the_density_of_a_constant_rate_is_that_rate() -> None:
    """Use without memory: however long a block is kept, it brings `rate` hits for each age."""
    rates = np.full((1, eviction_policy._NUM_AGES), 0.01)  # pyright: ignore[reportPrivateUsage]
    assert eviction_policy._hit_density(rates) == pytest.approx(0.01)  # pyright: ignore[reportPrivateUsage]


def test_the_density_looks_ahead_to_where_use_is_likely() -> None:
    """Never wanted before age 1024, then within 424: keeping from age 0 on costs at least 1024 for one hit."""
    rates = np.full((1, eviction_policy._NUM_AGES), 1e-12)  # pyright: ignore[reportPrivateUsage]
    rates[0, 20] = 1.0
    density = eviction_policy._hit_density(rates)[0]  # pyright: ignore[reportPrivateUsage]
    assert density[0] == pytest.approx(1 / 1025, rel=1e-2)
    assert density[20] == pytest.approx(1.0, rel=1e-2)
    assert density[21] < 1e-9


def test_conversations_survive_a_stream_of_one_shot_prompts() -> None:
    """Prompts that were continued before are continued again, others never: what LRU cannot see."""
    hits = {}
    for policy in (LeastRecentlyUsed(), HitDensity()):
        cache, hit, fresh = Cache(400, policy), 0, 1_000_000
        talks = [tuple(range(i * 1000, i * 1000 + 8)) for i in range(1, 17)]
        for turn in range(120):
            for number in range(24):
                cache.serve(tuple(range(fresh, fresh + 16)))
                fresh += 16
                if number < len(talks):
                    talks[number] = (*talks[number][-12:], fresh) if turn % 30 == 29 else talks[number]
                    hit += cache.serve(talks[number])
        hits[type(policy)] = hit
    assert hits[HitDensity] > 2 * hits[LeastRecentlyUsed] + 1000


def test_a_class_that_matters_less_gives_way_first() -> None:
    """Both alike in use; the batch class's value is half."""
    cache = Cache(512, HitDensity())
    for _ in range(8):
        for number in range(32):
            cache.serve(tuple(range(number * 100, number * 100 + 8)), priority=-1 if number % 2 else 0)
    for number in range(20):
        cache.serve(tuple(range(100_000 + number * 100, 100_000 + number * 100 + 16)))
    left = [cache.cached(tuple(range(n * 100, n * 100 + 8))) for n in range(32)]
    assert sum(left[0::2]) > sum(left[1::2])


@pytest.mark.parametrize("policy", [LeastRecentlyUsed(), HitDensity()])
def test_what_nobody_will_ask_for_goes_first_but_not_what_others_go_on_from(policy: Eviction) -> None:
    cache = Cache(12, policy)
    cache.serve((1, 2, 3, 4))
    cache.serve((1, 2, 5, 6))
    cache.serve((1, 2, 7, 8), wanted=False)
    cache.serve((20, 21))
    cache.serve((30, 31, 32, 33))
    assert cache.cached((1, 2, 7)) == 2, "its own blocks are gone"
    assert cache.cached((1, 2, 3, 4)) == 4
    assert cache.cached((20, 21)) == 2


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(-1, 2), st.booleans()), max_size=80)
)
def test_whatever_group_blocks_move_to_there_is_always_one_to_evict(
    asked: list[tuple[int, int, int, bool]],
) -> None:
    cache = Cache(8, HitDensity())
    for kind, length, priority, wanted in asked:
        cache.serve(tuple(range(kind * 3, kind * 3 + length)), priority=priority, wanted=wanted)

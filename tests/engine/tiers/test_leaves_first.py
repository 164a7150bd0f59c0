"""What host memory and the disk give up when they are full."""

import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tiers.disk_tier import DiskTier
from engine.tiers.host_tier import HostTier
from engine.tiers.leaves_first import LeavesFirst


def saved(tier: HostTier, chain: str, *names: str) -> str:
    """Save blocks, the first of which follows the last of `chain`. Returns the first letters of what has to make room."""
    before, gone = chain, ""
    for name in names:
        gone += "".join(digest.decode() for digest, *_ in tier.put(name.encode(), b"kv", before.encode()))
        before = name
    return gone


def test_of_the_oldest_prompt_the_last_block_goes_first_and_all_of_it_before_anything_younger() -> None:
    tier = HostTier(6)
    assert saved(tier, "", "a", "b", "c") == ""
    assert saved(tier, "", "x", "y", "z") == ""
    assert saved(tier, "", "1", "2", "3", "4", "5") == "cbazy"
    assert b"x" in tier


def test_what_two_prompts_begin_with_outlives_the_end_of_either() -> None:
    tier = HostTier(4)
    saved(tier, "", "a", "b")
    saved(tier, "a", "c")
    assert saved(tier, "", "1", "2", "3", "4") == "bca"


def test_a_prompt_that_is_read_back_is_renewed_with_all_that_it_begins_with() -> None:
    tier = HostTier(6)
    saved(tier, "", "a", "b", "c")
    saved(tier, "", "x", "y", "z")
    assert tier.get(b"c") == b"kv"  # the device has the others
    assert saved(tier, "", "1", "2", "3", "4", "5", "6") == "zyxcba"


def test_a_beginning_that_is_used_alone_stays_longer_than_what_follows_it() -> None:
    tier = HostTier(4)
    saved(tier, "", "a", "b")
    saved(tier, "", "x", "y")
    assert tier.get(b"a") == b"kv"
    assert saved(tier, "", "1", "2", "3", "4") == "byxa"


def test_blocks_wait_for_what_they_follow_and_for_those_that_learn_it_later() -> None:
    tier = HostTier(5)
    for name in (b"x", b"y", b"b", b"a"):  # a buddy's copies
        tier.put(name, b"kv")
    for name, before in ((b"y", b"x"), (b"b", b"a"), (b"z", b"y")):
        tier.learn(name, before)
    assert saved(tier, "", "1", "2", "3", "4", "5") == "yxba"


def test_a_prompt_longer_than_host_memory_keeps_its_beginning() -> None:
    tier = HostTier(3)
    assert saved(tier, "", "a", "b", "c", "d", "e") == "de"
    assert saved(tier, "", "x") == "c"


def test_nothing_stays_where_there_is_no_room_and_what_was_dropped_is_forgotten() -> None:
    assert saved(HostTier(0), "", "a", "b") == "ab"
    tier = HostTier(2)
    saved(tier, "", "a", "b")
    assert tier.drop() == [b"a", b"b"]
    assert saved(tier, "", "c", "a", "x") == "x"  # which follows them


def test_a_disk_gives_up_ends_too_in_whatever_order_blocks_have_come(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", 4 * 2 * 4096, 4, b"model")
    for name, before in ((b"b", b"a"), (b"a", b""), (b"x", b""), (b"y", b"x")):
        tier.put(name.ljust(16), b"kv" * 2, before.ljust(16) if before else b"")
    for name in (b"a", b"b"):
        assert tier.get(name.ljust(16))
    there = [b"a", b"b", b"x", b"y"]
    for number, gone in zip((b"1", b"2", b"3", b"4"), (b"y", b"x", b"b", b"a"), strict=True):
        tier.put(number.ljust(16), b"kv" * 2)
        there.remove(gone)
        assert [name for name in (b"a", b"b", b"x", b"y") if name.ljust(16) in tier] == there
    tier.close()


class Slowly:
    """What LeavesFirst does, by looking at every block."""

    def __init__(self) -> None:
        self.used: dict[bytes, int] = {}
        self.before: dict[bytes, bytes] = {}
        self.now = 0

    def use(self, digest: bytes, before: bytes) -> None:
        self.now += 1
        self.used[digest] = self.now
        self.before[digest] = before

    def take(self) -> bytes:
        here = {self.before[digest] for digest in self.used}
        first = min(self.used.keys() - here, key=self.used.__getitem__)
        at = self.used.pop(first)
        if (before := self.before[first]) in self.used:
            self.used[before] = max(at, self.used[before])
        return first


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), fan_out=st.sampled_from([1, 2, 5]), room=st.integers(1, 30))
def test_the_least_recently_used_end_goes_and_its_age_passes_to_what_it_followed(
    seed: int, fan_out: int, room: int
) -> None:
    rng, fast, slow = random.Random(seed), LeavesFirst(), Slowly()
    names = [b"%d" % number for number in range(40)]
    before = {
        name: names[i - rng.randint(1, fan_out)] if i >= fan_out else b"" for i, name in enumerate(names)
    }
    for _ in range(300):
        name = rng.choice(names)
        fast.use(name, before[name])
        slow.use(name, before[name])
        while len(slow.used) > room:
            assert fast.take() == ((gone := slow.take()), before[gone])
    damaged = rng.sample([*slow.used], len(slow.used) // 2)
    for name in damaged:
        assert fast.remove(name) == before[name]
    left = slow.used.keys() - damaged
    assert {fast.take()[0] for _ in left} == left

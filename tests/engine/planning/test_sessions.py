"""What clients say of the time after a request: blocks that stay, sessions that are over, and KV that is read back in time."""

from dataclasses import replace
from math import inf

import pytest

from core.types import CacheHints, Request
from tests.engine.planning.returning_world import SIZE, World, request

NUM_BLOCKS = 20
LENGTH = 4 * SIZE
"""The tokens of a prompt. With its answer of one token it leaves four full blocks."""


def turn(name: str, session: str = "", *, tenant: str = "", weight: float = 1.0, **hints: object) -> Request:
    """A request whose prompt is named by the first letter, of a session."""
    one = request(name, LENGTH, max_tokens=1)
    given = CacheHints(session=session, **hints)  # type: ignore[arg-type]
    return replace(one, tenant=tenant, weight=weight, hints=given)


class Served(World):
    """A World that hears of requests as an engine does, and reads back what is due."""

    def serve(self, *requests: Request, at: float | None = None) -> None:
        """Serve them one after another."""
        self.now = self.now if at is None else at
        for one in requests:
            self.scheduler.sessions.begins(one, self.now)
            self.scheduler.sequences.add(one)
            self.finish()

    def crowd(self, count: int = NUM_BLOCKS // 4, at: float | None = None) -> None:
        """Serve so many others that nothing but what is pinned stays of what was there."""
        first = self.num_crowds * 100
        self.num_crowds += 1
        self.serve(
            *(replace(turn(chr(2000 + first + i)), id=f"crowd {first + i}") for i in range(count)), at=at
        )

    num_crowds = 0

    def cached(self, one: Request) -> int:
        """How many full blocks of its prompt are in the prefix cache."""
        return self.scheduler.prefixes.cached_prefix(replace(one, prompt=(*one.prompt, 0))).num_kept

    def look(self, at: float) -> None:
        """Let the time come, and what is read then."""
        self.now = at
        self.scheduler.sessions.read_due(at)
        while self.tiers.under_way:
            self.tiers.end()


@pytest.fixture
def w() -> Served:
    return Served(NUM_BLOCKS)


def test_a_session_stays_for_as_long_as_its_client_has_said(w: Served) -> None:
    w.serve(turn("a", ttl_s=10.0), turn("b"))
    w.crowd(at=9.9)
    assert (w.cached(turn("a")), w.cached(turn("b"))) == (4, 0)
    w.crowd(at=10.0)
    assert w.cached(turn("a")) == 0


def test_the_next_turn_renews_it(w: Served) -> None:
    w.serve(turn("a", "s", ttl_s=10.0))
    w.serve(replace(turn("a", "s", ttl_s=10.0), id="again"), at=8.0)
    w.crowd(at=17.0)
    assert w.cached(turn("a")) == 4
    w.crowd(at=18.0)
    assert w.cached(turn("a")) == 0


def test_nothing_stays_for_longer_than_the_configuration_says() -> None:
    w = Served(NUM_BLOCKS, longest_pin_s=5.0)
    w.serve(turn("a", ttl_s=inf))
    w.crowd(at=5.0)
    assert w.cached(turn("a")) == 0


def test_what_runs_gets_pinned_blocks_when_there_are_no_others(w: Served) -> None:
    w.serve(turn("a", ttl_s=inf), turn("b", ttl_s=99.0))
    w.serve(request("z", (NUM_BLOCKS - 4) * SIZE - 1, max_tokens=1))
    assert (w.cached(turn("a")), w.cached(turn("b"))) == (4, 0), "the pin that ends first goes first"
    assert w.scheduler.sessions.counts.pinned_blocks == 4


@pytest.mark.parametrize("ttl_s", [0.0, inf])
def test_a_session_that_is_over_goes_first(w: Served, ttl_s: float) -> None:
    w.serve(turn("b"), turn("a", "s", ttl_s=ttl_s), turn("c"))
    assert w.scheduler.sessions.release("", "s")
    assert not w.scheduler.sessions.release("", "s"), "it is over"
    w.crowd(3)
    assert [w.cached(turn(name)) for name in "abc"] == [0, 4, 4]


def test_what_others_go_on_from_stays_when_a_session_is_over(w: Served) -> None:
    common = tuple(range(2 * SIZE))
    first, second = [
        replace(turn(name, name), prompt=(*common, *turn(name).prompt), id=name) for name in "ab"
    ]
    w.serve(first, second)
    w.scheduler.sessions.release("", "a")
    w.crowd(3)
    assert (w.cached(first), w.cached(second)) == (4, 6)
    w.crowd(1)
    assert (w.cached(first), w.cached(second)) == (2, 4), "what both have is not given up first"


def test_the_last_turn_ends_a_session(w: Served) -> None:
    w.serve(turn("a", "s", ttl_s=inf), turn("b"), turn("c"))
    w.serve(replace(turn("a", "s"), id="last", retain=False))
    w.crowd(3)
    assert [w.cached(turn(name)) for name in "abc"] == [0, 4, 4]
    assert w.scheduler.sessions.counts.pinned_blocks == 0


def test_a_tenant_may_pin_a_part_and_those_that_end_soonest_give_way(w: Served) -> None:
    w.serve(turn("a", ttl_s=30.0), turn("b", ttl_s=10.0), turn("c", ttl_s=20.0))
    w.crowd()
    assert [w.cached(turn(name)) for name in "abc"] == [4, 0, 4], "half of 20 blocks have room for two"
    assert w.scheduler.sessions.counts.cut == 1


def test_of_a_prompt_that_is_too_long_its_beginning_stays(w: Served) -> None:
    long = replace(request("a", 16 * SIZE, max_tokens=1), hints=CacheHints(ttl_s=inf))
    w.serve(long)
    w.crowd()
    assert w.cached(long) == NUM_BLOCKS // 2


def test_what_two_sessions_share_counts_once(w: Served) -> None:
    common = tuple(range(2 * SIZE))
    both = [replace(turn(name, ttl_s=inf), prompt=(*common, *turn(name).prompt), id=name) for name in "ab"]
    w.serve(*both)
    w.crowd()
    assert [w.cached(one) for one in both] == [6, 6]
    assert w.scheduler.sessions.counts.pinned_blocks == NUM_BLOCKS // 2


def test_tenants_have_parts_by_their_weights() -> None:
    w = Served(32)
    big = [turn(name, tenant="big", weight=3.0, ttl_s=inf) for name in "abcd"]
    w.serve(*big)
    assert w.scheduler.sessions.counts.pinned_blocks == 16, "who is alone has all"
    w.serve(*(turn(name, tenant="small", weight=1.0, ttl_s=inf) for name in "xy"))
    w.crowd(8)
    assert [w.cached(turn(name, tenant="big")) for name in "abcd"].count(4) == 3
    assert sorted(w.cached(turn(name, tenant="small")) for name in "xy") == [0, 4]


def test_another_tenant_cannot_end_a_session(w: Served) -> None:
    w.serve(turn("a", "s", tenant="one", ttl_s=inf))
    assert not w.scheduler.sessions.release("other", "s")
    w.crowd()
    assert w.cached(turn("a")) == 4


def test_without_a_prefix_cache_hints_change_nothing() -> None:
    w = Served(NUM_BLOCKS, prefix_cache=False)
    w.serve(turn("a", "s", ttl_s=inf), replace(turn("a", "s", ttl_s=inf), id="again"))
    assert w.scheduler.sessions.counts.pinned_blocks == 0


def gaps(w: Served, *gaps_s: float, session: str = "s") -> None:
    """Turns of a session, with these gaps between them."""
    w.serve(turn("a", session))
    for number, gap_s in enumerate(gaps_s):
        w.serve(replace(turn("a", session), id=f"turn {number}"), at=w.now + gap_s)


def test_a_session_is_read_back_before_its_next_turn(w: Served) -> None:
    gaps(w, 30.0, 31.0, 60.0, 30.5, 90.0, 31.0)
    ended_at = w.now
    w.crowd(at=ended_at + 20.0)
    w.look(ended_at + 28.0)
    assert w.cached(turn("a")) == 0
    assert w.scheduler.sessions.next_due_at == ended_at + 28.09375, "a sixteenth is for reading"
    w.look(ended_at + 28.09375)
    assert w.cached(turn("a")) == 4
    assert w.scheduler.sessions.counts.prefetched == 1
    w.crowd(at=ended_at + 31.0)
    assert w.cached(turn("a")) == 4, "it stays as long as its turn is expected"
    w.crowd(at=ended_at + 32.0)
    w.look(ended_at + 1000.0)
    assert w.cached(turn("a")) == 0, "it is read back once"


def test_its_turn_has_come_before_it_was_read_back(w: Served) -> None:
    gaps(w, 30.0, 31.0, 30.5, 30.0, 31.0, 30.5)
    w.scheduler.sessions.begins(turn("a", "s"), w.now + 1.0)
    assert w.scheduler.sessions.next_due_at == inf


def test_what_is_known_of_a_tenants_sessions_is_believed_of_a_new_one(w: Served) -> None:
    gaps(w, 9.0, 5.0, 5.1, 7.0, 5.2, 5.3, 30.0, 5.4)
    w.serve(turn("b", "new"))
    w.look(w.now + 4.39)
    assert len(w.tiers.asked) == 2
    w.serve(turn("c", "other's", tenant="other"))
    assert w.scheduler.sessions.next_due_at == inf


def test_a_client_may_say_when_or_never(w: Served) -> None:
    w.serve(turn("a", "s", prefetch_s=3.0), turn("b", "t", prefetch_s=inf))
    w.crowd(at=2.0)
    w.look(3.0)
    assert (w.cached(turn("a")), w.cached(turn("b"))) == (4, 0)


def test_a_client_may_say_now(w: Served) -> None:
    w.serve(turn("a", "s"))
    w.crowd(at=1.0)
    assert w.scheduler.sessions.prefetch("", "s")
    assert not w.scheduler.sessions.prefetch("", "nobody's")
    w.look(1.0)
    assert w.cached(turn("a")) == 4


def test_what_is_read_back_takes_no_pinned_blocks(w: Served) -> None:
    w.serve(turn("a", "s", prefetch_s=3.0))
    w.crowd(at=1.0)
    w.serve(turn("b", ttl_s=inf), turn("c", ttl_s=inf))
    w.serve(request("z", (NUM_BLOCKS - 9) * SIZE, max_tokens=1))
    w.scheduler.sequences.add(request("y", (NUM_BLOCKS - 11) * SIZE, max_tokens=8))
    w.turn()
    w.tiers.asked.clear()
    w.tiers.is_empty = True
    w.now = 3.0
    w.scheduler.sessions.read_due(3.0)
    assert len(w.tiers.asked) == 1
    place = w.scheduler.sessions
    assert place.begin_restore(w.tiers.asked[0], 3) is None  # type: ignore[union-attr]
    assert w.scheduler.prefixes.begin_restore(w.tiers.asked[0], 3) is not None, (
        "a request that has come may have them"
    )


def test_what_is_read_back_stays_as_long_as_was_said(w: Served) -> None:
    w.serve(turn("a", "s", ttl_s=50.0, prefetch_s=5.0))
    w.serve(request("z", NUM_BLOCKS * SIZE - 1, max_tokens=1))
    assert w.cached(turn("a")) == 0
    w.look(5.0)
    w.crowd(at=49.0)
    assert w.cached(turn("a")) == 4
    w.crowd(at=50.0)
    assert w.cached(turn("a")) == 0


def test_groups_of_ranks_each_know_their_sessions() -> None:
    w = Served(2 * NUM_BLOCKS, num_groups=2)
    w.serve(turn("a", "s", ttl_s=inf), turn("b", "t", ttl_s=inf))
    w.crowd(NUM_BLOCKS // 2)
    assert w.scheduler.sessions.counts.pinned_blocks == 8
    assert w.scheduler.sessions.release("", "s")
    assert w.scheduler.sessions.release("", "t")
    assert w.scheduler.sessions.counts.pinned_blocks == 0


def test_what_is_read_back_leaves_as_much_room_again(w: Served) -> None:
    w.serve(turn("a", "s", prefetch_s=3.0))
    w.crowd(at=1.0)
    running = request("z", (NUM_BLOCKS - 8) * SIZE, max_tokens=4)
    w.scheduler.sequences.add(running)
    w.turn()
    place, session = w.scheduler.sessions, turn("a", "s")
    assert place.begin_restore(session, 4) is None  # type: ignore[union-attr]
    assert place.begin_restore(session, 3) is not None  # type: ignore[union-attr]

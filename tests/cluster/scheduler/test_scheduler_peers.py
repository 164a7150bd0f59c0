"""Schedulers that act at once know of each other's reservations, and forget them when they are over or their scheduler is."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import LLM
from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.scheduler_events import Event, PeerLost, Send, Tick
from core.config.cluster_config import ScheduleConfig
from core.errors import ConfigError
from core.kv import num_blocks_for
from core.messages import Buddy, Finished, PeerRequest, PeersChanged, PlacedByPeer, PlaceReply, Rejected
from tests.cluster.scheduler.routing_world import ask, instance, report, route_of

NAMES = ("s1", "s2", "s3")


class Ring:
    """Some schedulers; words between them arrive when the test says so, in order for each pair."""

    def __init__(self, *names: str, instances: int = 3, **changes: object) -> None:
        self.schedulers = {name: GlobalScheduler(ScheduleConfig()) for name in names}
        self.mail: dict[tuple[str, str], deque[Event]] = {}
        self.now = 100.0
        for name in names:
            self.on(name, PeersChanged(name, tuple(other for other in names if other != name)))
        for number in range(instances):
            self.all(instance(f"d{number}", "pd", **changes))

    def on(self, name: str, event: Event) -> list[Send]:
        """What goes to others than schedulers."""
        self.now += 0.001
        outside: list[Send] = []
        for action in self.schedulers[name].on(event, self.now):
            if action.to in self.schedulers:
                self.mail.setdefault((name, action.to), deque()).append(action.message)  # type: ignore[arg-type]
            else:
                outside.append(action)
        return outside

    def all(self, event: Event) -> list[Send]:
        return [action for name in self.schedulers for action in self.on(name, event)]

    def deliver(self, count: int = 1 << 30, rng: random.Random | None = None) -> list[Send]:
        outside: list[Send] = []
        while count and (pairs := [pair for pair, words in self.mail.items() if words]):
            pair = (rng or random.Random(0)).choice(pairs)
            outside += self.on(pair[1], self.mail[pair].popleft())
            count -= 1
        return outside

    def lose(self, lost: str) -> None:
        del self.schedulers[lost]
        self.mail = {pair: words for pair, words in self.mail.items() if lost not in pair}
        self.all(PeerLost(lost))

    def reserved(self, name: str) -> list[tuple[int, int, int]]:
        members = self.schedulers[name].members
        return [(m.num_seqs, m.free_blocks, m.queued_tokens) for m in members]


def test_what_one_has_placed_all_know() -> None:
    ring = Ring("s1", "s2")
    (placed,) = ring.on("s1", ask("a", 4000))
    assert ring.reserved("s2") == [(0, 1000, 0)] * 3
    ring.deliver()
    assert ring.reserved("s1") == ring.reserved("s2")
    (other,) = ring.on("s2", ask("b", 4000))
    assert route_of(other) != route_of(placed), "it went where the first one computes"


def test_what_is_over_is_over_everywhere() -> None:
    ring = Ring(*NAMES)
    ring.on("s2", ask("a"))
    ring.deliver()
    ring.on("s2", Finished("a", 0, 9, complete=True))
    assert [ring.schedulers[name].num_placed for name in NAMES] == [1, 0, 1]
    ring.deliver()
    assert [ring.schedulers[name].num_placed for name in NAMES] == [0, 0, 0]
    assert ring.reserved("s1") == [(0, 1000, 0)] * 3


def test_a_request_that_is_asked_for_again_elsewhere_keeps_its_place() -> None:
    ring = Ring("s1", "s2")
    (placed,) = ring.on("s1", ask("a"))
    ring.deliver()
    ring.on("s2", report(route_of(placed), waiting_tokens=9000, num_running=5))
    (again,) = ring.on("s2", ask("a"))
    assert isinstance(again.message, PlaceReply)
    assert again.message == placed.message, "s2 would have taken an idle one"
    assert ring.schedulers["s2"].num_placed == 1


def test_a_lost_scheduler_leaves_no_reservations() -> None:
    ring = Ring("s1", "s2")
    ring.on("s1", ask("a"))
    ring.on("s2", ask("b"))
    ring.deliver()
    ring.lose("s1")
    assert [p.place.request_id for p in ring.schedulers["s2"].placements] == ["b"]
    ring.on("s2", Finished("b", 0))
    assert ring.reserved("s2") == [(0, 1000, 0)] * 3


def test_one_that_comes_later_hears_of_everything() -> None:
    ring = Ring("s1", "s2")
    ring.on("s1", ask("a"))
    ring.deliver()
    ring.schedulers["s3"] = GlobalScheduler(ScheduleConfig())
    for number in range(3):
        ring.on("s3", instance(f"d{number}", "pd"))
    for name in NAMES:
        ring.on(name, PeersChanged(name, tuple(other for other in NAMES if other != name)))
    ring.deliver()
    assert ring.reserved("s3") == ring.reserved("s1")
    words = ring.schedulers["s1"].on(PeersChanged("s1", ("s2", "s3")), ring.now)
    assert not words, "nobody is new"


def full_ring() -> Ring:
    """One instance, with one slot, which is taken; a late request waits at s1 and one that can be in time at s2."""
    ring = Ring("s1", "s2", instances=1, max_num_seqs=1)
    ring.on("s1", ask("first"))
    ring.deliver()
    assert ring.on("s1", ask("late", ttft_s=1.0)) == []
    ring.now += 2.0
    assert ring.on("s1", Tick()) == []
    assert ring.on("s2", ask("timely")) == []
    ring.deliver()
    return ring


def test_what_is_late_at_one_waits_for_what_can_be_in_time_at_another() -> None:
    ring = full_ring()
    assert ring.on("s1", Finished("first", 0)) == [], "the slot is the other's"
    (placed,) = ring.deliver()
    assert isinstance(placed.message, PlaceReply)
    assert placed.message.request_id == "timely"
    ring.deliver()
    assert ring.on("s2", Finished("timely", 0)) == []
    (placed,) = ring.deliver()
    assert isinstance(placed.message, PlaceReply)
    assert placed.message.request_id == "late"


def test_what_is_late_does_not_wait_for_ever() -> None:
    ring = full_ring()
    ring.now += 12.0
    (placed,) = ring.on("s1", Finished("first", 0))
    assert isinstance(placed.message, PlaceReply)
    assert placed.message.request_id == "late"


def test_the_dead_hold_nobody_back() -> None:
    ring = full_ring()
    ring.lose("s2")
    (placed,) = ring.on("s1", Finished("first", 0))
    assert isinstance(placed.message, PlaceReply)


def test_what_is_kept_for_a_large_request_nobody_fills() -> None:
    ring = Ring("s1", "s2", instances=1)
    ring.on("s1", ask("small", 15_000, 64))
    ring.deliver()
    assert ring.on("s1", ask("large", 15_000, 64)) == []
    ring.now += 2.0
    assert ring.on("s1", Tick()) == []
    assert any(isinstance(word, PeerRequest) and word.keeps == "d0" for word in ring.mail["s1", "s2"])
    ring.deliver()
    assert ring.on("s2", ask("little", 100, 10)) == [], "it would take from the large one"
    (large,) = ring.on("s1", Finished("small", 0))
    assert isinstance(large.message, PlaceReply)
    ring.deliver()
    (little,) = ring.on("s2", report("d0", free_blocks=60, num_running=1, received=("large#0",)))
    assert isinstance(little.message, PlaceReply)
    assert little.message.request_id == "little"


def test_of_two_that_keep_the_same_the_first_has_it() -> None:
    ring = Ring("s1", "s2", instances=1)
    ring.all(report("d0", free_blocks=60, num_running=1))
    ring.on("s1", ask("a", 15_000))
    ring.on("s2", ask("b", 15_000))
    ring.now += 2.0
    ring.all(Tick())
    ring.deliver()
    actions = ring.on("s2", report("d0")) + ring.on("s1", report("d0"))
    assert [action.message.request_id for action in actions if isinstance(action.message, PlaceReply)] == [
        "a"
    ]


def test_only_the_first_pairs_buddies_until_it_is_lost() -> None:
    ring = Ring("s1", "s2", instances=0)
    info = instance("d1", replicates=True, host="h1"), instance("d2", replicates=True, host="h2")
    told = {name: [ring.on(name, one) for one in info] for name in ("s1", "s2")}
    assert any(isinstance(send.message, Buddy) for sends in told["s1"] for send in sends)
    assert not any(isinstance(send.message, Buddy) for sends in told["s2"] for send in sends)
    assert ring.schedulers["s1"].leads
    again = ring.schedulers["s2"].on(PeerLost("s1"), ring.now)
    assert ring.schedulers["s2"].leads
    assert sorted((send.to, send.message.address) for send in again if isinstance(send.message, Buddy)) == [
        ("d1", "d2"),
        ("d2", "d1"),
    ]


def test_they_share_what_may_wait() -> None:
    ring = Ring("s1", "s2", instances=0)
    ring.schedulers["s1"] = alone = GlobalScheduler(ScheduleConfig(max_queued_requests=4))
    alone.on(PeersChanged("s1", ("s2",)), ring.now)
    ring.on("s1", instance("d0", max_num_seqs=1))
    refused = [bool(ring.on("s1", ask(f"r{n}"))) for n in range(5)]
    assert refused == [True, False, False, True, True], "the first is placed, two wait, the rest is refused"


def test_a_spare_takes_nothing_of_what_may_wait() -> None:
    alone = GlobalScheduler(ScheduleConfig(max_queued_requests=4))
    alone.on(PeersChanged("s1", ("s2",), num_spares=1), 1.0)
    alone.on(instance("d0", max_num_seqs=1), 1.0)
    refused = [
        any(isinstance(send.message, Rejected) for send in alone.on(ask(f"r{n}"), 1.0)) for n in range(6)
    ]
    assert refused == [False, False, False, False, False, True], "one is placed, four wait, one is refused"
    alone.on(PeerLost("s2"), 2.0)
    assert any(isinstance(send.message, Rejected) for send in alone.on(ask("r6"), 2.0))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_in_the_end_all_know_the_same(seed: int) -> None:
    """Requests come and go at all of them, words are slow, one of the schedulers dies."""
    rng, running = random.Random(seed), list[tuple[str, str]]()
    ring = Ring(*NAMES, num_blocks=300)
    for number in range(60):
        name = rng.choice(list(ring.schedulers))
        if running and rng.random() < 0.4:
            owner, request = running.pop(rng.randrange(len(running)))
            if owner in ring.schedulers:
                ring.on(owner, Finished(request, 0, 5, complete=True))
        else:
            ring.on(name, ask(f"r{number}", rng.randint(16, 1500)))
            running.append((name, f"r{number}"))
        ring.deliver(rng.randint(0, 3), rng)
        if number == 40:
            ring.lose("s2")
    ring.deliver(rng=rng)
    first, *others = [_known(scheduler) for scheduler in ring.schedulers.values()]
    assert all(other == first for other in others)
    for owner, request in running:
        if owner in ring.schedulers:
            ring.on(owner, Finished(request, 0))
    ring.deliver(rng=rng)
    for name, scheduler in ring.schedulers.items():
        assert (scheduler.num_placed, scheduler.num_queued) == (0, 0)
        assert ring.reserved(name) == [(0, 300, 0)] * 3


def _known(scheduler: GlobalScheduler) -> set[tuple[str, str, str]]:
    return {(p.place.request_id, p.route.decode, p.route.prefill) for p in scheduler.placements}


def test_a_word_says_nothing_of_the_prompt() -> None:
    ring = Ring("s1", "s2")
    ring.on("s1", ask("a", 4000))
    (word,) = ring.mail["s1", "s2"]
    assert isinstance(word, PlacedByPeer)
    assert word.place.block_hashes == ()


def test_one_process_has_one_scheduler() -> None:
    with pytest.raises(ConfigError, match="serve.schedulers needs Ray"), LLM("embedded", serve__schedulers=2):
        pass


def test_all_learn_from_outputs_of_one_that_still_run() -> None:
    ring, running = Ring("s1", "s2", instances=1, num_blocks=100_000, max_num_seqs=512), range(30)
    for number in running:
        assert ring.on("s1", ask(f"r{number}", 16, 4096))
    ring.deliver()
    keys = [f"r{number}#0" for number in running]
    grown = tuple((key, 2048) for key in keys)
    ring.all(
        report("d0", free_blocks=90_000, received=tuple(keys), num_running=30, num_decoding=30, grown=grown)
    )
    (member,) = ring.schedulers["s2"].members
    before = member.free_blocks
    assert ring.on("s2", ask("new", 16, 4096))
    assert before - member.free_blocks > num_blocks_for(16 + 1024, member.block_size)

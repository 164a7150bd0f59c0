"""Large fleets: what is looked at for one request is little, and among it is what a scan of the whole fleet would have chosen."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.fleet.bucket_queue import BucketEntry, BucketQueue, bucket_of
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.fleet.rng import RequestRng
from cluster.scheduler.fleet.roster import SCAN_UP_TO
from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.scheduler_events import PeerLost, RequestArrived, Send
from core.config.cluster_config import ScheduleConfig
from core.messages import Finished, Leaving, PlaceReply
from tests.cluster.scheduler.routing_world import ask, instance, report, route_of

LARGE = 3 * SCAN_UP_TO
ROLES = {"any role": ("pd", "pd"), "pools": ("p", "d")}


def fleet(roles: tuple[str, str], size: int = LARGE, scan_up_to: int = SCAN_UP_TO) -> GlobalScheduler:
    scheduler = GlobalScheduler(ScheduleConfig(report_interval_s=0.1), scan_up_to=scan_up_to)
    for number in range(size):
        role = roles[number % 2]
        scheduler.on(instance(f"{role}{number}", role, host=f"h{number // 4}", sends=True), 0.0)
        scheduler.on(report(f"{role}{number}"), 0.0)
    return scheduler


def placed(actions: list[Send]) -> str:
    (route,) = [route_of(action) for action in actions if isinstance(action.message, PlaceReply)]
    return route


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 9)), max_size=60), st.integers(1, 8))
def test_buckets_give_the_lowest_and_the_highest(moves: list[tuple[int, int]], count: int) -> None:
    entries = [BucketEntry(Member(instance(f"i{number}"))) for number in range(6)]
    buckets, truth = BucketQueue(), dict[str, int]()
    for number, bucket in moves:
        address = entries[number].member.address
        if bucket < 0:
            buckets.take(entries[number])
            truth.pop(address, None)
        else:
            buckets.put(entries[number], bucket)
            truth[address] = bucket
    assert len(buckets) == len(truth)
    ordered = sorted(truth.values())
    lowest = [truth[m.address] for m in buckets.lowest(count, RequestRng("a"))]
    assert lowest == ordered[:count]
    for found, wanted in (
        (buckets.one_low(RequestRng("a")), ordered[:1]),
        (buckets.one_high(RequestRng("a")), ordered[-1:]),
        (buckets.one_high(RequestRng("a"), at_most=4), [bucket for bucket in ordered if bucket <= 4][-1:]),
    ):
        assert ([] if found is None else [truth[found.address]]) == wanted


def test_buckets_are_finer_than_a_tenth_and_keep_the_order() -> None:
    sizes = [0.0, 0.001, *(0.01 * 1.1**n for n in range(60))]
    buckets = [bucket_of(size, 0.001) for size in sizes]
    assert buckets == sorted(buckets)
    assert len(set(buckets)) == len(buckets)
    assert bucket_of(1e30, 0.001) < 256


def test_equals_are_drawn_from_evenly() -> None:
    buckets = BucketQueue()
    for number in range(10):
        buckets.put(BucketEntry(Member(instance(f"i{number}"))), 3)
    for draw in (BucketQueue.one_low, BucketQueue.one_high):
        drawn = Counter(draw(buckets, RequestRng(f"r{n}")) for n in range(1000))
        assert len(drawn) == 10
        assert max(drawn.values()) < 200


@pytest.mark.parametrize("roles", ROLES.values(), ids=ROLES)
def test_an_idle_fleet_spreads_a_burst(roles: tuple[str, str]) -> None:
    scheduler = fleet(roles)
    routes = [placed(scheduler.on(ask(f"r{n}", 1600), 1.0)) for n in range(LARGE // 4)]
    assert max(Counter(route.split(">")[0] for route in routes).values()) <= 2


@pytest.mark.parametrize("roles", ROLES.values(), ids=ROLES)
def test_a_prefix_is_found_among_many(roles: tuple[str, str]) -> None:
    scheduler = fleet(roles)
    holder = f"{roles[0]}{LARGE // 2}"
    first = ask("x", 3200, prefix=1)
    scheduler.on(report(holder, cache_added=first.place.block_hashes), 1.0)
    assert placed(scheduler.on(ask("a", 3216, prefix=1), 1.0)).split(">")[0] == holder


@pytest.mark.parametrize("roles", ROLES.values(), ids=ROLES)
def test_only_the_instance_with_room_is_taken(roles: tuple[str, str]) -> None:
    scheduler = fleet(roles)
    free = f"{roles[1]}{LARGE // 2 + 1}"
    for number in range(LARGE):
        address = f"{roles[number % 2]}{number}"
        if address != free:
            scheduler.on(report(address, free_blocks=0, num_running=4), 1.0)
    assert placed(scheduler.on(ask("a"), 1.0)).split(">")[-1] == free


def test_the_only_instance_that_is_large_enough_is_found() -> None:
    scheduler = fleet(("pd", "pd"))
    scheduler.on(instance("large", "pd", num_blocks=4000), 0.0)
    scheduler.on(report("large", free_blocks=1100, num_running=12), 0.0)
    assert placed(scheduler.on(ask("a", 17_000), 1.0)) == "large"


def test_what_is_lost_or_leaves_is_taken_no_more() -> None:
    scheduler = fleet(("pd", "pd"), SCAN_UP_TO + 8)
    gone = [f"pd{number}" for number in range(4)]
    for address in gone[:2]:
        scheduler.on(PeerLost(address), 1.0)
    for address in gone[2:]:
        scheduler.on(Leaving(address), 1.0)
    routes = {placed(scheduler.on(ask(f"r{n}", 1600), 1.0)) for n in range(30)}
    assert not routes & set(gone)


def test_who_waits_is_placed_when_anybody_gets_room() -> None:
    scheduler = fleet(("pd", "pd"))
    for number in range(LARGE):
        scheduler.on(report(f"pd{number}", free_blocks=0, num_running=4), 1.0)
    assert scheduler.on(ask("a"), 1.0) == []
    assert scheduler.num_queued == 1
    assert placed(scheduler.on(report("pd7"), 1.2)) == "pd7"


def test_the_same_events_give_the_same_decisions() -> None:
    assert _decisions(_load(3)) == _decisions(_load(3))


@pytest.mark.parametrize("roles", ROLES.values(), ids=ROLES)
def test_queues_stay_about_as_even_as_with_a_scan(roles: tuple[str, str]) -> None:
    """Tokens before the unluckiest of a burst, on shortlists and with the whole fleet looked at."""

    def worst(scan_up_to: int) -> int:
        scheduler = fleet(roles, scan_up_to=scan_up_to)
        for n, event in enumerate(_load(5)):
            scheduler.on(event, 1.0 + n * 0.001)
        return max(member.queued_tokens for member in scheduler.members)

    assert worst(SCAN_UP_TO) <= 1.5 * worst(LARGE)


def _load(seed: int) -> list[RequestArrived]:
    rng = random.Random(seed)
    return [ask(f"r{n}", rng.randint(100, 4000), prefix=rng.randint(0, 20)) for n in range(3 * LARGE)]


def _decisions(load: list[RequestArrived]) -> list[str]:
    log: list[str] = []
    scheduler = GlobalScheduler(ScheduleConfig(), log=log.append)
    for number in range(LARGE):
        scheduler.on(instance(f"i{number}", "pd"), 0.0)
    for n, event in enumerate(load):
        scheduler.on(event, n * 0.01)
        if n >= LARGE:
            scheduler.on(Finished(f"r{n - LARGE}", 0, 20, complete=True), n * 0.01)
            scheduler.on(report(f"i{n % LARGE}", cache_added=event.place.block_hashes), n * 0.01)
    return log

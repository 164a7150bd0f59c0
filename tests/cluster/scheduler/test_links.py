"""Measured links decide in place of assumed ones, and bytes that are reserved to a link make the next request wait for them."""

import pytest

from core.messages import Finished, PlacedByPeer, ReleasedByPeer
from core.reports import LinkSpeed
from core.types import Route
from tests.cluster.scheduler.routing_world import World, ask, instance, report

KV_BYTES = 100_000
"""KV of one token: 400 tokens are 40 MB, and take 0.1 s to compute."""


def link(receiver: str, bytes_per_s: float) -> LinkSpeed:
    return LinkSpeed(receiver=receiver, transport="tcp", bytes_per_s=bytes_per_s)


def world(*links: LinkSpeed, **decode: object) -> World:
    fleet = World(
        instance("p", "p", host="hp", kv_token_bytes=KV_BYTES, reports_links=True),
        instance("d", "d", host="hd", kv_token_bytes=KV_BYTES, **decode),
    )
    fleet.on(report("p", links=links))
    fleet.on(report("d"))
    return fleet


def test_computing_beats_a_link_that_was_measured_to_be_slow() -> None:
    assert world().placed(ask("a")) == "p>d"
    assert world(link("d", 1e9)).placed(ask("a")) == "p>d"
    assert world(link("d", 0.05e9)).placed(ask("a")) == "d"


def test_a_slow_link_to_one_instance_of_a_host_is_one_to_its_others() -> None:
    fleet = world(link("d", 0.05e9))
    fleet.on(instance("e", "d", host="hd", kv_token_bytes=KV_BYTES))
    fleet.on(instance("f", "d", host="hf", kv_token_bytes=KV_BYTES))
    fleet.on(report("p", links=(link("d", 0.05e9),)))
    routes = {fleet.placed(ask(name)) for name in "abcdef"}
    assert not routes & {"p>d", "p>e"}
    assert "p>f" in routes


def test_how_fast_kv_goes_within_a_card_says_nothing_of_the_hosts_other_cards() -> None:
    at = {"kv_token_bytes": KV_BYTES, "host": "h"}
    fleet = World(
        instance("p", "p", card="1", reports_links=True, **at),
        instance("d", "d", card="1", **at),
        instance("e", "d", card="2", **at),
    )
    fleet.on(report("p", links=(link("e", 0.05e9),)))
    assert fleet.placed(ask("a")) == "p>d"


def test_what_is_reserved_to_a_link_is_waited_for_until_it_has_left() -> None:
    speed = link("d", 0.1e9)
    fleet = world(speed)
    assert fleet.placed(ask("a")) == "p>d"
    fleet.on(report("p", links=(speed,), received=("a#0",)))
    fleet.on(report("d", received=("a#0",)))
    assert fleet.placed(ask("b")) == "d", "40 MB are before it"
    fleet.on(report("p", links=(speed,), sent=("a#0",)))
    fleet.on(Finished("b", 0, 10, True))
    assert fleet.placed(ask("c")) == "p>d"


@pytest.mark.parametrize("reports_links", [True, False])
def test_a_request_that_is_over_gives_its_link_back(reports_links: bool) -> None:
    speed = link("d", 0.1e9)
    fleet = world(speed)
    fleet.on(instance("p", "p", host="hp", kv_token_bytes=KV_BYTES, reports_links=reports_links))
    fleet.on(report("p", links=(speed,)))
    assert fleet.placed(ask("a")) == "p>d"
    fleet.on(report("p", links=(speed,), received=("a#0",)))
    fleet.on(report("d", received=("a#0",)))
    if reports_links:
        fleet.on(Finished("a", 0, 10, True))
    assert fleet.placed(ask("b")) == "p>d", "one that would never say that it has left is not waited for"


def test_what_another_scheduler_has_placed_is_on_the_link_too() -> None:
    speed = link("d", 0.1e9)
    fleet = world(speed)
    taken = PlacedByPeer(
        scheduler="s2",
        frontend="f",
        place=ask("a").place,
        route=Route("d", "p"),
        num_blocks=30,
        compute_tokens=0,
        expected_tokens=64.0,
        moved_tokens=400,
    )
    fleet.on(taken)
    assert fleet.placed(ask("b")) == "d"
    fleet.on(ReleasedByPeer(scheduler="s2", request_id="a", attempt=0, num_output_tokens=256, complete=True))
    fleet.on(Finished("b", 0, 256, True))
    assert fleet.placed(ask("c")) == "p>d"


def test_what_is_assumed_between_hosts_is_configured() -> None:
    fleet = World(
        instance("p", "p", host="hp", kv_token_bytes=KV_BYTES),
        instance("d", "d", host="hd", kv_token_bytes=KV_BYTES),
        link_bytes_per_s=0.05e9,
    )
    assert fleet.placed(ask("a")) == "d"

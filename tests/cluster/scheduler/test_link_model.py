"""Nearer hosts are assumed to have the faster links, and are preferred."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.fleet.link_model import LinkModel, Nearest, Nearness, Spot, bytes_per_s, nearness
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementQuery
from cluster.scheduler.placement.slo_policy import SloPolicy
from core.reports import Register, Site

MODEL = LinkModel()


def at(host: str, **site: object) -> Spot:
    return Spot(instance(host, **site))


def instance(host: str, prefills: bool = False, **site: object) -> Register:
    info = Register(
        address=host,
        incarnation=host,
        prefills=prefills,
        decodes=not prefills,
        host=host,
        block_size=16,
        num_blocks=4096,
        max_batch_tokens=512,
        max_num_seqs=64,
        kv_token_bytes=327_680,
    )
    return replace(info, site=Site(**site))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("there", "near"),
    [
        (at("a"), Nearness.HOST),
        (at("b", zone="z1", rack="r2", nvlink_domain="d"), Nearness.NVLINK),
        (at("b", zone="z1", rack="r1"), Nearness.RACK),
        (at("b"), Nearness.RACK),
        (at("b", zone="z1", rack="r2"), Nearness.ZONE),
        (at("b", zone="z2", rack="r1"), Nearness.FAR),
    ],
)
def test_nearness_is_mutual_and_what_is_unknown_does_not_count(there: Spot, near: Nearness) -> None:
    here = at("a", zone="z1", rack="r1", nvlink_domain="d")
    assert nearness(here, there) is near
    assert nearness(there, here) is near


def test_two_instances_on_one_card_are_nearer_than_any_two_on_a_host() -> None:
    here, mate, neighbour = (
        Spot(replace(instance("a"), card=card, address=name))
        for name, card in (("d", "GPU-1"), ("p", "GPU-1"), ("q", "GPU-2"))
    )
    assert [nearness(here, other) for other in (mate, neighbour)] == [Nearness.CARD, Nearness.HOST]
    assert bytes_per_s(MODEL, mate, here) > bytes_per_s(MODEL, neighbour, here)
    assert Nearest([(neighbour, "q"), (mate, "p")]).to(here) == "p"
    assert Nearest([(neighbour, "q"), (at("a"), "r")]).to(here) == "q"


def test_the_slower_card_and_the_way_between_set_the_rate() -> None:
    fast, slow = at("a", rack="1", nic_bytes_per_s=50e9), at("b", rack="1", nic_bytes_per_s=12.5e9)
    assert bytes_per_s(MODEL, fast, slow) == pytest.approx(12.5e9 * 0.7)
    assert bytes_per_s(MODEL, fast, at("c", rack="2", nic_bytes_per_s=50e9)) == pytest.approx(17.5e9)
    near, remote = (bytes_per_s(MODEL, at("a", zone="1"), at("b", zone=zone)) for zone in ("1", "2"))
    assert remote == pytest.approx(near * MODEL.beyond_zone_share)
    assert bytes_per_s(MODEL, fast, at("c")) == MODEL.other_host_bytes_per_s
    assert bytes_per_s(MODEL, at("a"), at("a")) == MODEL.same_host_bytes_per_s


def test_a_prefill_instance_of_the_same_rack_is_chosen() -> None:
    policy = SloPolicy(32)
    decode = Member(instance("d", zone="z1", rack="r1"))
    prefills = [Member(instance(f"p{i}", True, zone="z1", rack=f"r{i}")) for i in range(6, 0, -1)]
    choice = policy.choose(PlacementQuery(20_000, {}), [decode], prefills, 0.0)
    assert choice is not None
    assert choice.prefill is not None
    assert choice.prefill.address == "p1"


@given(
    st.lists(st.tuples(*[st.sampled_from(["", "a", "b"])] * 4), min_size=1, max_size=12),
    st.tuples(*[st.sampled_from(["", "a", "b"])] * 4),
)
def test_the_nearest_is_the_first_of_the_nearest(
    places: list[tuple[str, str, str, str]], asker: tuple[str, str, str, str]
) -> None:
    def standing(host: str, zone: str, rack: str, domain: str) -> Spot:
        return at(host, zone=zone, rack=rack, nvlink_domain=domain)

    things = [(standing(*place), number) for number, place in enumerate(places)]
    spot = standing(*asker)
    assert Nearest(things).to(spot) == min(things, key=lambda thing: nearness(thing[0], spot))[1]

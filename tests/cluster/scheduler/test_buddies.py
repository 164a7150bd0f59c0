"""Each instance has one buddy as long as there are two, and the one that has a lost instance's copies is preferred."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.fleet.buddies import Buddies
from cluster.scheduler.fleet.member import Member
from core.messages import Buddy
from tests.cluster.scheduler.routing_world import World, ask, instance


@given(st.lists(st.sampled_from(["h1", "h2", "h3"]), min_size=1, max_size=8))
def test_everybody_has_a_buddy_elsewhere_where_there_is_one(hosts: list[str]) -> None:
    members = [Member(instance(f"d{i}", host=host, replicates=True)) for i, host in enumerate(hosts)]
    pairs = dict(Buddies().pair(members))
    by_address = {member.address: member for member in members}
    for member in members:
        buddy = pairs.get(member.address, "")
        assert bool(buddy) == (len(members) > 1)
        if buddy:
            assert buddy != member.address
            elsewhere = any(host != member.info.host for host in hosts)
            assert (by_address[buddy].info.host != member.info.host) == elsewhere


@given(st.lists(st.sampled_from(["", "c1", "c2"]), min_size=1, max_size=6))
def test_no_copies_are_kept_where_the_same_card_would_lose_them(cards: list[str]) -> None:
    members = [Member(instance(f"d{i}", card=card, replicates=True)) for i, card in enumerate(cards)]
    pairs = dict(Buddies().pair(members))
    for number, (member, card) in enumerate(zip(members, cards, strict=True)):
        others = cards[:number] + cards[number + 1 :]
        buddy = pairs.get(member.address, "")
        assert bool(buddy) == any(not card or other != card for other in others)
        if buddy and card:
            assert cards[int(buddy[1:])] != card


def test_a_lost_instances_request_goes_to_its_heir() -> None:
    world = World(*(instance(f"d{i}", replicates=True) for i in range(4)))
    assert world.placed(ask("a", exclude=("d2",), attempt=1)) == "d3"
    assert world.placed(ask("b", exclude=("d3",), attempt=1)) == "d0"


def test_pairs_follow_the_fleet() -> None:
    world = World(instance("d0", replicates=True))
    (told, back) = world.on(instance("d1", replicates=True))
    assert {(a.to, a.message) for a in (told, back)} == {("d0", Buddy("d1")), ("d1", Buddy("d0"))}
    (again,) = world.on(instance("d1", replicates=True, incarnation="2"))
    assert (again.to, again.message) == ("d1", Buddy("d0"))
    assert world.on(instance("p0", "p")) == []

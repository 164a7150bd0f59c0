"""Adapters are loaded and unloaded through the list's owner; instances and ingresses follow it as each test says."""

from collections.abc import Iterable

import pytest

from cluster.scheduler.adapter_registry import LOAD_S, SETTLE_S, AdapterRegistry
from core.adapter_messages import (
    EMPTY_LIST,
    AdapterChanged,
    AdapterList,
    AdaptersHeld,
    AdaptersUsed,
    LoadAdapter,
    UnloadAdapter,
)

INSTANCES, INGRESSES = ("decode", "prefill"), ("in1", "in2")


class Peers:
    """Everybody but the scheduler. Instances and ingresses follow what they are told, but those that are `slow`."""

    def __init__(self, me: str = "s1") -> None:
        self.registry = AdapterRegistry(me)
        self.peers: tuple[str, ...] = ()
        self.now = 0.0
        self.slow = set[str]()
        self.refuse: dict[str, str] = {}
        """By instance, why it refuses whatever it lacks."""
        self.lists: dict[str, AdapterList] = {}
        self.running: dict[str, set[str]] = {}
        """By ingress, the keys of its requests."""
        self.held: dict[str, set[str]] = {}
        self.answers: dict[int, AdapterChanged] = {}
        self.count = 0
        for address in (*INSTANCES, *INGRESSES):
            self.join(address)

    def join(self, address: str, known: AdapterList = EMPTY_LIST) -> None:
        self.lists[address] = known
        if address.startswith("in"):
            self.running.setdefault(address, set())
        else:
            self.held[address] = {each.key for each in known.adapters}
        first = self.word(address)
        self.take(self.registry.on(address, known, self.peers, self.now))
        self.take(self.registry.on(address, first, self.peers, self.now))

    def say(self, address: str) -> None:
        self.take(self.registry.on(address, self.word(address), self.peers, self.now))

    def word(self, address: str) -> AdaptersHeld | AdaptersUsed:
        """Follow the list, and return what is to be said of that."""
        listed = self.lists[address]
        retiring = {each.key for each in listed.adapters if each.state == "retiring"}
        if address in self.running:
            return AdaptersUsed(listed.version, tuple(sorted(retiring & self.running[address])))
        keys, why = {each.key for each in listed.adapters}, self.refuse.get(address, "")
        failed = keys - self.held[address] if why else set[str]()
        self.held[address] = keys - failed
        return AdaptersHeld(listed.version, tuple((key, why) for key in sorted(failed)))

    def take(self, words: Iterable[tuple[str, AdapterList | AdapterChanged]]) -> None:
        for address, word in words:
            if isinstance(word, AdapterChanged):
                self.answers[word.nonce] = word
            elif address in self.lists and word.version > self.lists[address].version:
                self.lists[address] = word
                if address not in self.slow:
                    self.say(address)

    def wake(self, address: str) -> None:
        self.slow.discard(address)
        self.say(address)

    def load(self, key: str, *, in_place: bool = False) -> int:
        self.count += 1
        asked = LoadAdapter(self.count, key, "/adapters/x", in_place)
        self.take(self.registry.on("in1", asked, self.peers, self.now))
        return self.count

    def unload(self, name: str) -> int:
        self.count += 1
        self.take(self.registry.on("in1", UnloadAdapter(self.count, name), self.peers, self.now))
        return self.count

    def end(self, ingress: str, key: str) -> None:
        self.running[ingress].discard(key)
        self.say(ingress)

    def lose(self, address: str) -> None:
        for known in (self.lists, self.running, self.held):
            known.pop(address, None)
        self.take(self.registry.lost(address, self.peers, self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.registry.tick(self.now))

    def listed(self, address: str = "in2") -> dict[str, str]:
        return {each.key: each.state for each in self.lists[address].adapters}

    def ok(self, nonce: int) -> bool:
        return nonce in self.answers and not self.answers[nonce].why


def test_a_load_is_answered_when_every_instance_has_it_and_every_ingress_knows_it() -> None:
    peers = Peers()
    peers.slow = {"prefill", "in2"}
    nonce = peers.load("sql@1")
    assert peers.listed("in1") == {"sql@1": "loading"}, (
        "no request may name it before the last instance has it"
    )
    assert nonce not in peers.answers
    peers.wake("prefill")
    assert peers.listed("in1") == {"sql@1": "serving"}
    assert nonce not in peers.answers, "an ingress has not heard of it"
    peers.wake("in2")
    assert peers.ok(nonce)
    assert all(keys == {"sql@1"} for keys in peers.held.values())


def test_a_failing_load_leaves_nothing_and_names_who_refuses() -> None:
    peers = Peers()
    peers.refuse = {"prefill": "no such folder"}
    nonce = peers.load("sql@1")
    assert peers.answers[nonce] == AdapterChanged(nonce, "instance prefill: no such folder", 400)
    assert peers.listed() == {}
    assert all(not keys for keys in peers.held.values())
    peers.refuse = {}
    assert peers.ok(peers.load("sql@1"))


def test_a_failure_is_answered_when_the_last_instance_has_given_it_up() -> None:
    peers = Peers()
    peers.refuse, peers.slow = {"prefill": "no"}, {"decode"}
    nonce = peers.load("sql@1")
    assert nonce not in peers.answers
    peers.wake("decode")
    assert peers.answers[nonce].status == 400


def test_an_instance_that_does_not_answer_is_named_and_one_that_is_lost_is_not_waited_for() -> None:
    peers = Peers()
    peers.slow = {"prefill"}
    nonce = peers.load("sql@1")
    peers.pass_time(LOAD_S / 2)
    assert peers.listed("in1") == {"sql@1": "loading"}
    peers.pass_time(LOAD_S / 2)
    assert peers.listed("in1") == {}
    peers.lose("prefill")
    assert "prefill has not loaded it" in peers.answers[nonce].why
    peers.join("prefill2")
    peers.slow = {"prefill2"}
    nonce = peers.load("sql@1")
    peers.lose("prefill2")
    assert peers.ok(nonce)


def test_an_unload_waits_for_running_requests_and_frees_the_slot() -> None:
    peers = Peers()
    peers.load("sql@1")
    peers.running["in2"] = {"sql@1"}
    nonce = peers.unload("sql")
    assert peers.listed() == {"sql@1": "retiring"}, "new requests are refused at once"
    assert peers.held["decode"] == {"sql@1"}, "a request that runs may go on anywhere"
    assert nonce not in peers.answers
    peers.pass_time(10 * LOAD_S)
    assert nonce not in peers.answers
    peers.end("in2", "sql@1")
    assert peers.ok(nonce)
    assert all(not keys for keys in peers.held.values())


def test_an_ingress_that_is_lost_needs_nothing_any_more() -> None:
    peers = Peers()
    peers.load("sql@1")
    peers.running["in2"] = {"sql@1"}
    nonce = peers.unload("sql")
    peers.lose("in2")
    assert peers.ok(nonce)


def test_another_revision_takes_the_place_of_one_that_runs_to_its_end() -> None:
    peers = Peers()
    peers.load("sql@1")
    peers.running["in2"] = {"sql@1"}
    assert "already been loaded" in peers.answers[peers.load("sql@2")].why
    assert peers.ok(peers.load("sql@1", in_place=True)), "these very files are there"
    assert peers.ok(peers.load("sql@2", in_place=True))
    assert peers.listed() == {"sql@1": "retiring", "sql@2": "serving"}
    assert peers.answers[peers.load("sql@1", in_place=True)].status == 409
    peers.end("in2", "sql@1")
    assert peers.listed() == {"sql@2": "serving"}
    assert peers.held["decode"] == {"sql@2"}


def test_a_revision_that_cannot_be_loaded_leaves_the_other_one() -> None:
    peers = Peers()
    peers.load("sql@1")
    peers.refuse = {"decode": "all slots are taken"}
    assert peers.answers[peers.load("sql@2", in_place=True)].status == 400
    assert peers.listed() == {"sql@1": "serving"}
    assert all(keys == {"sql@1"} for keys in peers.held.values())


def test_what_is_not_there_cannot_be_unloaded() -> None:
    peers = Peers()
    assert peers.answers[peers.unload("sql")].status == 404
    peers.slow = {"decode"}
    peers.load("sql@1")
    assert peers.answers[peers.unload("sql")].status == 404, "it is being loaded"
    assert peers.answers[peers.load("sql@1")].status == 409


def test_no_instance_is_no_success() -> None:
    peers = Peers()
    for address in INSTANCES:
        peers.lose(address)
    assert peers.answers[peers.load("sql@1")].status == 503


def test_who_comes_later_is_told_and_is_given_no_request_before_it_has_them() -> None:
    peers = Peers()
    peers.load("sql@1")
    peers.slow = {"decode2"}
    peers.join("decode2")
    assert peers.listed("decode2") == {"sql@1": "serving"}
    assert not peers.registry.is_current("decode2")
    peers.wake("decode2")
    assert peers.registry.is_current("decode2")
    peers.join("in3")
    assert peers.listed("in3") == {"sql@1": "serving"}
    assert peers.registry.is_current("who has never spoken of adapters")


def test_an_instance_that_comes_while_one_is_loaded_is_waited_for() -> None:
    peers = Peers()
    peers.slow = {"decode", "decode2"}
    nonce = peers.load("sql@1")
    peers.join("decode2")
    peers.wake("decode")
    assert nonce not in peers.answers
    peers.wake("decode2")
    assert peers.ok(nonce)


@pytest.mark.parametrize("first", ["decode", "in1"])
def test_a_scheduler_that_comes_anew_learns_the_list_from_whoever_is_there(first: str) -> None:
    peers = Peers()
    peers.load("sql@1")
    peers.load("poet@1")
    peers.running["in2"] = {"poet@1"}
    peers.unload("poet")
    known = dict(peers.lists)
    peers.registry, peers.now = AdapterRegistry("s9"), 1000.0
    for address in sorted(known, key=lambda address: address != first):
        peers.join(address, known[address])
        assert peers.held["decode"] == {"sql@1", "poet@1"}, "what an ingress still needs is not given up"
    assert peers.listed() == {"sql@1": "serving", "poet@1": "retiring"}
    peers.pass_time(SETTLE_S)
    assert peers.held["decode"] == {"sql@1", "poet@1"}
    peers.end("in2", "poet@1")
    assert peers.listed() == {"sql@1": "serving"}
    assert peers.ok(peers.load("poet@2"))


def test_what_a_lost_scheduler_was_loading_is_taken_back_by_the_next() -> None:
    peers = Peers()
    peers.load("sql@1")
    peers.slow = {"prefill"}
    peers.load("poet@1")
    known = dict(peers.lists)
    peers.registry, peers.slow = AdapterRegistry("s9"), set[str]()
    for address in known:
        peers.join(address, known[address])
    assert peers.listed() == {"sql@1": "serving"}
    assert all(keys == {"sql@1"} for keys in peers.held.values())


def test_one_of_several_schedulers_changes_the_list_and_the_others_know_it() -> None:
    leader, other = AdapterRegistry("s1"), AdapterRegistry("s2")
    assert other.on("in1", LoadAdapter(1, "sql@1", "/x", False), ("s1",), 0.0) == [
        ("in1", AdapterChanged(1, "another scheduler leads now: ask again", 503))
    ]
    leader.on("decode", AdaptersHeld(EMPTY_LIST.version), ("s2",), 0.0)
    words = dict(leader.on("in1", LoadAdapter(1, "sql@1", "/x", False), ("s2",), 0.0))
    listed = words["s2"]
    assert isinstance(listed, AdapterList)
    assert other.on("s1", listed, ("s1",), 0.0) == []
    leader.on("decode", AdaptersHeld(listed.version), ("s2",), 0.0)
    other.on("decode", AdaptersHeld(listed.version), ("s1",), 0.0)
    took_over = dict(other.lost("s1", (), 1.0))
    assert took_over["decode"] == AdapterList(took_over["decode"].version, ())  # type: ignore[union-attr]
    assert took_over["decode"].version > listed.version  # type: ignore[union-attr]

"""The store by which ranks on several hosts find each other: what torch asks of one, and only from who knows the start's secret."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from core.errors import ProtocolError, ReplicaLost
from engine.ranks.rank_messages import Meeting
from engine.ranks.rendezvous import StoreServer, join
from tests.far_host import FAR
from tests.parallel.test_comm import in_order, sums
from tests.parallel.world import World


@pytest.fixture(params=["127.0.0.1", FAR])
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    started = StoreServer(request.param)
    yield started
    started.close()


def by_meeting(rank: int, _: Any, meeting: Meeting, work: Any, size: int) -> None:
    work(rank, join(meeting), size, "gloo")


@pytest.mark.parametrize("work", [sums, in_order])
def test_a_group_forms(work: Any, server: StoreServer, world: World) -> None:
    world.run(3, by_meeting, server.meeting, work, 3)


def test_it_does_what_torchs_own_does(server: StoreServer) -> None:
    ours = join(server.meeting)
    for torchs in (dist.HashStore(), ours):
        store = dist.PrefixStore("p", torchs)
        store.set("a", "1")
        assert store.get("a") == b"1"
        assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
        assert store.check(["a", "n"])
        assert not store.check(["a", "x"])
        assert store.compare_set("a", "1", "2") == b"2"
        assert store.compare_set("a", "1", "3") == b"2"
        assert store.multi_get(["a", "n"]) == [b"2", b"5"]
        assert store.delete_key("a")
        assert not store.delete_key("a")
        with pytest.raises(RuntimeError):
            store.wait(["a"], timedelta(seconds=0.1))
    ours.close()


def test_another_of_the_same_store(server: StoreServer) -> None:
    store = join(server.meeting)
    store.set("a", "1")
    assert store.clone().get("a") == b"1"
    store.close()


def test_who_does_not_know_the_secret_is_refused(server: StoreServer) -> None:
    with pytest.raises((ReplicaLost, ProtocolError)):
        join(replace(server.meeting, secret=b"another"))

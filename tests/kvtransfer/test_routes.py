"""The way to a holder is chosen by what was measured, and before that by the senders' order."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from core.errors import ReplicaLost, TransferError
from core.kv import KVLayout, KVShard
from core.messages import RegionKey
from kvtransfer.copies import CopyRun
from kvtransfer.transport.routes import Routes
from tests.patience import PATIENCE_S

SHARD = KVShard.whole(KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32"))


class Way:
    """A sender of a given speed; None: it does not get through."""

    vouches = False

    def __init__(self, name: str, bytes_per_s: float | None) -> None:
        self.name, self.bytes_per_s, self.num_probes = name, bytes_per_s, 0

    def reaches(self, region: RegionKey) -> bool:
        return region.transport == self.name

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        raise AssertionError("nothing is written here")

    async def probe(self, region: RegionKey, num_bytes: int) -> int:
        self.num_probes += 1
        if self.bytes_per_s is None:
            raise ReplicaLost("no way through")
        await asyncio.sleep(num_bytes / self.bytes_per_s)
        return num_bytes

    def ended(self, grant_id: str) -> None: ...
    def forget(self, endpoint_owner: str) -> None: ...
    async def close(self) -> None: ...


def regions(*names: str, shard: KVShard = SHARD) -> list[RegionKey]:
    return [
        RegionKey(transport=name, endpoint=f"{name}:1", name="", host="", shard=shard, num_blocks=4)
        for name in names
    ]


async def settled() -> None:
    """Wait for all that has been begun."""
    async with asyncio.timeout(PATIENCE_S):
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)


def chosen(routes: Routes, offered: list[RegionKey], holder: str = "h") -> str:
    ((sender, region),) = routes.choose(holder, offered)
    assert sender.reaches(region)
    return sender.name


async def test_the_fastest_is_used_once_it_is_known_and_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    slow, fast = Way("slow", 4e8), Way("fast", 4e9)
    routes = Routes([slow, fast])
    assert chosen(routes, regions("fast", "slow")) == "slow", "the order decides until there are figures"
    await settled()
    assert chosen(routes, regions("fast", "slow")) == "fast"
    assert "goes by fast: measured slow 0." in caplog.text
    probes = fast.num_probes
    await settled()
    assert fast.num_probes == probes, "measured once"
    await routes.close()


async def test_a_way_that_does_not_get_through_is_not_used() -> None:
    routes = Routes([Way("broken", None), Way("works", 1e9)])
    chosen(routes, regions("broken", "works"))
    await settled()
    assert chosen(routes, regions("broken", "works")) == "works"
    await routes.close()


async def test_a_single_way_is_not_measured_and_none_is_refused_by_name() -> None:
    only = Way("only", 1e9)
    routes = Routes([only])
    assert chosen(routes, regions("only", "other")) == "only"
    await settled()
    assert not only.num_probes
    with pytest.raises(TransferError, match="decode offers other, prefill has only"):
        routes.choose("h", regions("other"))


async def test_a_holder_that_came_back_is_measured_again() -> None:
    first, second = Way("first", 1e9), Way("second", 4e9)
    routes = Routes([first, second])
    chosen(routes, regions("first", "second"))
    await settled()
    routes.forget("h")
    assert chosen(routes, regions("first", "second")) == "first"
    await settled()
    assert chosen(routes, regions("first", "second")) == "second"
    routes.forget("h")
    chosen(routes, regions("first", "second"))
    routes.forget("h")  # while it is being measured
    await settled()
    await routes.close()


async def test_each_rank_has_its_own_way() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
    halves = [KVShard(layout, (0, 1), (0, 1)), KVShard(layout, (0, 1), (1, 2))]
    offered = [*regions("a", "b", shard=halves[0]), *regions("b", shard=halves[1])]
    routes = Routes([Way("a", 4e9), Way("b", 1e9)])
    routes.choose("h", offered)
    await settled()
    assert [sender.name for sender, _ in routes.choose("h", offered)] == ["a", "b"]
    await routes.close()

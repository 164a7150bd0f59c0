"""KV between two nodes: measured by the transports that instances use, and judged by what the link carries."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.instance.device_access import device_access, take_device_memory
from cluster.instance.pool_access import PoolAccess, remote_access
from cluster.preflight.findings import Finding, Verdict
from cluster.preflight.kv_check import judge_kv
from cluster.preflight.kv_rank import SHARD, measure, pool_bytes
from cluster.preflight.measured_links import MeasuredLinks
from cluster.preflight.rank_job import RankJob, meet
from core.config.cluster_config import TransferConfig
from device.simulated import SimulatedDevice
from net.channel import Identity
from tests.ports import free_port

HOST = "127.0.0.1"
NUM_BYTES = 32 * SHARD.block_bytes
Open = Callable[[int, TransferConfig], PoolAccess]
CARRIES = MeasuredLinks([], {(0, 1): 48e9, (1, 0): 48e9}, "sendrecv_perf")


def identity(rank: int) -> Identity:
    return Identity(f"doctor-{rank}", str(rank), os.getpid())


def in_host_memory(rank: int, config: TransferConfig) -> PoolAccess:
    return remote_access(config, identity(rank), HOST, receives=True, key=b"key", num_bytes=NUM_BYTES)


@pytest.fixture
def on_a_device() -> Iterator[Open]:
    devices = [SimulatedDevice(rank) for rank in range(2)]

    def opened(rank: int, config: TransferConfig) -> PoolAccess:
        memory = take_device_memory(devices[rank], NUM_BYTES)
        return device_access(
            config, identity(rank), HOST, key=b"key", memory=memory, num_bytes=NUM_BYTES, media={}
        )

    yield opened
    assert not [device.violations for device in devices if device.violations]
    for device in devices:
        device.close()


async def measured(opened: Open, **transfer: object) -> list[dict[str, object]]:
    """What two ranks measure that are both in this process."""
    meeting = f"{HOST}:{free_port()}"
    config = TransferConfig(**transfer)  # type: ignore[arg-type]
    stores: list[object] = []  # rank 0's ends with its last reference, and rank 1 may still read from it

    async def one(rank: int) -> dict[str, object]:
        job = RankJob(kind="kv_rank", rank=rank, world=2, meeting=meeting, mib=2, backend="gloo", host=HOST)
        store = await asyncio.to_thread(meet, job)
        stores.append(store)
        return await measure(job, store, opened(rank, config), NUM_BYTES)

    return [*await asyncio.gather(one(0), one(1))]


async def test_pools_are_alike_where_one_rank_finds_less_shared_memory_than_another() -> None:
    """Each takes some of the same /dev/shm, and a burst that is larger than the other's pool has no place there."""
    meeting = f"{HOST}:{free_port()}"
    stores: list[object] = []

    async def one(rank: int, room: int) -> int:
        job = RankJob(kind="kv_rank", rank=rank, world=2, meeting=meeting, mib=2, backend="gloo", host=HOST)
        store = await asyncio.to_thread(meet, job)
        stores.append(store)
        return await asyncio.to_thread(pool_bytes, store, job, room)

    assert await asyncio.gather(one(0, 3 << 20), one(1, 2 << 20)) == [2 << 20, 2 << 20]
    meeting = f"{HOST}:{free_port()}"
    assert await asyncio.gather(one(0, 1 << 40), one(1, 1 << 40)) == [8 << 20, 8 << 20]


@pytest.mark.parametrize("transport", ["shm", "tcp", "auto"])
async def test_each_direction_is_measured_by_each_transport_that_reaches(transport: str) -> None:
    for rank, result in enumerate(await measured(in_host_memory, transport=transport)):
        assert result["rank"] == rank
        assert result["failures"] == {1 - rank: {}}
        ways = result["ways"][1 - rank]  # type: ignore[index]
        assert set(ways) == {"shm", "tcp"} if transport == "auto" else {transport}
        assert all(speed > 0 for speed in ways.values())


async def test_kv_of_devices_is_staged_as_instances_stage_it(on_a_device: Open) -> None:
    for rank, result in enumerate(await measured(on_a_device, transport="tcp")):
        assert set(result["ways"][1 - rank]) == {"tcp"}  # type: ignore[index]


async def test_ranks_without_a_common_transport_say_so() -> None:
    def opened(rank: int, config: TransferConfig) -> PoolAccess:
        return in_host_memory(rank, TransferConfig(transport="tcp" if rank else "shm"))

    findings = judge_kv(["a", "b"], as_told(await measured(opened)), CARRIES)
    assert [(f.where, f.verdict) for f in findings] == [("a -> b", Verdict.FAIL), ("b -> a", Verdict.FAIL)]
    assert all("no transport reaches it" in finding.measured and finding.fix for finding in findings)


def as_told(results: object) -> list[dict[str, Any]]:
    """What a rank's process prints."""
    return json.loads(json.dumps(results))


def judged(
    ways: dict[str, float], failures: dict[str, str] | None = None, carries: MeasuredLinks = CARRIES
) -> Finding:
    result = {"rank": 0, "ways": {1: ways}, "failures": {1: failures or {}}}
    (finding,) = judge_kv(["a", "b"], as_told([result]), carries)
    return finding


def test_kv_is_said_as_a_share_of_what_the_link_carries() -> None:
    finding = judged({"tcp": 2.4e9, "nixl": 36e9})
    assert (finding.where, finding.check, finding.verdict) == ("a -> b", "KV", Verdict.OK)
    assert finding.measured == "36.00 GB/s by nixl, 75% of the 48.00 GB/s of sendrecv_perf"
    assert not finding.fix


def test_kv_that_is_much_slower_than_its_link_is_worth_a_look_and_the_fix_is_its_transports() -> None:
    slow = judged({"tcp": 2.4e9})
    assert (slow.verdict, slow.measured) == (
        Verdict.WARN,
        "2.40 GB/s by tcp, 5% of the 48.00 GB/s of sendrecv_perf",
    )
    assert "NIXL" in slow.fix
    assert "GPUDirect" in judged({"nixl": 12e9}).fix


def test_a_transport_that_does_not_work_is_named_though_another_one_is_fast_enough() -> None:
    finding = judged({"shm": 40e9}, {"nixl": "no UCX device"})
    assert finding.verdict is Verdict.WARN
    assert finding.measured.endswith("; nixl failed: no UCX device")
    assert finding.fix


def test_without_a_measurement_of_the_link_kv_is_only_said() -> None:
    finding = judged({"tcp": 2.4e9}, carries=MeasuredLinks([]))
    assert (finding.verdict, finding.measured) == (Verdict.OK, "2.40 GB/s by tcp")

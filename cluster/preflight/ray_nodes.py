"""The nodes of a Ray cluster, each through an actor that is pinned to it."""

import asyncio
import socket
import time
from typing import Any

import ray
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.preflight.fabric import run_rank_here
from cluster.preflight.findings import Finding, judge_clock
from cluster.preflight.host import check_host

_START_S = 60.0
_PINGS = 5


@ray.remote(num_cpus=0)
class _Probe:
    """What runs on the node."""

    async def free_address(self) -> str:
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as probe:
            return f"{host}:{probe.getsockname()[1]}"

    async def run_rank(self, rank: int, world: int, address: str, backend: str, mib: int) -> dict[str, Any]:
        return await run_rank_here(rank, world, address, backend, mib)

    async def now(self) -> float:
        return time.time()

    async def check_host(self, where: str, kv_bytes: int) -> list[Finding]:
        return check_host(where, kv_bytes)


class RayNode:
    """cluster.preflight.fabric.Node. The probe ends with this object."""

    def __init__(self, name: str, node_id: str) -> None:
        self.name = name
        pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self._probe: Any = _Probe.options(scheduling_strategy=pinned).remote()

    async def free_address(self) -> str:
        async with asyncio.timeout(_START_S):
            return await self._probe.free_address.remote()

    async def run_rank(self, rank: int, world: int, address: str, backend: str, mib: int) -> dict[str, Any]:
        return await self._probe.run_rank.remote(rank, world, address, backend, mib)

    async def check_host(self, kv_bytes: int) -> list[Finding]:
        async with asyncio.timeout(_START_S):
            return await self._probe.check_host.remote(self.name, kv_bytes)

    async def check_clock(self) -> Finding:
        """Of several round trips the shortest says most: the answer was made somewhere in its middle."""
        trips: list[tuple[float, float]] = []
        for _ in range(_PINGS):
            sent = time.time()
            theirs = await self._probe.now.remote()
            back = time.time()
            trips.append((back - sent, theirs - (sent + back) / 2))
        round_trip_s, skew_s = min(trips)
        return judge_clock(self.name, skew_s, round_trip_s / 2)


def living_nodes() -> list[RayNode]:
    """One for each node of the cluster that this process is connected to, in the order of their addresses."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        RayNode(n["NodeManagerAddress"], n["NodeID"])
        for n in sorted(alive, key=lambda n: n["NodeManagerAddress"])
    ]

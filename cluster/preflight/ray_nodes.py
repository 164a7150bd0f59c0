"""The nodes of a Ray cluster, each through an actor that is pinned to it."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.deploy.rank_bundles import most_kv_bytes, no_room, pools_on
from cluster.preflight.findings import Finding, Verdict, judge_clock
from cluster.preflight.local_node import LocalNode, num_gpus_here
from cluster.preflight.model_checks import check_node
from cluster.preflight.nccl_tests import NodeTests, measure_node
from cluster.preflight.nodes import NodeGpus
from cluster.preflight.rank_job import RankJob
from core.config.cluster_config import ClusterConfig
from core.config.pools import PoolName
from core.config.residency_groups import colocations_of
from core.errors import ConfigError

_START_S = 60.0
_PINGS = 5


@ray.remote(num_cpus=0)
class _Probe:
    """The actor that runs on the node."""

    def __init__(self) -> None:
        self._node = LocalNode(host=ray.util.get_node_ip_address())

    async def free_address(self) -> str:
        return await self._node.free_address()

    async def gpus(self) -> NodeGpus:
        return await self._node.gpus()

    async def run_rank(self, job: RankJob) -> dict[str, Any]:
        return await self._node.run_rank(job)

    async def run_proxy(self, options: Sequence[str], deadline_s: float) -> None:
        await self._node.run_proxy(options, deadline_s)

    async def test_gpus(self, where: str) -> NodeTests:
        return await measure_node(where, num_gpus_here())

    async def now(self) -> float:
        return time.time()

    async def check_host(
        self, where: str, config: ClusterConfig, kv_bytes: int, pools: Mapping[str, Sequence[PoolName]]
    ) -> list[Finding]:
        return list(check_node(where, config, kv_bytes, pools, os.environ))


class RayNode:
    """A cluster.preflight.nodes.Node. The probe ends with this object."""

    def __init__(self, name: str, node_id: str, resources: Mapping[str, float]) -> None:
        """`resources` are all that it has for Ray, used or not."""
        self.name, self.resources = name, resources
        pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self._probe: Any = _Probe.options(scheduling_strategy=pinned).remote()

    async def free_address(self) -> str:
        async with asyncio.timeout(_START_S):
            return await self._probe.free_address.remote()

    async def gpus(self) -> NodeGpus:
        async with asyncio.timeout(_START_S):
            return await _said(self._probe.gpus.remote())

    async def run_rank(self, job: RankJob) -> dict[str, Any]:
        return await _said(self._probe.run_rank.remote(job))

    async def run_proxy(self, options: Sequence[str], deadline_s: float) -> None:
        await _said(self._probe.run_proxy.remote(options, deadline_s))

    async def test_gpus(self) -> NodeTests:
        """Run nccl-tests over its GPUs."""
        return await self._probe.test_gpus.remote(self.name)

    async def check_host(self, config: ClusterConfig) -> list[Finding]:
        kv_bytes = sum(
            each.most(lambda row: most_kv_bytes(row, self.resources)) for each in colocations_of(config)
        )
        pools = {row.model.name: pools_on(row, self.resources) for row in config.rows}
        async with asyncio.timeout(_START_S):
            return await self._probe.check_host.remote(self.name, config, kv_bytes, pools)

    async def check_clock(self) -> Finding:
        """Compare clocks by the shortest of several round trips, taking the answer to be made in its middle."""
        trips: list[tuple[float, float]] = []
        for _ in range(_PINGS):
            sent = time.time()
            theirs = await self._probe.now.remote()
            back = time.time()
            trips.append((back - sent, theirs - (sent + back) / 2))
        round_trip_s, skew_s = min(trips)
        return judge_clock(self.name, skew_s, round_trip_s / 2)


async def _said(result: Any) -> Any:
    """Wait for a call of a probe. Raises ConfigError where it does, and where the probe is lost."""
    try:
        return await result
    except RayTaskError as error:
        raise ConfigError(str(error.cause)) from error
    except RayError as error:
        raise ConfigError(f"the node is lost: {str(error).splitlines()[0]}") from error


def living_nodes() -> list[RayNode]:
    """Return one for each node of the cluster that this process is connected to, in the order of their addresses, which are their
    names. Several on one machine have the beginnings of their ids beside it."""
    alive = sorted(
        (n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeManagerAddress"], n["NodeID"])
    )
    count = Counter(n["NodeManagerAddress"] for n in alive)
    return [
        RayNode(
            host if count[host] == 1 else f"{host} ({n['NodeID'][:6]})", n["NodeID"], n.get("Resources", {})
        )
        for n in alive
        for host in [n["NodeManagerAddress"]]
    ]


def check_room(config: ClusterConfig, nodes: Sequence[Mapping[str, float]]) -> Finding:
    """Check that an instance of each pool could be placed on nodes with these resources in all."""
    if not (why := no_room(config, nodes)):
        return Finding(
            where="all nodes",
            check="placement",
            verdict=Verdict.OK,
            measured="an instance of each pool has room",
        )
    fix = "add nodes of that size, or let an instance be on more of them (prefill.hosts, decode.hosts)"
    return Finding(
        where="all nodes",
        check="placement",
        verdict=Verdict.FAIL,
        measured=why,
        expected="room for an instance of each pool",
        fix=fix,
    )

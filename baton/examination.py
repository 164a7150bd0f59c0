"""What `baton doctor` looks at: this node, or every node and link of a Ray cluster."""

import asyncio
import os
from collections.abc import Sequence

import ray
import ray.util
import typer

from cluster.deploy.ray_address import join_ray
from cluster.preflight.fabric import Ask, Backend, check_fabric
from cluster.preflight.findings import Finding
from cluster.preflight.local_node import LocalNode, num_gpus_here
from cluster.preflight.model_checks import check_node, named
from cluster.preflight.nccl_tests import measure_node
from cluster.preflight.pod_memory import check_pod
from cluster.preflight.pods import check_as_rank
from cluster.preflight.ray_nodes import check_room, living_nodes
from core.config.cluster_config import ClusterConfig
from core.config.pools import PoolName, pools_of
from core.config.residency_groups import colocations_of


def backend_for(wanted: str) -> Backend:
    match wanted:
        case "nccl" | "gloo" | "auto":
            return wanted
        case _:
            raise typer.BadParameter(f"{wanted}: use nccl, gloo or auto", param_hint="--backend")


async def examine(
    config: ClusterConfig,
    ray_address: str,
    ask: Ask,
    pools: Sequence[PoolName] = (),
    num_each: int = 0,
) -> list[Finding]:
    """Examine. This node is asked whether an instance of each of `pools` fits, and this pod whether `num_each` do, unless that is
    0; they are then of one model, or of one group's. A Ray cluster's nodes are asked by what they could hold."""
    if not ray_address:
        return await _examine_here(config, ask, pools, num_each)
    join_ray(ray_address)
    try:
        nodes = living_nodes()
        there = [node.resources for node in nodes]
        room = [each for row in config.rows for each in named([check_room(row, there)], config, row)]
        hosts = await asyncio.gather(*(node.check_host(config) for node in nodes))
        clocks = [await node.check_clock() for node in nodes]
        tests = await asyncio.gather(*(node.test_gpus() for node in nodes))
        fabric = await check_fabric(
            nodes,
            ask,
            here=ray.util.get_node_ip_address(),
            within={node.name: test.sendrecv_bytes_per_s for node, test in zip(nodes, tests, strict=True)},
        )
        of_nodes = [*hosts, *(test.findings for test in tests)]
        return [*(finding for findings in of_nodes for finding in findings), *room, *clocks, *fabric]
    finally:
        ray.shutdown()


async def _examine_here(
    config: ClusterConfig, ask: Ask, pools: Sequence[PoolName], num_each: int
) -> list[Finding]:
    here = LocalNode()
    tests = await measure_node(here.name, num_gpus_here())
    fabric = await check_fabric([here], ask, within={here.name: tests.sendrecv_bytes_per_s})
    of_models = {row.model.name: pools for row in config.rows}
    if not num_each:
        found = list(check_node(here.name, config, all_kv_bytes(config), of_models, os.environ))
        return [*found, *tests.findings, *fabric]
    [models] = colocations_of(config)
    own: list[PoolName] = [
        pool.name for pool in pools_of(models.first) if pool.name in pools and pool.num_instances
    ]
    num_here = num_each * len(own)
    kv_bytes = models.most(lambda row: row.engine.kv_bytes) * num_here
    found = list(check_node(here.name, config, kv_bytes, of_models, os.environ, num_here))
    pod = check_pod(here.name, models, own, num_each, on_gpus=bool(num_gpus_here()))
    return [*found, pod, *tests.findings, *fabric]


async def examine_as_rank(
    config: ClusterConfig, rank: int, world: int, rendezvous: str, ask: Ask, wait_s: float
) -> list[Finding]:
    """Examine this node, and with the others what lies between them. Rank 0 listens at `rendezvous`."""
    name = f"rank {rank}"
    tests = await measure_node(name, num_gpus_here())
    fabric = await check_as_rank(rank, world, rendezvous, ask, wait_s=wait_s)
    found = check_node(name, config, all_kv_bytes(config), {}, os.environ)
    return [*found, *tests.findings, *fabric]


def all_kv_bytes(config: ClusterConfig) -> int:
    """Return the KV pools' bytes on a machine that has every instance."""
    return sum(
        each.most(lambda row: row.engine.kv_bytes * row.decode_instances) for each in colocations_of(config)
    )

"""What `baton doctor` looks at: this node, or every node and link of a Ray cluster."""

import asyncio
import logging
import os
from collections.abc import Sequence

import ray
import torch
import typer

from cluster.deploy.ray_address import check_ray_address
from cluster.deploy.ray_loopback import is_on_loopback, keep_ray_to_loopback
from cluster.preflight.card_check import check_card
from cluster.preflight.collective_check import LocalNode, check_fabric
from cluster.preflight.findings import Finding
from cluster.preflight.memory_check import check_memory
from cluster.preflight.node_checks import check_host
from cluster.preflight.ray_nodes import check_room, living_nodes
from core.config import ClusterConfig
from core.pools import PoolName


def backend_for(wanted: str) -> str:
    if wanted not in ("auto", "nccl", "gloo"):
        raise typer.BadParameter(f"{wanted}: use nccl, gloo or auto", param_hint="--backend")
    if wanted == "auto":
        return "nccl" if torch.cuda.is_available() else "gloo"
    return wanted


async def examine(
    config: ClusterConfig,
    ray_address: str,
    backend: str,
    mib: int,
    expected_bytes_per_s: float,
    *,
    pools: Sequence[PoolName] = (),
) -> list[Finding]:
    """Examine. This node is asked whether an instance of each of `pools` fits. A Ray cluster's nodes are asked by what they could
    hold."""
    if not ray_address:
        here = LocalNode()
        fabric = await check_fabric([here], backend, mib, expected_bytes_per_s)
        host = check_host(here.name, all_kv_bytes(config), config.model.path)
        card = check_card(here.name, config, os.environ)
        return [*host, *check_memory(here.name, config, pools), *card, *fabric]
    check_ray_address(ray_address)
    if is_on_loopback(ray_address):
        keep_ray_to_loopback()
    ray.init(address=ray_address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        nodes = living_nodes()
        room = check_room(config, [node.resources for node in nodes])
        hosts = await asyncio.gather(*(node.check_host(config) for node in nodes))
        clocks = [await node.check_clock() for node in nodes]
        fabric = await check_fabric(nodes, backend, mib, expected_bytes_per_s)
        return [*(finding for findings in hosts for finding in findings), room, *clocks, *fabric]
    finally:
        ray.shutdown()


def all_kv_bytes(config: ClusterConfig) -> int:
    """Return the KV pools' bytes on a machine that has every instance."""
    return config.engine.kv_bytes * config.decode_instances

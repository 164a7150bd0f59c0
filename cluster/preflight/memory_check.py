"""Checks whether an instance of each pool fits this node's memory. The answer is the engine's own: it sizes its pool by the same
law."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.instance.rank_memory import memory_of_replica
from cluster.preflight.findings import Finding, Verdict
from core.config import ClusterConfig, ParallelConfig
from core.errors import ConfigError
from core.pools import PoolName, pools_of
from engine.execution.model_dims import mesh_of
from engine.execution.pool_size import size_pool
from models.hub import folder_of


def check_memory(where: str, config: ClusterConfig, names: Sequence[PoolName]) -> Iterator[Finding]:
    """Return one finding for each of these pools that has instances; none where the model's folder is not on this node."""
    try:
        folder = folder_of(config.model.path)
    except ConfigError:
        return  # the check of the model's folder reports it
    if folder is None:
        return
    for pool in pools_of(config):
        if pool.num_instances and pool.name in names:
            yield _check_pool(where, config, folder, pool.name, pool.parallel)


def _check_pool(
    where: str, config: ClusterConfig, folder: Path, name: PoolName, parallel: ParallelConfig
) -> Finding:
    try:
        size = size_pool(
            folder,
            config.model,
            config.engine,
            mesh_of(parallel),
            role=name,
            num_spare=parallel.ep_redundant_experts,
            found=memory_of_replica(config, name, parallel, None),
        )
    except ConfigError as error:
        return Finding(
            where=where,
            check=f"memory for {name}",
            verdict=Verdict.FAIL,
            measured=str(error),
            expected="room for weights, the largest step and some KV",
            fix="see what is measured",
        )
    return Finding(where=where, check=f"memory for {name}", verdict=Verdict.OK, measured=size.summary())

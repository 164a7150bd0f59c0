"""Checks whether an instance of each pool fits this node's memory. The answer is the engine's own: it sizes its pool by the same
model."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.instance.rank_memory import memory_of_replica
from cluster.preflight.findings import Finding, Verdict
from core.config.cluster_config import ClusterConfig
from core.config.draft_config import draft_path, engine_of_role
from core.config.parallel_config import ParallelConfig
from core.config.pools import PoolName, pools_of
from core.errors import ConfigError
from engine.sizing.model_dims import mesh_of
from engine.sizing.pool_size import size_pool
from models.files.hub import folder_of


def check_memory(
    where: str, config: ClusterConfig, names: Sequence[PoolName], num_instances: int = 0
) -> Iterator[Finding]:
    """Return one finding for each of these pools that has instances; none where a model's folder is not on this node.
    `num_instances` of all of them together share it; 0: as many as it has room for."""
    try:
        folder = folder_of(config.model.path)
    except ConfigError:
        return  # the check of the model's folder reports it
    if folder is None or _is_elsewhere(draft_path(config.engine)):
        return
    for pool in pools_of(config):
        if pool.num_instances and pool.name in names:
            yield _check_pool(where, config, folder, pool.name, pool.parallel, num_instances)


def _is_elsewhere(path: str) -> bool:
    """Return whether the hub has the draft model, and this node may not. What is wrong with its path is said with its size."""
    try:
        return bool(path) and folder_of(path) is None
    except ConfigError:
        return False


def _check_pool(
    where: str,
    config: ClusterConfig,
    folder: Path,
    name: PoolName,
    parallel: ParallelConfig,
    num_instances: int,
) -> Finding:
    try:
        size = size_pool(
            folder,
            config.model,
            engine_of_role(config.engine, name),
            mesh_of(parallel),
            role=name,
            num_spare=parallel.ep_redundant_experts,
            found=memory_of_replica(
                config,
                name,
                parallel,
                None,
                num_instances=num_instances,
            ),
            slots=config.adapters,
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

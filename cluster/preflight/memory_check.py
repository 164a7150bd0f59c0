"""Does an instance of each pool fit this node's memory? The answer is the engine's own: it sizes its pool by the same law."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.instance.instance_parts import Role
from cluster.instance.rank_memory import memory_of_replica
from cluster.preflight.findings import Finding, Verdict
from core.config import ClusterConfig
from core.errors import ConfigError
from engine.execution.model_dims import mesh_of
from engine.execution.pool_size import PoolSize, size_pool
from models.hub import folder_of


def check_memory(where: str, config: ClusterConfig, roles: Sequence[Role]) -> Iterator[Finding]:
    """One finding for each of these pools; none where the model's folder is not on this node."""
    try:
        folder = folder_of(config.model.path)
    except ConfigError:
        return  # another check says so
    for role in roles if folder else ():
        assert folder is not None
        yield _check_pool(where, config, folder, role)


def _check_pool(where: str, config: ClusterConfig, folder: Path, role: Role) -> Finding:
    name = "prefill" if role == "prefill" else "decode"
    parallel = config.prefill if name == "prefill" else config.decode
    try:
        size = size_pool(
            folder,
            config.model,
            config.engine,
            mesh_of(parallel),
            role=name,
            num_spare=parallel.ep_redundant_experts,
            found=memory_of_replica(config, role, parallel, None),
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
    return Finding(where=where, check=f"memory for {name}", verdict=Verdict.OK, measured=_said(size, config))


def _said(size: PoolSize, config: ClusterConfig) -> str:
    pool, needs = size.pools[0], size.needs[0]
    tokens = size.num_blocks * config.engine.block_size
    return (
        f"{tokens:,} tokens of KV: a rank has {pool.num_bytes / 2**30:.2f} GiB beside {needs.weight_bytes / 2**30:.2f} GiB of "
        f"weights and {needs.step_bytes / 2**30:.2f} GiB for the largest step"
    )

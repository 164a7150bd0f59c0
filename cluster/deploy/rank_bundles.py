"""What an instance of several ranks asks of Ray: a placement group of one bundle for each tensor parallel group.

A bundle is on one node, so ranks that talk the most are always together; the replica itself computes nothing and asks for
nothing beside them. All bundles are there, or the instance is not started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.config.cluster_config import ClusterConfig
from core.config.parallel_config import ParallelConfig
from core.config.pools import PoolName, pools_of
from core.errors import ConfigError

_GRAIN = 10_000
"""The unit of a share, since Ray counts in ten thousandths."""


@dataclass(frozen=True, slots=True)
class BundleShare:
    """One rank's share of a bundle."""

    bundle: int
    num_cpus: float
    num_gpus: int


def bundles_of(config: ClusterConfig, pool: ParallelConfig) -> list[dict[str, float]]:
    """Return the bundles to ask for. They have GPUs where the configuration says that there are some; a Serve file may say it
    otherwise."""
    bundle = {"CPU": config.cpus_per_instance * pool.tp}
    if config.engine.device == "cuda":
        bundle["GPU"] = pool.tp * pool.gpu_share
    return [dict(bundle) for _ in range(pool.num_ranks // pool.tp)]


def strategy_of(pool: ParallelConfig) -> str:
    """Return Ray's strategy: all bundles on one node, or on as few as have room."""
    return "STRICT_PACK" if pool.hosts == 1 else "PACK"


def no_room(config: ClusterConfig, nodes: Sequence[Mapping[str, float]]) -> str:
    """Return which instance the nodes could never hold, by their resources in all; empty where there is none."""
    for pool in pools_of(config):
        parallel = pool.parallel
        bundles = bundles_of(config, parallel)
        room = sorted((_num_bundles(node, bundles[0]) for node in nodes), reverse=True)
        if pool.num_instances and sum(room[: parallel.hosts]) < len(bundles):
            asked = ", ".join(f"{amount * len(bundles):g} {name}" for name, amount in bundles[0].items())
            where = (
                f"one host, and no node {'of one GPU ' if parallel.shares_card else ''}has"
                if parallel.hosts == 1
                else f"{parallel.hosts} hosts, and so many nodes have no"
            )
            return f"{pool.name}: an instance of {parallel.num_ranks} ranks must be on {where} {asked}"
    return ""


def pools_on(config: ClusterConfig, node: Mapping[str, float]) -> tuple[PoolName, ...]:
    """Return the pools one of whose instances, or a part of one, a node with these resources in all could hold."""
    return tuple(
        pool.name
        for pool in pools_of(config)
        if pool.num_instances and _num_bundles(node, bundles_of(config, pool.parallel)[0])
    )


def most_kv_bytes(config: ClusterConfig, node: Mapping[str, float]) -> int:
    """Return the shared memory for KV on a node with these resources in all, where it has as many decode instances, or as many
    bundles of instances that may be on several hosts, as it could hold."""
    bundles, pool = bundles_of(config, config.decode), config.decode
    held = min(config.decode_instances * len(bundles), _num_bundles(node, bundles[0]))
    if pool.hosts == 1:
        held -= held % len(bundles)
    return held * config.engine.kv_bytes // len(bundles)


def _num_bundles(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return how many of them a node could hold. One with several GPUs holds no instance that shares a card: which one that is
    would be for Ray to say."""
    if bundle.get("GPU", 1) < 1 < node.get("GPU", 0):
        return 0
    return min(int(node.get(name, 0) / amount + 1e-9) for name, amount in bundle.items())


def check_overrides(deployment: str, given: Mapping[str, Any], pool: ParallelConfig) -> None:
    """Check what a Serve file says of a pool whose instances have several ranks. Raises ConfigError."""
    options = given.get("ray_actor_options")
    if options is not None and (options.get("num_cpus", 1) or options.get("num_gpus")):
        raise ConfigError(
            f"{deployment}: its {pool.num_ranks} ranks ask for CPUs and GPUs by placement_group_bundles: "
            "set num_cpus: 0 in ray_actor_options, and no num_gpus"
        )
    if bundles := given.get("placement_group_bundles"):
        shares(bundles, pool.num_ranks)
        strategy = strategy_of(pool)
        if len(bundles) > 1 and given.get("placement_group_strategy") != strategy:
            raise ConfigError(
                f"{deployment}: an instance's ranks may be on {pool.hosts} host{'s'[: pool.hosts - 1]}: "
                f"set placement_group_strategy: {strategy}"
            )


def shares(bundles: Sequence[Mapping[str, float]], num_ranks: int) -> list[BundleShare]:
    """Return the ranks' shares, equal within a bundle. Raises ConfigError for bundles that cannot be shared so."""
    if not bundles or num_ranks % len(bundles):
        raise ConfigError(
            f"placement_group_bundles: {num_ranks} ranks cannot be spread evenly over {len(bundles)} bundles"
        )
    in_each = num_ranks // len(bundles)
    gpus = {bundle.get("GPU", 0) for bundle in bundles}
    num_gpus, rest = divmod(min(gpus), in_each)
    if len(gpus) > 1 or rest or num_gpus > 1:
        raise ConfigError(
            f"placement_group_bundles: the {in_each} ranks in each bundle need a GPU each, or none of them any"
        )
    return [
        BundleShare(index, int(bundle.get("CPU", 0) / in_each * _GRAIN) / _GRAIN, int(num_gpus))
        for index, bundle in enumerate(bundles)
        for _ in range(in_each)
    ]

"""A prefill and a decode instance on one card (ADR 046): what a process of such an instance sees to before it uses CUDA."""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import ray

from core.config.cluster_config import ClusterConfig
from core.config.pools import PoolName
from core.errors import ConfigError
from device.mps import bound_processors


def node_resources() -> Mapping[str, float]:
    """Return what the Ray node of this process has in all."""
    own = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()
    return next((node["Resources"] for node in nodes if node["NodeID"] == own), {})


def take_share(
    config: ClusterConfig,
    name: PoolName,
    env: MutableMapping[str, str],
    node: Callable[[], Mapping[str, float]] = node_resources,
) -> None:
    """Bound this process, whose environment `env` is, to its share of the card's processors, where it shares one. Raises
    ConfigError."""
    pool = config.prefill if name == "prefill" else config.decode
    if not pool.shares_card:
        return
    if (num_gpus := node().get("GPU", 0)) > 1:
        raise ConfigError(
            f"{name}.gpu_share is {pool.gpu_share:g}, and this Ray node has {num_gpus:g} GPUs, on which Ray might put two "
            "instances of one role together: start a Ray node for each card (CUDA_VISIBLE_DEVICES=N ray start --num-gpus 1)"
        )
    bound_processors(pool.most_sms, f"{name}.sm_share", env)

"""The memory model over every example: an instance of each pool fits the device that its pods have, with KV for a whole context."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.deploy.kube.worker_groups import offered_resources
from core.config.cluster_config import ClusterConfig
from core.config.pools import PoolName
from core.cost.memory_model import DeviceMemory
from engine.sizing.model_dims import mesh_of
from engine.sizing.pool_size import PoolSize, RankMemory, size_pool
from models.files.hub import resolve
from sim.catalogue.catalogue import GPUS
from tests.charts.rendering import (
    EXAMPLES,
    asked_of,
    cluster_spec,
    container,
    deployed_pools,
    example,
    serve_config,
)
from tests.models.real_configs import write_config

UNITS = {"Gi": 2**30, "Ti": 2**40}


def pools(name: str) -> list[tuple[ClusterConfig, PoolName, dict[str, Any], dict[str, Any]]]:
    """(a model's configuration, role, deployment, worker group) of each pool of each model."""
    objects = example(name)
    groups = cluster_spec(objects)["workerGroupSpecs"]
    return [
        (config, role, deployment, group)
        for application in serve_config(objects)["applications"]
        for models, role, deployment in deployed_pools(application)
        for config in models.rows
        for group in groups
        if set(asked_of(deployment)) & set(offered_resources(group))
    ]


def memory_in(group: dict[str, Any], num_gpus: float, num_ranks: int) -> RankMemory:
    """Eighty-gigabyte H100s, where an example names no other product."""
    limits = container(group["template"])["resources"].get("limits", {})
    if num_gpus:  # Superchips have the GPU's memory.
        product = group["template"]["spec"].get("nodeSelector", {}).get("nvidia.com/gpu.product", "H100")
        size = int(GPUS[product.removeprefix("NVIDIA-").removeprefix("G").partition("-")[0]].memory_bytes)
        memory = DeviceMemory(name=product, total_bytes=size, free_bytes=size, is_host=False)
        return RankMemory(devices=(memory,) * num_ranks, card_share=min(1.0, num_gpus))
    number = str(limits.get("memory", "16Gi"))
    size = int(number[:-2]) * UNITS[number[-2:]]
    memory = DeviceMemory(name="the pod", total_bytes=size, free_bytes=size, is_host=True)
    sharers = max(int(amount) for amount in offered_resources(group).values())
    return RankMemory(devices=(memory,) * num_ranks, num_sharers=sharers)


def size_of(
    config: ClusterConfig, role: PoolName, deployment: dict[str, Any], group: dict[str, Any], folder: Path
) -> PoolSize:
    parallel = getattr(config, role)
    num_gpus = asked_of(deployment).get("GPU", 0)
    path = config.model.path
    return size_pool(
        resolve("embedded") if path == "embedded" else write_config(folder / path.strip("/"), path),
        config.model,
        config.engine,
        mesh_of(parallel),
        device=torch.device("cuda" if num_gpus else "cpu"),
        found=memory_in(group, num_gpus, parallel.num_ranks),
    )


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "ray-cluster"])
def test_an_instance_of_each_pool_of_an_example_fits_and_holds_a_whole_context(
    tmp_path: Path, name: str
) -> None:
    found = pools(name)
    assert found
    for config, role, deployment, group in found:
        size = size_of(config, role, deployment, group, tmp_path)
        tokens = size.num_blocks * config.engine.block_size
        assert tokens >= size.max_context_tokens, f"{config.model.path}, {deployment['name']}"

"""What `baton doctor` says of a pod's memory limit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.preflight import pod_memory as module
from cluster.preflight.findings import Verdict
from cluster.preflight.pod_memory import PROCESS_BYTES, check_pod, memory_of, pod_memory
from core.config.cluster_config import ClusterConfig, load
from core.config.pools import Pool, pools_of
from core.config.residency_groups import Colocation, colocations_of, part_of
from core.cost.memory_model import DeviceMemory
from core.errors import ConfigError
from engine.sizing.devices import host_memory
from engine.sizing.model_dims import mesh_of
from engine.sizing.pool_size import RankMemory, size_pool
from tests.models.real_configs import write_config

QWEN = "Qwen/Qwen3-8B"


@pytest.fixture(autouse=True)
def qwen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = write_config(tmp_path / "qwen", QWEN)
    monkeypatch.setattr(module, "describe", lambda path: folder if path == QWEN else Path(path))
    return folder


def config_of(**values: object) -> ClusterConfig:
    return load(None, {}, {"model.path": QWEN, **values})


def pool(config: ClusterConfig, name: str) -> Pool:
    [found] = [each for each in pools_of(config) if each.name == name]
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_a_cpu_pod_at_the_floor_holds_the_model_and_one_whole_context(qwen: Path, tp: int) -> None:
    config = config_of(**{"decode.tp": tp, "model.dtype": "bfloat16"})
    decode = pool(config, "decode")
    needed = pod_memory(config, [decode], 1, on_gpus=False)
    left = needed.num_bytes - sum(size for what, size in needed.parts if "processes" in what or "Ray" in what)
    memory = DeviceMemory(name="pod", total_bytes=left, free_bytes=left, is_host=True)
    size = size_pool(
        qwen,
        config.model,
        config.engine,
        mesh_of(decode.parallel),
        device=torch.device("cpu"),
        found=RankMemory(devices=(memory,) * tp, num_sharers=tp),
    )
    assert size.num_blocks * config.engine.block_size >= size.max_context_tokens


def test_everything_that_an_instance_keeps_in_host_memory_is_counted() -> None:
    base = config_of(**{"engine.kv_bytes": 4 << 30})
    small = pod_memory(base, [pool(base, "decode")], 1, on_gpus=False).num_bytes
    cached = config_of(**{"engine.kv_bytes": 4 << 30, "engine.host_cache_bytes": 3 << 30})
    assert pod_memory(cached, [pool(cached, "decode")], 1, on_gpus=False).num_bytes - small == 3 << 30
    larger = config_of(**{"engine.kv_bytes": 6 << 30})
    assert pod_memory(larger, [pool(larger, "decode")], 1, on_gpus=False).num_bytes - small == pytest.approx(
        2 << 30, rel=0.01
    )
    two = pod_memory(base, [pool(base, "decode")], 2, on_gpus=False).num_bytes
    assert two - small == pytest.approx(small - (1 << 30), rel=0.01), "all but what Ray takes"
    both = pod_memory(base, pools_of(base), 1, on_gpus=False).num_bytes
    assert both > small + (4 << 30)


@pytest.mark.parametrize(("folder", "copies"), [("auto", 4), ("none", 4), ("/models/packed", 1)])
def test_instances_whose_folder_of_packed_weights_is_named_have_one_copy(folder: str, copies: int) -> None:
    config = config_of(**{"engine.kv_bytes": 4 << 30, "model.packed_cache": folder})
    one = dict(pod_memory(config, [pool(config, "decode")], 1, on_gpus=False).parts)["of weights"]
    all_four = dict(pod_memory(config, pools_of(config), 2, on_gpus=False).parts)["of weights"]
    assert all_four == pytest.approx(copies * one, rel=1e-6)


def test_pools_whose_weights_are_cut_otherwise_have_a_copy_each() -> None:
    config = config_of(**{"engine.kv_bytes": 4 << 30, "model.packed_cache": "/models/packed", "decode.tp": 2})
    one = dict(pod_memory(config, [pool(config, "prefill")], 1, on_gpus=False).parts)["of weights"]
    both = dict(pod_memory(config, pools_of(config), 2, on_gpus=False).parts)["of weights"]
    assert both == pytest.approx(2 * one, rel=0.01)


def test_weights_and_kv_of_gpus_are_not_in_the_pods_memory() -> None:
    config = config_of(**{"engine.kv_bytes": 16 << 30, "decode.tp": 4})
    on_device = pod_memory(config, [pool(config, "decode")], 1, on_gpus=True)
    assert dict(on_device.parts)["of weights"] == dict(on_device.parts)["for KV"] == 0
    assert dict(on_device.parts)["of processes"] > 4 * PROCESS_BYTES


def test_a_limit_that_is_too_small_is_refused_with_the_one_that_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(**{"engine.kv_bytes": 4 << 30})
    [models] = colocations_of(config)
    needed = memory_of(models, ["decode"], 1, on_gpus=False)
    enough = replace(host_memory(), total_bytes=needed.num_gib << 30)
    monkeypatch.setattr(module, "host_memory", lambda: enough)
    assert check_pod("pod", models, ["decode"], 1, on_gpus=False).verdict is Verdict.OK
    monkeypatch.setattr(module, "host_memory", lambda: replace(enough, total_bytes=8 << 30))
    found = check_pod("pod", models, ["decode"], 1, on_gpus=False)
    assert found.verdict is Verdict.FAIL
    assert found.measured == "the pod may use 8.00 GiB"
    assert f"limit of {needed.num_gib}Gi" in found.fix
    assert "GiB of weights" in found.expected


def test_a_model_that_cannot_be_described_is_left_to_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    config = load(None, {}, {"model.path": "/nowhere/model"})
    found = check_pod("pod", colocations_of(config)[0], ["decode"], 1, on_gpus=False)
    assert found.verdict is Verdict.SKIP
    assert "/nowhere/model" in found.measured


def group_of(level: int, awake: int) -> Colocation:
    """Three models of which two are large, with host memory for KV."""
    residency = {"mode": "on_demand", "group": "card", "level": level}
    engine = {"kv_bytes": 4 << 30, "host_cache_bytes": 1 << 30}
    row = {"path": QWEN, "schedule": {"residency": residency}, "engine": engine, "prefill_instances": 0}
    small = {**row, "path": "models/embedded"}
    models = {"a": row, "b": row, "c": small}
    config = load({"models": models, "residency_groups": {"card": {"awake_models": awake}}}, {})
    [found] = colocations_of(config)
    return found


def test_a_pod_of_a_group_has_memory_for_the_largest_models_that_may_be_awake() -> None:
    group = group_of(level=2, awake=1)
    alone = [pod_memory(row, [pool(row, "decode")], 1, on_gpus=False) for row in group.rows]
    one = memory_of(group, ["decode"], 1, on_gpus=False).num_bytes
    assert one == alone[0].num_bytes + (2 << 30), "the others sleep, and keep KV in host memory"
    two = memory_of(group_of(level=2, awake=2), ["decode"], 1, on_gpus=False).num_bytes
    weights_and_pool = alone[0].num_bytes - PROCESS_BYTES - module.NODE_BYTES - (1 << 30)
    assert two == one + weights_and_pool, "the two large ones at once, in one process"
    twice = memory_of(group, ["decode"], 2, on_gpus=False).num_bytes
    assert twice == 2 * one - module.NODE_BYTES


@pytest.mark.parametrize("on_gpus", [False, True])
def test_models_that_sleep_at_level_1_keep_their_weights_in_host_memory(on_gpus: bool) -> None:
    [light, deep] = (
        memory_of(group_of(level, awake=1), ["decode"], 1, on_gpus=on_gpus).num_bytes for level in (1, 2)
    )
    assert light - deep > 15 << 30, "8.2 B parameters of two bytes, of one model at least"


def test_the_models_of_a_group_are_found_by_its_name() -> None:
    group = group_of(level=2, awake=1)
    rows = {row.model.name: {"path": row.model.path} for row in group.rows}
    config = load({"models": {**rows, "d": {"path": QWEN}}}, {})
    assert list(part_of(config, "d").models) == ["d"]
    with pytest.raises(
        ConfigError, match="'e' is no row of models and no group of rows; these are: a, b, c, d"
    ):
        part_of(config, "e")
    with pytest.raises(ConfigError, match="no row"):
        part_of(load(None, {}), "baton-embedded")

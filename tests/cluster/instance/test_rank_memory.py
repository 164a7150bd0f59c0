"""Where the pools of several ranks lie: on their GPUs, beside memory servers, or in an instance's own process without them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.instance import rank_memory
from cluster.instance.rank_memory import memory_in_process, memory_of_replica
from core.config.cluster_config import EngineConfig, ModelConfig, load
from core.cost.memory_model import DeviceMemory
from core.errors import ConfigError
from engine.ranks.rank import Rank, Spawner
from engine.ranks.rank_messages import RankSetup
from engine.sizing.pool_size import RankMemory, size_pool
from parallel.mesh import Mesh
from tests.models.checkpoints import CPU, FAMILIES, make

GPU = DeviceMemory(name="a GPU", total_bytes=80 << 30, free_bytes=79 << 30, is_host=False)


def never(setups: Sequence[RankSetup], deadline_s: float) -> list[Rank]:
    raise AssertionError("nothing is started")


def test_pools_on_gpus_leave_room_for_memory_servers_and_ask_nothing_of_the_host() -> None:
    config = load(None, {}, {"decode.tp": 2})
    spawner = Spawner(never, ("cuda:0", "cuda:1"), (GPU, GPU))
    kept = memory_of_replica(config, "decode", config.decode, spawner)
    assert (kept.on_device, kept.most_pool_bytes) == (True, None)
    left = replace(GPU, total_bytes=GPU.total_bytes - (512 << 20), free_bytes=GPU.free_bytes - (512 << 20))
    assert kept.devices == (left, left)


def test_several_gpus_of_one_process_have_their_pools_to_themselves() -> None:
    config = load(None, {}, {"decode.tp": 2, "prefill_instances": 0})
    spawner = Spawner(never, ("cuda:0", "cuda:1"), (GPU, GPU))
    found = memory_in_process(config, config.decode, spawner)
    assert (found.on_device, found.devices) == (True, (GPU, GPU))


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"prefill_instances": 1}, "a hand-over among 2 instances"),
        ({"decode_instances": 3}, "a hand-over among 3 instances"),
        ({"engine.host_cache_bytes": 1 << 20}, "engine.host_cache_bytes"),
        ({"engine.disk_cache_bytes": 1 << 20, "engine.disk_cache_path": "/x"}, "engine.disk_cache_bytes"),
    ],
)
def test_where_others_would_read_them_one_process_with_several_gpus_is_refused(
    keys: dict[str, object], what: str
) -> None:
    config = load(None, {}, {"decode.tp": 2, "prefill_instances": 0, **keys})
    spawner = Spawner(never, ("cuda:0", "cuda:1"), (GPU, GPU))
    with pytest.raises(ConfigError, match=f"{what} needs memory servers .* serve without --local"):
        memory_in_process(config, config.decode, spawner)


def test_where_it_is_known_how_many_instances_share_a_host_they_share_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod of Kubernetes has its own, and sees the processors of its whole node."""
    monkeypatch.setattr(rank_memory, "host_cpus", lambda: 64)
    config = load(None, {}, {"decode_instances": 16, "decode.tp": 2, "transfer.transport": "tcp"})
    found = [
        memory_of_replica(config, "decode", config.decode, None, num_instances=number).num_sharers
        for number in (0, 1, 3)
    ]
    assert found == [33, 2, 6]


@pytest.mark.parametrize(("keys", "alike"), [({}, 2), ({"decode.tp": 2}, 1), ({"decode_instances": 3}, 4)])
def test_instances_whose_weights_are_cut_alike_have_one_copy_of_them(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, int], alike: int
) -> None:
    monkeypatch.setattr(rank_memory, "host_cpus", lambda: 64)
    config = load(None, {}, {"engine.device": "cpu", "transfer.transport": "tcp"} | keys)
    assert memory_of_replica(config, "decode", config.decode, None).num_alike == alike


def test_instances_on_one_card_have_a_share_of_it_each_but_not_within_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_memory, "choose_device", torch.device)
    monkeypatch.setattr(rank_memory, "memory_of", lambda _: GPU)
    keys = {"engine.device": "cuda", "prefill.gpu_share": 0.4, "decode.gpu_share": 0.6}
    config = load(None, {}, keys)
    shares = [
        memory_of_replica(config, role, parallel, None).card_share
        for role, parallel in (("prefill", config.prefill), ("decode", config.decode))
    ]
    assert shares == [0.4, 0.6]
    with pytest.raises(ConfigError, match="gpu_share is 0.6: instances within one process"):
        memory_in_process(config, config.decode, None)


def test_shared_memory_is_refused_for_pools_on_gpus() -> None:
    with pytest.raises(ConfigError, match="shm moves host memory.*use auto, tcp, cuda_ipc, nixl or nccl"):
        load(None, {}, {"engine.device": "cuda", "transfer.transport": "shm"})


def test_each_rank_on_a_gpu_has_a_memory_of_its_own_with_the_instances_blocks(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["llama"](random.Random(3), 0), seed=1)
    sizes = [
        size_pool(
            tmp_path,
            ModelConfig(),
            EngineConfig(block_size=4, num_blocks=30),
            Mesh(tp=2),
            device=CPU,
            found=RankMemory(devices=(GPU, GPU), on_device=on_device),
        )
        for on_device in (True, False)
    ]
    assert [[pool.memory for pool in size.pools] for size in sizes] == [[1, 2], [0, 0]]
    assert [pool.base_bytes for pool in sizes[0].pools] == [0, 0]
    assert [(size.num_blocks, size.pools[0].num_blocks) for size in sizes] == [(30, 31), (30, 30)]

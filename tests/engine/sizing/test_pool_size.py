"""How large pools are that nobody has sized, and what is refused before a weight is read: there is none in these folders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.config.cluster_config import EngineConfig, ModelConfig
from core.cost.memory_model import GPU_RESERVE_BYTES, DeviceMemory, RankNeeds, Sharing, check_fit, kv_room
from core.errors import ConfigError
from engine.sizing.devices import host_cores, host_memory
from engine.sizing.pool_size import PoolSize, RankMemory, size_pool
from kernels.cpu.library import native
from parallel.mesh import ONE_RANK, Mesh
from tests.models.real_configs import write_config

GIB = 1 << 30
H100 = DeviceMemory(name="H100", total_bytes=80 * GIB, free_bytes=80 * GIB, is_host=False)
HOST_GIB = r"29\.3" if native() is not None else r"30\.5"
"""What Qwen3-8B's weights take in float32; native kernels keep its embedding in 16 bits."""
HOST = DeviceMemory(name="this host", total_bytes=64 * GIB, free_bytes=40 * GIB, is_host=True)


def sized(
    folder: Path, memory: DeviceMemory, mesh: Mesh = ONE_RANK, *, sharers: int = 1, most: int | None = None,
    kept: bool = False, **keys: Any,
) -> PoolSize:  # fmt: skip
    """Qwen3-8B's, whose token takes 36 layers of 8 heads of K and V: 288 KiB in float32, 144 KiB in bfloat16."""
    return size_pool(
        write_config(folder, "Qwen/Qwen3-8B"),
        # What `auto` keeps on a host depends on whether there are native kernels, which keep an embedding in 16 bits in any case.
        ModelConfig(dtype="float32" if memory.is_host else "auto"),
        EngineConfig(**keys),
        mesh,
        device=torch.device("cpu" if memory.is_host else "cuda"),
        found=RankMemory(
            devices=(memory,) * mesh.size, num_sharers=sharers, most_pool_bytes=most, on_device=kept
        ),
    )


def test_a_gpus_pool_is_what_weights_and_the_largest_step_leave(tmp_path: Path) -> None:
    size = sized(tmp_path, H100)
    left = 72 * GIB - GPU_RESERVE_BYTES - size.needs[0].num_bytes
    assert left - 16 * 144 * 1024 < size.num_bytes <= left
    assert size.needs[0].weight_bytes == pytest.approx(16.4e9, rel=0.01)
    assert sized(tmp_path, H100, memory_utilization=0.5).num_bytes < size.num_bytes - 30 * GIB


def test_two_instances_have_a_card_between_them_and_what_does_not_fit_a_share_is_said(tmp_path: Path) -> None:
    shares = [RankMemory(devices=(H100,), on_device=True, card_share=share) for share in (0.4, 0.6, 0.2)]

    def of(found: RankMemory) -> PoolSize:
        folder = write_config(tmp_path, "Qwen/Qwen3-8B")
        return size_pool(folder, ModelConfig(), EngineConfig(), device=torch.device("cuda"), found=found)

    taken = [of(found) for found in shares[:2]]
    whole = sum(size.num_bytes + size.needs[0].num_bytes + GPU_RESERVE_BYTES for size in taken)
    assert 71.9 * GIB < whole <= 72 * GIB
    with pytest.raises(ConfigError) as refused:
        of(shares[2])
    assert (
        "0.9 of its 80.00 GiB (engine.memory_utilization), of which this instance has 0.2 (gpu_share)"
        in str(refused.value)
    )
    assert "are more than 12.40 GiB" in str(refused.value)
    assert "Use a larger gpu_share, a larger device or quantised weights" in str(refused.value)


def test_ranks_have_equally_many_blocks_and_more_together(tmp_path: Path) -> None:
    whole, cut = sized(tmp_path, H100), sized(tmp_path, H100, Mesh(tp=2))
    assert len({pool.num_blocks for pool in cut.pools}) == 1
    assert cut.num_blocks > 2 * whole.num_blocks


@pytest.mark.parametrize("mesh", [ONE_RANK, Mesh(tp=2)], ids=str)
def test_a_pool_on_a_gpu_has_a_block_of_nobody_for_rows_that_only_fill_up_a_captured_step(
    mesh: Mesh, tmp_path: Path
) -> None:
    for keys in ({}, {"num_blocks": 100}):
        size = sized(tmp_path, H100, mesh, kept=True, **keys)
        assert {pool.num_blocks for pool in size.pools} == {size.num_blocks + 1}
        assert size.pools[0].num_bytes <= 72 * GIB - GPU_RESERVE_BYTES - size.needs[0].num_bytes


def test_a_host_keeps_half_of_what_is_free_for_others_and_shares_the_rest(tmp_path: Path) -> None:
    host = replace(HOST, total_bytes=100 * GIB, free_bytes=80 * GIB)
    alone = sized(tmp_path, host)
    left = 72 * GIB - alone.needs[0].num_bytes
    assert left / 2 - 16 * 288 * 1024 < alone.num_bytes <= left / 2
    both = sized(tmp_path, host, sharers=2)
    assert both.num_bytes == pytest.approx((45 * GIB - both.needs[0].num_bytes) / 2, rel=0.01)


def test_an_instance_that_starts_last_has_its_share_still(tmp_path: Path) -> None:
    """Three on a host of 144 GiB: two have started and taken weights, steps and pools."""
    host = replace(HOST, total_bytes=144 * GIB, free_bytes=144 * GIB)
    first = sized(tmp_path, host, sharers=3)
    taken = first.needs[0].num_bytes + first.num_bytes
    last = sized(tmp_path, replace(host, free_bytes=host.free_bytes - 2 * taken), sharers=3)
    assert last.num_bytes == first.num_bytes
    # An instance beside them whose pool's size is said needs no more than what is free.
    sized(tmp_path, replace(host, free_bytes=32 * GIB), sharers=3, kv_bytes=GIB // 2)
    with pytest.raises(ConfigError, match=r"more than 16\.00 GiB, its free memory among 2 ranks"):
        sized(tmp_path, replace(host, free_bytes=32 * GIB), Mesh(tp=2), sharers=3, kv_bytes=4 * GIB)


def test_memory_beside_the_device_limits_the_pool(tmp_path: Path) -> None:
    size = sized(tmp_path, H100, most=GIB)
    assert GIB - 16 * 144 * 1024 < size.num_bytes <= GIB


def test_no_more_blocks_than_all_sequences_need_at_their_longest(tmp_path: Path) -> None:
    size = sized(tmp_path, replace(HOST, total_bytes=900 * GIB, free_bytes=900 * GIB), max_num_seqs=2)
    assert size.num_blocks == 2 * 40960 // 16


@pytest.mark.parametrize("keys", [{"num_blocks": 100}, {"kv_bytes": 100 * 16 * 144 * 1024}])
def test_what_the_configuration_says_wins(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert sized(tmp_path, H100, **keys).num_blocks == 100


@pytest.mark.parametrize(
    ("memory", "keys", "why"),
    [
        (replace(H100, total_bytes=16 * GIB), {}, r"15\.2\d GiB of weights, .* more than 12\.40 GiB"),
        (replace(H100, free_bytes=10 * GIB), {}, r"more than 8\.00 GiB, .*with 10\.00 GiB free"),
        (H100, {"kv_bytes": 80 * GIB}, r"80\.00 GiB of KV are more than 70\.00 GiB.*lower engine\.kv_bytes"),
        (
            replace(HOST, free_bytes=20 * GIB),
            {},
            rf"{HOST_GIB}\d GiB of weights.*20\.00 GiB, its free memory",
        ),
        (HOST, {"num_blocks": 1}, r"num_blocks of 1 holds 1 blocks"),
        (HOST, {"kv_bytes": 1}, r"kv_bytes of 1 holds 0 blocks"),
    ],
)
def test_what_cannot_fit_is_refused_with_its_numbers(
    tmp_path: Path, memory: DeviceMemory, keys: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        sized(tmp_path, memory, **keys)


@given(
    memory=st.builds(
        DeviceMemory,
        name=st.just("any"),
        total_bytes=st.integers(0, 1 << 40),
        free_bytes=st.integers(0, 1 << 40),
        is_host=st.booleans(),
    ),
    needs=st.builds(RankNeeds, weight_bytes=st.integers(0, 1 << 38), step_bytes=st.integers(0, 1 << 36)),
    utilization=st.floats(0.05, 1),
    sharing=st.builds(Sharing, st.integers(1, 8), st.integers(1, 8)),
)
def test_a_pool_that_the_memory_model_has_sized_always_fits(
    memory: DeviceMemory, needs: RankNeeds, utilization: float, sharing: Sharing
) -> None:
    if room := kv_room(memory, needs, utilization, sharing):
        check_fit(memory, needs, room, utilization, sharing)


def test_ranks_share_the_physical_cores_that_they_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen processors are two packages of four cores of two threads; this process may run on those of the first one and a core
    of the second, and its container has four processors' worth of time."""
    for number in range(16):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "core_id").write_text(f"{number // 2 % 4}\n")
        (topology / "physical_package_id").write_text(f"{number // 8}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(10)))
    assert host_cores(tmp_path) == 5
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "cpu.max").write_text("400000 100000\n")
    assert host_cores(tmp_path) == 4
    (group / "cpu.max").write_text("max 100000\n")
    assert host_cores(tmp_path) == 5


@pytest.mark.parametrize(("sharers", "threads"), [(1, 5), (2, 2), (8, 1)])
def test_each_rank_has_its_share_of_the_cores_or_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharers: int, threads: int
) -> None:
    monkeypatch.setattr("engine.sizing.pool_size.host_cores", lambda: 5)
    monkeypatch.delenv("BATON_MAX_THREADS")
    host = replace(HOST, total_bytes=900 * GIB, free_bytes=900 * GIB)
    assert sized(tmp_path, host, sharers=sharers).num_threads == threads
    assert sized(tmp_path, host, sharers=sharers, num_threads=3).num_threads == 3
    assert sized(tmp_path, H100).num_threads == 1


def test_no_rank_has_more_threads_than_the_environment_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sizing.pool_size.host_cores", lambda: 5)
    host = replace(HOST, total_bytes=900 * GIB, free_bytes=900 * GIB)
    monkeypatch.setenv("BATON_MAX_THREADS", "2")
    assert [sized(tmp_path, host, sharers=sharers).num_threads for sharers in (1, 4)] == [2, 1]
    assert sized(tmp_path, host, sharers=1, num_threads=3).num_threads == 3
    monkeypatch.setenv("BATON_MAX_THREADS", "all")
    with pytest.raises(ConfigError, match="BATON_MAX_THREADS is 'all': it must be a number of threads"):
        sized(tmp_path, host, sharers=1)


def test_ranks_with_one_copy_of_their_weights_count_their_part_of_it() -> None:
    """The free memory has room for all of it beside each rank's pool, since the system takes mapped files to be free."""
    host = replace(HOST, total_bytes=100 * GIB, free_bytes=100 * GIB)
    needs = RankNeeds(weight_bytes=20 * GIB, step_bytes=GIB)
    alone = kv_room(host, needs, 1.0, Sharing(num_ranks=4))
    alike = kv_room(host, needs, 1.0, Sharing(num_ranks=4, num_alike=4))
    assert (alone, alike) == (4 * GIB // 2, 19 * GIB // 2)
    full = replace(host, free_bytes=23 * GIB)
    assert kv_room(full, needs, 1.0, Sharing(num_ranks=4, num_alike=4)) == GIB


def test_a_host_has_what_its_control_groups_allow(tmp_path: Path) -> None:
    """The container's group is two below the one that has the limit."""
    group = tmp_path / "sys/fs/cgroup/pod/container"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/container\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
    (group / "memory.max").write_text("max\n")
    whole = host_memory(tmp_path)
    assert (whole.total_bytes, whole.free_bytes) == (1 << 30, 1 << 29)
    (group.parent / "memory.max").write_text(f"{300 << 20}\n")
    (group.parent / "memory.current").write_text(f"{200 << 20}\n")
    cached = f"anon 5\ninactive_file {20 << 20}\nactive_file {30 << 20}\nworkingset_nodes 7\n"
    (group.parent / "memory.stat").write_text(cached)
    limited = host_memory(tmp_path)
    assert (limited.total_bytes, limited.free_bytes) == (300 << 20, 150 << 20)

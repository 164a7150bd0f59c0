"""Instances of several ranks sleep and wake up as one, wherever their ranks and their pools are."""

from pathlib import Path
from typing import Any

import pytest

from cluster.local import LocalCluster
from tests.parallel import device_world, hosts_world
from tests.parallel.forked_ranks import forked_ranks
from tests.parallel.test_served import answers, checkpoint, forked, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SLEEPY = {"schedule.residency.mode": "manual"}


async def sleeps_and_wakes(cluster: LocalCluster, prompts: Any, want: Any, num_ranks: int) -> None:
    """`num_ranks`: how many processes must be there while it serves."""
    model = cluster.frontend.model_sleep
    assert await answers(cluster, prompts) == want
    for level in (1, 2):
        await model.sleep(level, pauses=False, timeout_s=30, drops=False)
        assert not cluster.instances
        await model.wake()
        assert await answers(cluster, prompts) == want
        for instance in cluster.instances:
            instance.check_integrity()
            assert not instance.num_grants
    assert len(forked_ranks()) == num_ranks


@forked
@pytest.mark.parametrize(
    ("family", "keys", "num_ranks"),
    [
        pytest.param("llama", {"prefill.tp": 2, "decode.pp": 2}, 4, id="tp2 to pp2"),
        pytest.param("mixtral", {"prefill_instances": 0, "decode.ep": 2}, 2, id="ep2"),
    ],
)
async def test_ranks_in_processes_end_for_a_sleep_and_start_again(
    family: str, keys: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    prompts, want = checkpoint(tmp_path, family)
    async with LocalCluster.running(settings(tmp_path, **keys, **SLEEPY)) as cluster:
        await sleeps_and_wakes(cluster, prompts, want, num_ranks)
    assert not forked_ranks()


async def test_ranks_on_several_hosts_sleep_and_wake_up_with_their_memory_servers(tmp_path: Path) -> None:
    prompts, want = checkpoint(tmp_path)
    config = settings(tmp_path, **{"prefill.tp": 2, "decode.pp": 2}, **SLEEPY)
    async with hosts_world.running(config) as cluster:
        await sleeps_and_wakes(cluster, prompts, want, 4)
        assert len(hosts_world.memory_servers()) == 1
    assert not forked_ranks()
    assert not hosts_world.memory_servers()


async def test_pools_on_devices_are_given_back_and_taken_anew(tmp_path: Path) -> None:
    """The devices are simulated. They find what is not waited for."""
    folder, notes = tmp_path / "model", tmp_path / "notes"
    notes.mkdir()
    prompts, want = checkpoint(folder)
    config = settings(folder, **{"prefill.tp": 2, "decode.tp": 2, "transfer.transport": "tcp"}, **SLEEPY)
    async with device_world.running(config, notes) as cluster:
        await sleeps_and_wakes(cluster, prompts, want, 0)
        assert len(device_world.processes("rank")) == len(device_world.processes("memory")) == 4
    assert not device_world.processes("rank")
    assert not device_world.unordered(notes)

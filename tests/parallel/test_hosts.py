"""Instances whose stages are on several hosts: the tokens are transformers' own, and a memory server's end is its instance's."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.parallel.hosts_world import memory_servers, running
from tests.parallel.test_served import answers, checkpoint, fails, ranks, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

MESHES = [
    pytest.param({"prefill.pp": 2}, id="prefill on two hosts"),
    pytest.param({"decode.pp": 2}, id="decode on two hosts"),
    pytest.param({"prefill.pp": 3, "decode.pp": 2, "prefill.hosts": 3}, id="on three hosts, to two"),
]


def segments(pids: set[int]) -> list[str]:
    """KV segments in shared memory of these processes."""
    found = [path.name for path in Path("/dev/shm").glob("baton-kv-*")]
    return [name for name in found if int(name.split("-")[2]) in pids]


@pytest.mark.parametrize("keys", MESHES)
async def test_tokens_equal_transformers_also_when_a_keeper_is_killed(
    keys: dict[str, int], tmp_path: Path
) -> None:
    prompts, want = checkpoint(tmp_path)
    role = "prefill" if "prefill.pp" in keys else "decode"
    counts = {"prefill_instances": 1, "decode_instances": 1 if role == "prefill" else 2}
    async with running(settings(tmp_path, **keys, **counts)) as cluster:
        assert await answers(cluster, prompts) == want
        assert await answers(cluster, prompts) == want, "with prefixes cached"
        for instance in cluster.instances:
            instance.check_integrity()
            assert not instance.num_grants
        handed_over = [instance for instance in cluster.instances if instance.role == "decode"]
        assert sum(instance.work_counts().grants for instance in handed_over), "nothing was handed over"
        pids = {os.getpid(), *(memory_server.pid for memory_server in memory_servers())}
        victim = cluster.instances[-1 if role == "prefill" else 0]
        memory_server = memory_servers()[-1 if role == "prefill" else 0]
        others = [tuple(reversed(prompt)) for prompt in prompts]
        alone = await answers(cluster, others)
        running_now = asyncio.create_task(answers(cluster, prompts))
        await asyncio.sleep(0.02)
        memory_server.send_signal(signal.SIGKILL)
        await fails(victim)
        assert "the memory server of host" in str(victim.failure)
        assert "was killed by SIGKILL" in str(victim.failure)
        assert await running_now == want, "what it held goes on elsewhere"
        assert await answers(cluster, others) == alone, "the others serve on"
    assert ranks() == memory_servers() == []
    assert segments(pids) == []


async def test_a_keeper_that_is_stopped_is_lost_too(tmp_path: Path) -> None:
    prompts, want = checkpoint(tmp_path)
    keys = {"prefill.pp": 2, "mail.peer_timeout_s": 2.0, "mail.heartbeat_s": 0.2}
    async with running(settings(tmp_path, **keys)) as cluster:
        assert await answers(cluster, prompts) == want
        memory_servers()[0].send_signal(signal.SIGSTOP)
        await fails(cluster.instances[-1])
        assert "has not answered for 2 s" in str(cluster.instances[-1].failure)
        assert await answers(cluster, prompts) == want
    assert ranks() == memory_servers() == []

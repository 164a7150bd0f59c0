"""Instances of several ranks whose pools lie on devices alone: the tokens are transformers' own, whatever ends, and nothing is left."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.device_world import processes, running, unordered
from tests.parallel.test_served import answers, checkpoint, fails, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CASES = [
    pytest.param(
        "mixtral", "cuda_ipc", {"prefill.tp": 2, "decode.dp": 2}, "rank", id="tp2 to dp2 by cuda_ipc"
    ),
    pytest.param("llama", "tcp", {"prefill.pp": 2}, "memory", id="pp2 to a host's pool by tcp"),
]


@pytest.mark.parametrize(("family", "transport", "keys", "victim"), CASES)
async def test_tokens_equal_transformers_also_when_a_rank_or_its_memory_server_is_killed(
    family: str, transport: str, keys: dict[str, Any], victim: str, tmp_path: Path
) -> None:
    prompts, want = checkpoint(tmp_path, family)
    num_ranks = sum(keys.values())
    async with running(settings(tmp_path, **keys, **{"transfer.transport": transport}), tmp_path) as cluster:
        assert len(processes("rank")) == len(processes("memory")) == num_ranks
        assert await answers(cluster, prompts) == want
        assert await answers(cluster, prompts) == want, "with prefixes cached"
        for instance in cluster.instances:
            instance.check_integrity()
            assert not instance.num_grants
        inboxes = [instance._inbox for instance in cluster.instances]  # pyright: ignore[reportPrivateUsage]
        assert sum(inbox.num_granted for inbox in inboxes if inbox), "nothing was handed over"
        prefill = cluster.instances[-1]
        running_now = asyncio.create_task(answers(cluster, prompts))
        processes(victim)[-1].send_signal(signal.SIGKILL)
        await fails(prefill)
        who = {"rank": "rank 1 of 2", "memory": "the memory server of rank 1"}[victim]
        assert who in str(prefill.failure)
        assert "was killed by SIGKILL" in str(prefill.failure)
        assert await running_now == want, "what it held goes on elsewhere"
        assert await answers(cluster, prompts) == want, "the others serve on"
    assert processes("rank") == processes("memory") == []
    assert unordered(tmp_path) == []

"""Instances of several ranks whose pools lie on devices alone: the tokens are transformers' own, whatever ends, and nothing is left."""

import asyncio
import logging
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.instance import real_parts
from cluster.local import LocalCluster
from core.reports import Status
from core.types import SamplingParams
from tests.models.served import make_served
from tests.parallel.device_world import processes, running, spawner, unordered
from tests.parallel.test_late_masks import said_by, say
from tests.parallel.test_served import SAMPLING, answer, answers, checkpoint, fails, settings
from tests.parallel.test_states_below import reports
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.turns(3)]

CASES = [
    pytest.param(
        "mixtral", "cuda_ipc", {"prefill.tp": 2, "decode.dp": 2}, "rank", id="tp2 to dp2 by cuda_ipc"
    ),
    pytest.param("llama", "tcp", {"prefill.pp": 2}, "memory", id="pp2 to a host's pool by tcp"),
]


SHORT = ((6, 8), (5, 4), (0, 11), (6, 2)), 6
"""What the interpreter computes: more than a batch of prompts, and two blocks of answers."""
SHORTLY = replace(SAMPLING, max_tokens=6, min_tokens=6)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compute by Triton's kernels, and capture."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("llama", ("tp",)),
        ("mixtral", ("ep",)),
        ("mixtral", ("pp", "dp")),
    ],
    ids=["tp2", "ep2", "pp2 x dp2"],
)
async def test_ranks_replay_steps_with_their_meetings_in_them(
    family: str, axes: tuple[str, ...], tmp_path: Path
) -> None:
    """Whichever rank launches first, and whatever each has heard of the step before: tokens stay on the devices."""
    prompts, want = checkpoint(tmp_path, family, *SHORT)
    keys = {"prefill_instances": 0, "transfer.transport": "tcp"} | {f"decode.{axis}": 2 for axis in axes}
    graphs = {"engine.cuda_graphs": (2, 4), "engine.deterministic": "tp" in axes}
    async with running(settings(tmp_path, **keys, **graphs), tmp_path) as cluster:
        assert await answers(cluster, prompts[:1], SHORTLY) == want[:1], "one of two groups has nothing to do"
        assert await answers(cluster, prompts, SHORTLY) == want
        async with asyncio.timeout(PATIENCE_S):
            while not (counts := (await cluster.frontend.status()).instances[0].work).replayed_steps:
                await asyncio.sleep(0.05)
        assert counts.replayed_steps < counts.steps, "prompts are launched"
        cluster.instances[0].check_integrity()
    assert unordered(tmp_path) == []


@pytest.mark.usefixtures("interpreted")
async def test_greedy_and_sampled_are_the_same_from_device_to_device_with_replays_and_lookahead(
    tmp_path: Path,
) -> None:
    prompts, want = checkpoint(tmp_path, "llama", *SHORT)

    async def sampled_answers(cluster: LocalCluster) -> list[list[int]]:
        ways = [
            SamplingParams(seed=i, temperature=0.9, top_p=0.9, max_tokens=6) for i, _ in enumerate(prompts)
        ]
        return await asyncio.gather(*(answer(cluster, *each) for each in zip(prompts, ways, strict=True)))

    async with LocalCluster.running(settings(tmp_path, prefill_instances=0)) as local:
        assert await answers(local, prompts, SHORTLY) == want
        sampled = await sampled_answers(local)
    keys = {"prefill.tp": 2, "decode.tp": 2, "transfer.transport": "cuda_ipc"}
    async with running(settings(tmp_path, **keys, **{"engine.cuda_graphs": (2, 4)}), tmp_path) as cluster:
        assert await answers(cluster, prompts, SHORTLY) == want
        assert await sampled_answers(cluster) == sampled
        async with asyncio.timeout(PATIENCE_S):
            while not total(status := await cluster.frontend.status(), "replayed_steps"):
                await asyncio.sleep(0.05)
        assert total(status, "grants"), "nothing was handed over"
        for instance in cluster.instances:
            instance.check_integrity()
    assert unordered(tmp_path) == []


@pytest.mark.parametrize(("family", "axis"), [("llama", "tp"), ("mixtral", "dp")])
async def test_within_one_process_ranks_have_their_devices_memory_to_themselves(
    family: str, axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `baton.LLM` with several GPUs: there are no memory servers."""
    prompts, want = checkpoint(tmp_path, family)
    monkeypatch.setattr(real_parts, "children", lambda engine, mesh: spawner(mesh, tmp_path))
    keys = {"prefill_instances": 0, f"decode.{axis}": 2}
    async with LocalCluster.running(settings(tmp_path, **keys)) as cluster:
        assert await answers(cluster, prompts) == want
        assert (len(processes("rank")), processes("memory")) == (2, [])
        cluster.instances[0].check_integrity()
    assert unordered(tmp_path) == []


def total(status: Status, what: str) -> int:
    """The sum over instances of what they have counted."""
    return sum(getattr(instance.work, what) for instance in status.instances)


async def test_ranks_that_launch_ahead_say_what_one_rank_says_under_grammars_and_beside_them(
    tmp_path: Path,
) -> None:
    """One of them samples what a grammar allows, and tells the others when the step is over."""
    make_served(tmp_path, "llama", 0)
    keys = {"prefill_instances": 0, "decode.tp": 2, "transfer.transport": "tcp"}
    async with running(settings(tmp_path, **keys), tmp_path) as cluster:
        said = await said_by(cluster)
    assert said == await say({}, tmp_path)
    assert unordered(tmp_path) == []


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"decode.tp": 2, "engine.num_blocks": 16}),
        ("mixtral", {"decode.dp": 2, "engine.num_blocks": 32}),
    ],
    ids=["tp2", "dp2"],
)
async def test_prefixes_come_back_from_below(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Memory servers save blocks that ranks would write over, and put them back."""
    prompts, want = checkpoint(tmp_path, family)
    keys = {**keys, "prefill_instances": 0, "transfer.transport": "tcp", "engine.host_cache_bytes": 1 << 24}
    async with running(settings(tmp_path, **keys), tmp_path) as cluster:
        for _ in range(2):
            for prompt, tokens in zip(prompts, want, strict=True):
                assert await answers(cluster, [prompt]) == [tokens]
        (instance,) = cluster.instances
        await reports(cluster, instance, lambda one: one.tiers.host_hits >= 4)  # or the test shows nothing
        assert len(processes("memory")) == 2
        instance.check_integrity()
    assert unordered(tmp_path) == []


@pytest.mark.parametrize(
    ("family", "axis"), [("llama", "tp"), ("mixtral", "ep"), ("llama", "pp"), ("mixtral", "dp")]
)
async def test_a_rank_that_finds_no_memory_in_the_middle_of_a_step_ends_its_instance_and_requests_go_on_elsewhere(
    family: str, axis: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its peers may wait for it in a collective, and are ended there."""
    prompts, want = checkpoint(tmp_path, family)
    keys = {f"prefill.{axis}": 2, "transfer.transport": "tcp"}
    async with running(settings(tmp_path, **keys), tmp_path) as cluster:
        prefill = cluster.instances[-1]
        with caplog.at_level(logging.ERROR):
            processes("rank")[-1].send_signal(signal.SIGUSR1)
            assert await answers(cluster, prompts) == want, "what it held goes on elsewhere"
            await fails(prefill)
        assert "rank 1 of 2" in str(prefill.failure)
        assert "OutOfMemory: the simulated device has no memory for allocation" in str(prefill.failure)
        assert "OutOfMemory" in caplog.text, "the log says why"
        assert await answers(cluster, prompts) == want, "the others serve on"
    assert processes("rank") == processes("memory") == []
    assert unordered(tmp_path) == []


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
        assert sum(instance.work_counts().grants for instance in cluster.instances), "nothing was handed over"
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

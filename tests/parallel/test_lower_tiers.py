"""What instances of several ranks keep below their pools, at a buddy, and take along when they drain."""

import asyncio
import signal
from pathlib import Path

import pytest

from cluster.local import LocalCluster
from core.types import Request, SamplingParams
from tests.parallel.test_served import answers, checkpoint, ranks, settings
from tests.parallel.test_states_below import reports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("forked"),
    pytest.mark.turns(3),
]
LONG = SamplingParams(temperature=0.0, max_tokens=60, min_tokens=60, masked_until_min=(1,))
HOST = {"engine.host_cache_bytes": 1 << 24}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"decode.pp": 2, "engine.num_blocks": 16}),
        ("deepseek_v3", {"decode.ep": 2, "engine.num_blocks": 16}),
        ("mixtral", {"decode.dp": 2, "engine.num_blocks": 32}),
    ],
    ids=["pp2", "ep2, latents", "dp2"],
)
async def test_prefixes_come_back_from_below(family: str, keys: dict[str, int], tmp_path: Path) -> None:
    prompts, want = checkpoint(tmp_path, family)
    keys = keys | HOST | {"prefill_instances": 0}
    async with LocalCluster.running(settings(tmp_path, **keys)) as cluster:
        for _ in range(2):
            for prompt, tokens in zip(prompts, want, strict=True):
                assert await answers(cluster, [prompt]) == [tokens]
        (instance,) = cluster.instances
        await reports(cluster, instance, lambda one: one.tiers.host_hits >= 4)  # or the test shows nothing
        instance.check_integrity()


async def stream(cluster: LocalCluster, prompt: tuple[int, ...], started: asyncio.Semaphore) -> list[int]:
    """`started` is released at the twelfth token."""
    frontend = cluster.frontend
    tokens: list[int] = []
    async for token in frontend.generate(
        Request(id=frontend.new_request_id(), prompt=prompt, sampling=LONG, reply_to=frontend.address)
    ):
        tokens.append(token.token)
        if len(tokens) == 12:
            started.release()
    return tokens


async def undisturbed(folder: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """From one rank."""
    never = asyncio.Semaphore(0)
    async with LocalCluster.running(settings(folder, prefill_instances=0)) as cluster:
        return list(await asyncio.gather(*(stream(cluster, prompt, never) for prompt in prompts)))


SEVERAL = pytest.mark.parametrize(
    ("family", "mesh"), [("llama", {"decode.tp": 2}), ("mixtral", {"decode.dp": 2})], ids=["tp2", "dp2"]
)


@SEVERAL
async def test_a_buddy_of_several_ranks_goes_on_with_the_kv_of_one_that_was_killed(
    family: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    prompts, want = checkpoint(tmp_path, family)
    long = await undisturbed(tmp_path, prompts)
    assert [tokens[:12] for tokens in long] == want
    keys = HOST | mesh | {"prefill_instances": 0, "decode_instances": 2, "transfer.kv_replicas": 1}
    async with LocalCluster.running(settings(tmp_path, **keys)) as cluster:
        started = asyncio.Semaphore(0)
        running = [asyncio.create_task(stream(cluster, prompt, started)) for prompt in prompts]
        for _ in prompts:
            await started.acquire()
        assert cluster.instances[0].num_jobs, "nothing is lost: the test shows nothing"
        ranks()[1].send_signal(signal.SIGKILL)
        assert await asyncio.gather(*running) == long
        assert cluster.instances[0].failure is not None
        await reports(
            cluster, cluster.instances[1], lambda one: one.tiers.host_hits > 0
        )  # or its KV was computed again


@SEVERAL
async def test_sequences_leave_a_draining_instance_with_their_kv(
    family: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    prompts, _ = checkpoint(tmp_path, family)
    long = await undisturbed(tmp_path, prompts)
    keys = mesh | {"prefill_instances": 0, "decode_instances": 2}
    async with LocalCluster.running(settings(tmp_path, **keys)) as cluster:
        started = asyncio.Semaphore(0)
        running = [asyncio.create_task(stream(cluster, prompt, started)) for prompt in prompts]
        for _ in prompts:
            await started.acquire()
        leaving, staying = cluster.instances
        assert leaving.num_jobs, "nothing moves: the test shows nothing"
        await leaving.drain(30)
        assert not leaving.num_jobs
        assert await asyncio.gather(*running) == long
        await reports(
            cluster, staying, lambda one: one.work.grants > 0
        )  # or they have not moved with their KV

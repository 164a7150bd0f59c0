"""Instances that sleep and wake up, with a real model: tokens go on, memory comes back, nothing is left behind."""

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.errors import ModelAsleep, RequestError
from core.garbage import give_back_memory
from core.reports import Status
from core.types import FinishReason, Request, SamplingParams
from tests.patience import until

PROMPT = tuple(range(5, 45))


def running(
    num_blocks: int = 400, *, mode: str = "manual", **overrides: Any
) -> AbstractAsyncContextManager[LocalCluster]:
    config = {
        "model.path": "embedded",
        "prefill_instances": 1,
        "engine.num_blocks": num_blocks,
        "schedule.residency.mode": mode,
    }
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return LocalCluster.running(load(None, {}, config | named), replaces_instances=True)


async def said(cluster: LocalCluster, num_tokens: int = 40, prompt: Sequence[int] = PROMPT) -> list[int]:
    request = Request(
        id=cluster.frontend.new_request_id(),
        prompt=tuple(prompt),
        sampling=SamplingParams(temperature=1.0, seed=7, max_tokens=num_tokens),
        reply_to=cluster.frontend.address,
    )
    tokens = [token async for token in cluster.frontend.generate(request)]
    assert tokens[-1].finish is FinishReason.LENGTH
    return [token.token for token in tokens]


async def sleep(
    cluster: LocalCluster, level: Any = 1, *, pauses: bool = False, timeout_s: float = 30
) -> None:
    await cluster.frontend.model_sleep.sleep(level, pauses=pauses, timeout_s=timeout_s, drops=False)


async def wake(cluster: LocalCluster) -> None:
    await cluster.frontend.model_sleep.wake()
    await cluster.serving()


async def asleep(cluster: LocalCluster) -> Status:
    status = await cluster.frontend.status()
    assert not cluster.instances
    assert {one.state for one in status.sleepers} == {"asleep"}
    return status


@pytest.mark.parametrize("level", [1, 2])
async def test_answers_are_the_same_after_each_sleep(level: int) -> None:
    async with running() as cluster:
        want = await said(cluster)
        for _ in range(2):
            await sleep(cluster, level)
            status = await asleep(cluster)
            assert [one.level for one in status.sleepers] == [level, level]
            await wake(cluster)
            assert await said(cluster) == want
            assert not (await cluster.frontend.status()).sleepers


@pytest.mark.slow
@pytest.mark.parametrize(("level", "host_cache"), [(1, 0), (2, 1 << 24)])
async def test_sequences_that_are_paused_go_on_after_waking_with_the_same_tokens(
    level: int, host_cache: int
) -> None:
    async with running(engine__host_cache_bytes=host_cache) as cluster:
        want = await said(cluster, 300)
        streams = [asyncio.create_task(said(cluster, 300)) for _ in range(2)]
        await until(lambda: any(one.num_used_blocks > 20 for one in cluster.instances))
        await sleep(cluster, level, pauses=True)
        await asleep(cluster)
        assert not any(stream.done() for stream in streams)
        assert (await cluster.frontend.status()).num_queued == 2
        await wake(cluster)
        assert await asyncio.gather(*streams) == [want] * 2
        if host_cache:
            tiers = [one.tiers for one in (await cluster.frontend.status()).instances]
            assert any(counts.host_hits for counts in tiers), "their KV was read back, not computed"


async def test_a_sleep_waits_for_sequences_that_run() -> None:
    async with running() as cluster:
        stream = asyncio.create_task(said(cluster, 300))
        await until(lambda: any(one.num_used_blocks for one in cluster.instances))
        await sleep(cluster)
        assert stream.done()
        assert not (await asleep(cluster)).num_queued


async def test_a_request_for_a_model_that_an_operator_has_sleep_is_refused_until_it_is_woken() -> None:
    async with running() as cluster:
        await sleep(cluster)
        assert "sleeps (level 1)" in (await cluster.frontend.status()).why_not
        with pytest.raises(ModelAsleep, match="/wake_up"):
            await said(cluster)
        await wake(cluster)
        await said(cluster)


async def test_a_model_that_nobody_asks_sleeps_and_a_request_wakes_it() -> None:
    quick = {"schedule.residency.idle_s": 0.1, "schedule.residency.least_awake_s": 0.0}
    async with running(mode="on_demand", **quick) as cluster:
        want = await said(cluster)
        for _ in range(2):
            await until(lambda: not cluster.instances)
            assert (await cluster.frontend.ready())[0]
            assert await said(cluster) == want


async def test_a_model_that_is_always_awake_does_not_sleep() -> None:
    async with running(mode="always") as cluster:
        with pytest.raises(RequestError, match="schedule.residency.mode is always"):
            await sleep(cluster)
        await said(cluster)


async def test_a_deeper_sleep_gives_up_what_a_lighter_one_has_kept() -> None:
    async with running() as cluster:
        want = await said(cluster)
        await sleep(cluster, 1)
        await sleep(cluster, 2)
        await until_levels(cluster, 2)
        await wake(cluster)
        assert await said(cluster) == want


async def until_levels(cluster: LocalCluster, level: int) -> None:
    while {one.level for one in (await cluster.frontend.status()).sleepers} != {level}:
        await asyncio.sleep(0.01)


async def test_sleep_and_wake_in_any_order_and_number_end_as_the_last_one_says() -> None:
    async with running() as cluster:
        want = await said(cluster)
        orders = [sleep(cluster, level) for level in (1, 2, 1)]
        waking = cluster.frontend.model_sleep.wake()
        await asyncio.wait([asyncio.create_task(each) for each in (*orders, waking)], timeout=1)
        await wake(cluster)
        assert await said(cluster) == want


async def test_nothing_of_the_engine_is_left_while_an_instance_sleeps() -> None:
    async with running() as cluster:
        await said(cluster)
        old, num_files = [weakref.ref(one) for one in cluster.instances], _num_files()
        await sleep(cluster, 2)
        assert [one() for one in old] == [None, None]
        assert _num_files() < num_files, "the pools' memory is gone"


async def test_many_sleeps_leave_as_many_files_and_threads_as_one() -> None:
    async with running() as cluster:
        counts: list[tuple[int, int]] = []
        for _ in range(4):
            await sleep(cluster, 2)
            await wake(cluster)
            await said(cluster)
            counts.append((_num_files(), sum("asyncio" not in one.name for one in threading.enumerate())))
        assert counts[-1] <= max(counts[:2])


def _num_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def own_bytes() -> int:
    """What this process has written and holds. What files have is left out: other processes change whose it is."""
    give_back_memory()
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    written = ("Private_Dirty:", "Shared_Dirty:", "Swap:")
    return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith(written))


@pytest.fixture
def wide_model(tmp_path: Path) -> Path:
    """A model whose 60 MB of weights nobody has packed before."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        torch_dtype=torch.float32,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
async def test_a_sleeping_instance_gives_back_its_pool_and_at_level_2_its_weights(wide_model: Path) -> None:
    kv_bytes, weight_bytes = 10 * 500 * (4 * 2 * 512 * 4), 30 << 20
    settings = {"model.path": str(wide_model), "prefill_instances": 0, "model.packed_cache": "none"}
    async with running(1000, **settings) as cluster:
        (instance,) = cluster.instances
        await asyncio.gather(*(said(cluster, 2, [n] * 500) for n in range(10)))
        assert instance.num_used_blocks == 0
        del instance
        awake = own_bytes()
        await sleep(cluster, 1)
        light = own_bytes()
        assert awake - light > 0.9 * kv_bytes, "the blocks that were written"
        await wake(cluster)
        await sleep(cluster, 2)
        assert light - own_bytes() > weight_bytes

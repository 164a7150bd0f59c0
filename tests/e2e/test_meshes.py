"""Pools on different meshes over real Ray, real HTTP and the real transports: every answer is transformers' own, also of the
streams under which a rank is killed, or stopped."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from models.text.tokenizer import load_tokenizer
from parallel.comm import TIMEOUT_S
from tests.e2e.cluster_process import ServeProcess, serving
from tests.models.served import greedy, make_served, some_prompts
from tests.patience import PATIENCE_S
from tests.processes import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.turns(6, number=0)]
LENGTH, NUM_INSTANCES = 32, 3
SETTINGS = [
    "prefill.tp=2",
    "decode.pp=2",
    "schedule.local_threshold_tokens=4",
    "engine.block_size=4",
    "engine.num_blocks=256",
]
BOUND = "([0-9]{3}-){7}[0-9]"


def ranks_of(server: ServeProcess, pool: str) -> list[psutil.Process]:
    """The processes of the ranks of a pool's first instance, which they have dialled."""
    ours = {(one.raddr, one.laddr) for one in server.replicas(pool)[0].net_connections("tcp")}
    ranks = [
        process
        for process in server.descendants()
        if any("ray::BatonRank" in word for word in command(process))
    ]
    return [
        rank for rank in ranks if any((one.laddr, one.raddr) in ours for one in rank.net_connections("tcp"))
    ]


def segments(pids: set[int]) -> list[str]:
    """KV segments in shared memory of these processes."""
    found = [path.name for path in Path("/dev/shm").glob("baton-kv-*")]
    return [name for name in found if int(name.split("-")[2]) in pids]


async def ask(client: openai.AsyncOpenAI, model: str, prompt: list[int], streaming: asyncio.Semaphore) -> str:
    """The streamed text; `streaming` is released at its first chunk."""
    text = ""
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=LENGTH, temperature=0, stream=True
    )
    async for chunk in stream:
        if not text:
            streaming.release()
        text += chunk.choices[0].text if chunk.choices else ""
    return text


async def bound(client: openai.AsyncOpenAI, model: str, prompt: list[int]) -> str:
    """An answer that a grammar of the client's binds; token 0 ends it."""
    grammar = {"structured_outputs": {"regex": BOUND}, "stop_token_ids": [0]}
    answer = await client.completions.create(
        model=model, prompt=prompt, max_tokens=48, temperature=0, extra_body=grammar
    )
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].text


async def until_lost(server: ServeProcess, count: int) -> float:
    """Seconds until the scheduler knows of fewer instances than `count`."""
    started = time.monotonic()
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(timeout=PATIENCE_S) as http:
        while len((await http.get(f"{server.base_url}/cluster")).json()["instances"]) >= count:
            await asyncio.sleep(0.02)
    return time.monotonic() - started


async def lose_a_rank(server: ServeProcess, pool: str, how: signal.Signals) -> None:
    """Kill or stop one of the two ranks of the pool's first instance. The instance and both ranks end."""
    ranks = ranks_of(server, pool)
    assert len(ranks) == 2
    os.kill(ranks[1].pid, how)
    assert await until_lost(server, NUM_INSTANCES) < TIMEOUT_S / 2, "nobody waits until a collective gives up"
    gone, left = await asyncio.to_thread(psutil.wait_procs, ranks, PATIENCE_S)
    assert len(gone) == 2, f"ranks are left: {left}"


async def test_answers_equal_transformers_also_under_killed_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    reference, prompts = make_served(folder, "mixtral", 0), some_prompts(7, 8, 40)
    decode = load_tokenizer(folder).decode
    want = [decode(list(greedy(reference, prompt, LENGTH))) for prompt in prompts]
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    arguments = ("--model", str(folder), "--prefill", "1", "--decode", "2", *options)
    with serving(*arguments, log=tmp_path / "log") as server:
        await asyncio.to_thread(server.wait_status, "all", lambda s: len(s["instances"]) == NUM_INSTANCES)
        pids = {process.pid for process in server.descendants()}
        url = f"{server.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            model = (await client.models.list()).data[0].id
            streaming = asyncio.Semaphore(0)
            asked = [ask(client, model, prompt, streaming) for prompt in prompts]
            assert await asyncio.gather(*asked) == want
            numbers = await asyncio.gather(*(bound(client, model, prompt) for prompt in prompts[:2]))
            assert all(re.fullmatch(BOUND, number) for number in numbers)
            for pool, how in (
                ("DecodePool", signal.SIGKILL),
                ("PrefillPool", signal.SIGKILL),
                ("DecodePool", signal.SIGSTOP),
                ("PrefillPool", signal.SIGSTOP),
            ):
                streaming = asyncio.Semaphore(0)
                running = [asyncio.create_task(ask(client, model, prompt, streaming)) for prompt in prompts]
                others = [asyncio.create_task(bound(client, model, prompt)) for prompt in prompts[:2]]
                await streaming.acquire()
                await lose_a_rank(server, pool, how)
                assert await asyncio.gather(*running) == want
                assert await asyncio.gather(*others) == numbers
                await asyncio.to_thread(server.wait_idle, NUM_INSTANCES)
                pids |= {process.pid for process in server.descendants()}
        ranks = ranks_of(server, "PrefillPool")
        assert len(ranks) == 2
        server.replicas("PrefillPool")[0].kill()
        assert not psutil.wait_procs(ranks, timeout=PATIENCE_S)[1], "ranks have outlived their instance"
    assert segments(pids) == []

"""Instances that prefill and decode as two schedulers say, over real Ray, real HTTP and the real transports.

Whichever scheduler is killed, no client sees it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.cluster_process import SILENCE_S, ServeProcess, serving
from tests.e2e.reference import corpus_prompts, greedy_texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder: Path = tmp_path_factory.mktemp("any_role")
    with serving(
        *("--any-role", "--decode", "2", "--set", "schedule.local_threshold_tokens=0"),
        *("--set", "serve.schedulers=2"),
        log=folder / "log",
    ) as process:
        yield process


@pytest.fixture
async def client(server: ServeProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{server.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, prompt: tuple[int, ...]) -> str:
    answer = await client.completions.create(
        model="baton-embedded", prompt=list(prompt), max_tokens=NUM_TOKENS, temperature=0
    )
    return answer.choices[0].text


async def stream_text(client: openai.AsyncOpenAI, prompt: tuple[int, ...], max_tokens: int) -> str:
    stream = await client.completions.create(
        model="baton-embedded", prompt=list(prompt), max_tokens=max_tokens, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def test_every_answer_equals_transformers_and_nothing_is_left(
    server: ServeProcess, client: openai.AsyncOpenAI
) -> None:
    status = server.wait_status("two instances", lambda status: len(status["instances"]) == 2)
    assert all(one["prefills"] and one["decodes"] for one in status["instances"])
    prompts = corpus_prompts(16)
    want = await asyncio.to_thread(greedy_texts, prompts, NUM_TOKENS)
    at_once = asyncio.Semaphore(8)

    async def one(prompt: tuple[int, ...]) -> str:
        async with at_once:
            return await ask(client, prompt)

    for _ in range(2):  # the first time the instances learn how long their steps take
        assert await asyncio.gather(*map(one, prompts)) == want
    await asyncio.to_thread(server.wait_idle, 2)


async def test_either_scheduler_may_be_killed_under_streams(
    server: ServeProcess, client: openai.AsyncOpenAI
) -> None:
    prompts = corpus_prompts(8, min_tokens=150, max_tokens=420)
    expected = await asyncio.to_thread(greedy_texts, prompts, 48)
    victims = server.replicas("Scheduler")
    assert len(victims) == 2
    for victim in victims:
        streams = [asyncio.create_task(stream_text(client, prompt, 48)) for prompt in prompts]
        await asyncio.sleep(0.25)
        victim.kill()
        assert await asyncio.gather(*streams) == expected
        async with asyncio.timeout(SILENCE_S):
            while len({p.pid for p in server.replicas("Scheduler")} - {victim.pid}) < 2:
                await asyncio.sleep(0.1)
        await asyncio.to_thread(server.wait_idle, 2)

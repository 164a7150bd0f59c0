"""Two schedulers under Ray Serve: requests are spread over both, and whichever is killed, no client sees it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.cluster_process import ServeProcess, serving
from tests.e2e.reference import corpus_prompts, greedy_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder: Path = tmp_path_factory.mktemp("schedulers")
    with serving(
        "--prefill", "1", "--decode", "1", "--set", "serve.schedulers=2", log=folder / "log"
    ) as process:
        yield process


async def stream_text(client: openai.AsyncOpenAI, prompt: tuple[int, ...], max_tokens: int) -> str:
    stream = await client.completions.create(
        model="baton-embedded", prompt=list(prompt), max_tokens=max_tokens, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def test_either_scheduler_may_be_killed_under_streams(server: ServeProcess) -> None:
    prompts = corpus_prompts(8, min_tokens=150, max_tokens=420)
    expected = [await asyncio.to_thread(greedy_text, prompt, 48) for prompt in prompts]
    victims = server.replicas("Scheduler")
    assert len(victims) == 2
    url = f"{server.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        for victim in victims:
            streams = [asyncio.create_task(stream_text(client, prompt, 48)) for prompt in prompts]
            await asyncio.sleep(0.25)
            victim.kill()
            assert await asyncio.gather(*streams) == expected
            async with asyncio.timeout(60):
                while len({p.pid for p in server.replicas("Scheduler")} - {victim.pid}) < 2:
                    await asyncio.sleep(0.1)
            await asyncio.to_thread(server.wait_idle, 2)

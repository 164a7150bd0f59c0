"""Instances that prefill and decode as two schedulers say, over real Ray, real HTTP and the real transports.

Whichever scheduler is killed, no client sees it. Of a batch each line is answered once, through a killed ingress, a killed instance
and a restart, as a server of one process."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from tests.e2e.cluster_process import SILENCE_S, ServeProcess, serving
from tests.e2e.reference import corpus_prompts, greedy_texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.turns(6, number=4)]
MODEL = "baton-embedded"
NUM_TOKENS = 32
NUM_LINES, NUM_PROMPTS, LENGTH, STEP = 1000, 12, 20, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any_role")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServeProcess]:
    with serving(
        *("--any-role", "--decode", "2", "--set", "schedule.local_threshold_tokens=0"),
        *("--set", "serve.schedulers=2", "--set", f"serve.store=sqlite:///{folder / 'store.db'}"),
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
        model=MODEL, prompt=list(prompt), max_tokens=NUM_TOKENS, temperature=0
    )
    return answer.choices[0].text


async def stream_text(client: openai.AsyncOpenAI, prompt: tuple[int, ...], max_tokens: int) -> str:
    stream = await client.completions.create(
        model=MODEL, prompt=list(prompt), max_tokens=max_tokens, temperature=0, stream=True
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


def client_of(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=30)


def wait(server: ServeProcess, batch_id: str, what: str, done: Callable[[Batch], bool]) -> Batch:
    """Ask often, since lines are answered meanwhile: the SDK's own retries are seconds apart, in which a batch may end."""
    deadline, batch = time.monotonic() + 200, None
    with client_of(server) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
                batch = client.batches.retrieve(batch_id)
                if done(batch):
                    return batch
            time.sleep(0.1)
    raise AssertionError(f"{what} took too long: {batch}\n{server.log.read_text()[-3000:]}")


def completed(batch: Batch) -> int:
    """How many lines are answered of a batch that has lines left, without which the next kill would show nothing."""
    assert batch.status in ("validating", "in_progress"), batch
    return batch.request_counts.completed if batch.request_counts else 0


def test_each_line_of_a_batch_is_answered_once_whatever_ends(server: ServeProcess, folder: Path) -> None:
    """The last of this file: it ends the server."""
    prompts = corpus_prompts(NUM_PROMPTS, max_tokens=80)
    asked = {
        f"line {number}": {
            "model": MODEL,
            "prompt": list(prompts[number % NUM_PROMPTS]),
            "max_tokens": LENGTH,
            "temperature": 0,
        }
        for number in range(NUM_LINES)
    }
    request = {"method": "POST", "url": "/v1/completions"}
    lines = [json.dumps({"custom_id": name, **request, "body": body}) for name, body in asked.items()]
    with client_of(server) as client:
        file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
    wait(server, batch.id, "the first answers", lambda found: completed(found) > STEP)
    for deployment in ("Ingress", "DecodePool"):
        server.replicas(deployment)[0].kill()
        before = completed(wait(server, batch.id, deployment, lambda found: True))
        wait(
            server,
            batch.id,
            f"after {deployment}",
            lambda found, least=before + STEP: completed(found) > least,
        )
    assert server.stop() == 0, server.log.read_text()[-4000:]
    arguments = ("--local", "--prefill", "0", "--set", f"serve.store=sqlite:///{folder / 'store.db'}")
    with serving(*arguments, log=folder / "second.log") as second:
        found = wait(second, batch.id, "the batch", lambda found: found.status == "completed")
        assert found.request_counts is not None
        assert found.error_file_id is None
        assert found.output_file_id is not None
        with client_of(second) as client:
            text = client.files.content(found.output_file_id).text
    answers = [json.loads(line) for line in text.splitlines()]
    assert Counter(each["custom_id"] for each in answers) == Counter(list(asked))
    want = dict(zip(prompts, greedy_texts(prompts, LENGTH), strict=True))
    for each in answers:
        prompt = asked[each["custom_id"]]["prompt"]
        assert each["response"]["body"]["choices"][0]["text"] == want[tuple(prompt)]

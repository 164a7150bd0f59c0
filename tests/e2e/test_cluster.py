"""A prefill and two decode instances over real Ray and real HTTP, against transformers."""

import asyncio
import ipaddress
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field, StringConstraints

from tests.clients.run_client import install_npm, said
from tests.e2e.cluster_process import ROOT, SILENCE_S, ServeProcess, serving
from tests.e2e.reference import (
    beams,
    corpus_prompts,
    greedy_all,
    greedy_text,
    greedy_texts,
    last_states,
    tokenizer,
)
from tests.processes import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

MODEL = "baton-embedded"
NODE_CLIENT = Path(__file__).with_name("node_client.mjs")
JOIN = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("joined", len(ray.nodes()))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("serve") / "log"
    # Without this threshold the scheduler would compute short prompts on decode and the hand-over would see little traffic.
    with serving(
        *("--prefill", "1", "--decode", "2", "--set", "schedule.local_threshold_tokens=4"),
        *("--tool-call-parser", "hermes", "--reasoning-parser", "think", "--set", "model.pooling=last"),
        log=log,
    ) as server:
        server.wait_status("three instances", lambda status: len(status["instances"]) == 3)
        yield server


@pytest.fixture
async def client(server: ServeProcess):
    async with openai.AsyncOpenAI(
        base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


async def stream_text(
    client: openai.AsyncOpenAI, prompt: tuple[int, ...], max_tokens: int, after: int | None = None
) -> str:
    """The streamed text; leaves after `after` chunks, as a client that goes away does."""
    text, chunks = "", 0
    stream = await client.completions.create(
        model=MODEL, prompt=list(prompt), max_tokens=max_tokens, temperature=0, stream=True
    )
    async with stream:
        async for chunk in stream:
            text += chunk.choices[0].text if chunk.choices else ""
            chunks += 1
            if chunks == after:
                break
    return text


def test_every_process_listens_on_loopback_alone(server: ServeProcess) -> None:
    """Ray's control store, raylet, agents and workers, as well as Baton's own."""
    listening = server.listening()
    assert len({process for process, _ in listening}) > 8
    assert [one for one in listening if not ipaddress.ip_address(one[1]).is_loopback] == []


def test_torch_is_in_the_pools_alone(server: ServeProcess) -> None:
    holders = {
        deployment
        for deployment in ("Scheduler", "Ingress", "PrefillPool", "DecodePool")
        if any("libtorch" in mapped.path for mapped in server.replicas(deployment)[0].memory_maps())
    }
    assert holders == {"PrefillPool", "DecodePool"}


def test_ray_lets_in_nobody_without_its_token(server: ServeProcess) -> None:
    flags = [part for process in server.descendants() for part in command(process)]
    ports = {flag.partition("=")[2] for flag in flags if flag.startswith("--gcs_server_port=")}
    addresses = {flag.partition("=")[2] for flag in flags if flag.startswith("--gcs-address=")}
    address = min(addresses) if addresses else f"127.0.0.1:{ports.pop()}"
    stranger = join(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
    assert "joined" not in stranger, "a wrong token is let in"
    nobody = join(address, RAY_AUTH_MODE="disabled")
    assert "joined" not in nobody, "no token is let in"
    assert "joined 1" in join(address, RAY_AUTH_MODE="token")


def join(address: str, **environment: str) -> str:
    """What a process says that tries to join the Ray at `address`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Without this Ray replaces a loopback address by the host's in the network, where nobody listens.
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", JOIN, address],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return done.stdout


@pytest.mark.essential
async def test_answers_equal_transformers(client: openai.AsyncOpenAI) -> None:
    prompts = corpus_prompts(6)
    for prompt, text in zip(prompts, greedy_texts(prompts, 24), strict=True):
        answer = await client.completions.create(
            model=MODEL, prompt=list(prompt), max_tokens=24, temperature=0
        )
        assert answer.choices[0].text == text


async def test_a_model_that_calls_no_tool_answers_as_it_does_without_tools(
    client: openai.AsyncOpenAI,
) -> None:
    """The embedded model's template renders no tools, so its text is the same; it passes the parsers of calls and reasoning."""
    messages: Any = [{"role": "user", "content": "import os\n\n\nclass Path"}]
    tools: Any = [{"type": "function", "function": {"name": "get_time"}}]
    rendered = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tuple(tokenizer().encode(rendered, add_special_tokens=False))
    chunks = [
        chunk.choices[0]
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, max_tokens=24, temperature=0, stream=True
        )
    ]
    assert "".join(choice.delta.content or "" for choice in chunks) == greedy_text(prompt, 24)
    assert not any(choice.delta.tool_calls for choice in chunks)
    assert chunks[-1].finish_reason in ("length", "stop")


async def test_32_concurrent_streams_with_shared_prefixes_and_cancellations(
    client: openai.AsyncOpenAI, server: ServeProcess
) -> None:
    prompts = corpus_prompts(32)
    rng = random.Random(7)
    lengths = [rng.choice((8, 24, 48)) for _ in prompts]
    leavers = {i: rng.randrange(1, 6) for i in rng.sample(range(32), 8)}
    texts = await asyncio.gather(
        *(
            stream_text(client, p, n, leavers.get(i))
            for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        )
    )
    outputs = greedy_all(prompts, max(lengths))
    for i, (output, length, text) in enumerate(zip(outputs, lengths, texts, strict=True)):
        expected = tokenizer().decode(output[:length], skip_special_tokens=True)
        assert expected.startswith(text) if i in leavers else text == expected, f"stream {i}"
    await asyncio.to_thread(server.wait_idle, 3)


async def test_seeded_sampling_is_the_same_wherever_it_runs(client: openai.AsyncOpenAI) -> None:
    prompt = list(corpus_prompts(3)[1])

    async def once() -> str:
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=24, temperature=0.9, top_p=0.95, seed=11
        )
        return answer.choices[0].text

    alone = await once()
    assert set(await asyncio.gather(*(once() for _ in range(6)))) == {alone}


async def test_several_answers_are_those_of_separate_requests_and_the_best_of_them_the_likeliest(
    client: openai.AsyncOpenAI,
) -> None:
    request: Any = {
        "model": MODEL,
        "prompt": list(corpus_prompts(5, min_tokens=60)[4]),
        "max_tokens": 24,
        "temperature": 0.9,
    }
    together = await client.completions.create(**request, n=3, seed=20, logprobs=0)
    apart = await asyncio.gather(*(client.completions.create(**request, seed=20 + i) for i in range(3)))
    texts = [choice.text for choice in together.choices]
    assert texts == [answer.choices[0].text for answer in apart]
    assert len(set(texts)) > 1
    best = await client.completions.create(**request, best_of=3, seed=20)

    def likelihood(index: int) -> float:
        logprobs = together.choices[index].logprobs
        assert logprobs is not None
        values = [value for value in logprobs.token_logprobs or () if value is not None]
        return sum(values) / len(values)

    assert [choice.text for choice in best.choices] == [texts[max(range(3), key=likelihood)]]


async def test_a_beam_search_finds_what_transformers_finds(client: openai.AsyncOpenAI) -> None:
    for prompt in corpus_prompts(3, min_tokens=40):
        answer = await client.completions.create(
            model=MODEL, prompt=list(prompt), max_tokens=12, n=3, extra_body={"use_beam_search": True}
        )
        assert [choice.text for choice in answer.choices] == beams(prompt, 12, 3)


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
async def test_the_node_sdk_hears_what_the_python_sdk_does(
    client: openai.AsyncOpenAI, server: ServeProcess, tmp_path: Path
) -> None:
    shutil.copy(NODE_CLIENT, tmp_path)
    install_npm("openai", tmp_path)
    asked: Any = {"model": MODEL, "temperature": 0, "max_tokens": 24}
    chat = await client.chat.completions.create(**asked, messages=[{"role": "user", "content": "Tell"}])
    text = chat.choices[0].message.content
    embedded = await client.embeddings.create(model=MODEL, input="Tell")
    whole, streamed, response, called, size = map(
        json.loads, await said(["node", NODE_CLIENT.name, f"{server.base_url}/v1", MODEL], tmp_path)
    )
    assert (whole, streamed, response, size) == (text, text, text, len(embedded.data[0].embedding))
    assert called["name"] == "cook"
    assert json.loads(called["arguments"])["dish"] in ("soup", "bread")


async def test_chat_streams_and_counts(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Return the sum of two numbers."}],
        max_completion_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text
    assert chunks[-1].usage is not None
    assert 0 < chunks[-1].usage.completion_tokens <= 24


class Meal(BaseModel):
    name: Annotated[str, StringConstraints(max_length=12)]
    courses: Annotated[list[Literal["soup", "fish", "rice", "plums"]], Field(min_length=8, max_length=8)]
    price: Annotated[int, Field(ge=0, le=99)]


async def meal(client: openai.AsyncOpenAI, guest: str, **sampling: Any) -> Meal:
    """Through the SDK's parse helper, whose schema a grammar guarantees."""
    answer = await client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": f"A meal for {guest}"}],
        response_format=Meal,
        **sampling,
    )
    assert answer.choices[0].message.parsed is not None
    return answer.choices[0].message.parsed


async def test_an_answer_keeps_to_its_schema_and_samples_as_its_seed_says(client: openai.AsyncOpenAI) -> None:
    """The first token is sampled by prefill, the others by decode."""
    sampled = {"temperature": 1.0, "seed": 5}
    first, again = await asyncio.gather(meal(client, "Ada", **sampled), meal(client, "Ada", **sampled))
    assert first == again


async def test_a_call_that_must_be_is_one(client: openai.AsyncOpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(Meal, name="cook")]
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Cook"}],
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert (call.function.name, answer.choices[0].finish_reason) == ("cook", "tool_calls")
    Meal.model_validate_json(call.function.arguments)


async def test_a_message_says_what_a_chat_does_and_a_forced_tool_is_used(
    client: openai.AsyncOpenAI, server: ServeProcess
) -> None:
    request: Any = {"model": MODEL, "max_tokens": 24, "messages": [{"role": "user", "content": "Tell"}]}
    schema = {
        "type": "object",
        "properties": {
            "dish": {"enum": ["soup", "bread"]},
            "guests": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["dish", "guests"],
        "additionalProperties": False,
    }
    tool = {"name": "cook", "input_schema": schema}
    chat = await client.chat.completions.create(**request, temperature=0)
    async with anthropic.AsyncAnthropic(base_url=server.base_url, api_key="none") as messages:
        async with messages.messages.stream(**request, extra_body={"temperature": 0}) as stream:
            said = await stream.get_final_message()
        forced: Any = {"tools": [tool], "tool_choice": {"type": "tool", "name": "cook"}}
        called = await messages.messages.create(**request | {"max_tokens": 1000}, **forced)
    assert isinstance(said.content[0], anthropic.types.TextBlock)
    assert (said.content[0].text, said.stop_reason) == (chat.choices[0].message.content, "max_tokens")
    (use,) = called.content
    assert isinstance(use, anthropic.types.ToolUseBlock)
    jsonschema.validate(use.input, schema)


async def test_a_response_goes_on_from_a_stored_one(client: openai.AsyncOpenAI) -> None:
    request: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
    first = await client.responses.create(**request, input="Tell")
    second = await client.responses.create(**request, input="More", previous_response_id=first.id)
    turns = [("user", "Tell"), ("assistant", first.output_text), ("user", "More")]
    chat = await client.chat.completions.create(
        model=MODEL,
        temperature=0,
        max_tokens=16,
        messages=[{"role": role, "content": text} for role, text in turns],  # type: ignore[misc]
    )
    assert (second.output_text, second.status) == (chat.choices[0].message.content, "incomplete")


@pytest.mark.turns(3)
@pytest.mark.parametrize("pool", ["DecodePool", "PrefillPool", "Scheduler"])
async def test_a_killed_process_costs_no_client_a_token(
    client: openai.AsyncOpenAI, server: ServeProcess, pool: str
) -> None:
    """SIGKILL while half of the streams decode and others still prefill: every stream equals the undisturbed run."""
    prompts = corpus_prompts(12, min_tokens=150, max_tokens=420)
    expected = await asyncio.to_thread(greedy_texts, prompts, 64)
    guests = [f"guest {i}" for i in range(4)]
    meals = await asyncio.gather(*(meal(client, guest, temperature=0) for guest in guests))
    victim = server.replicas(pool)[0]

    async def kill_soon() -> None:
        await asyncio.sleep(0.25)
        victim.kill()

    killer = asyncio.create_task(kill_soon())
    texts, constrained = await asyncio.gather(
        asyncio.gather(*(stream_text(client, prompt, 64) for prompt in prompts)),
        asyncio.gather(*(meal(client, guest, temperature=0) for guest in guests)),
    )
    await killer
    assert texts == expected
    assert constrained == meals
    await asyncio.to_thread(server.wait_idle, 3)


async def test_the_only_scheduler_is_killed_beneath_streams_and_new_requests(
    client: openai.AsyncOpenAI, server: ServeProcess
) -> None:
    """Its spare places what comes. Whichever of the two processes is killed, no client sees it."""
    prompts = corpus_prompts(6, min_tokens=150, max_tokens=420)
    expected = await asyncio.to_thread(greedy_texts, prompts, 48)
    async with asyncio.timeout(SILENCE_S):  # another test may have killed one
        while len(victims := server.replicas("Scheduler")) < 2:
            await asyncio.sleep(0.1)
    await asyncio.to_thread(server.wait_idle, 3)
    for victim in victims:
        streams = [asyncio.create_task(stream_text(client, prompt, 48)) for prompt in prompts]
        await asyncio.sleep(0.25)
        victim.kill()
        new = [stream_text(client, prompt, 48) for prompt in prompts]
        assert await asyncio.gather(*streams, *new) == [*expected, *expected]
        async with asyncio.timeout(SILENCE_S):
            while len({p.pid for p in server.replicas("Scheduler")} - {victim.pid}) < 2:
                await asyncio.sleep(0.1)
        await asyncio.to_thread(server.wait_idle, 3)


async def test_embeddings_and_the_prompts_log_probabilities(client: openai.AsyncOpenAI) -> None:
    prompts = corpus_prompts(6)
    want = [last_states(prompt) for prompt in prompts]
    got = await client.embeddings.create(model=MODEL, input=[list(prompt) for prompt in prompts])
    for each, (state, _) in zip(got.data, want, strict=True):
        assert each.embedding == pytest.approx((state / state.norm()).tolist(), abs=2e-3)
    scored = await client.completions.create(
        model=MODEL, prompt=[list(prompt) for prompt in prompts], max_tokens=0, echo=True, logprobs=0
    )
    for choice, prompt, (_, logprobs) in zip(scored.choices, prompts, want, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        expected = [float(row[token]) for row, token in zip(logprobs, prompt[1:], strict=False)]
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=0.02)

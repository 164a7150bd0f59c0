"""The API through the openai client and raw HTTP, over a fake generator."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from cluster.api.app import create_app
from cluster.api.params import ApiSettings
from cluster.api.server import HttpServer
from core.errors import Overloaded, ReplicaLost
from core.types import Slo
from tests.cluster.api.fakes import END, NAME, ByteTokenizer, FakeGenerator

SETTINGS = ApiSettings(
    NAME, 200, 257, (END,), {"temperature": 0.5}, {"standard": Slo(), "chat": Slo("chat", 1.0, 0.05, 1)}
)


class Api:
    def __init__(self, generator: FakeGenerator, settings: ApiSettings = SETTINGS) -> None:
        self.generator = generator
        self.app = create_app(generator, ByteTokenizer(), settings)
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://api")
        self.openai = openai.AsyncOpenAI(
            base_url="http://api/v1", api_key="k", http_client=self.http, max_retries=0
        )

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(
            path, content=content, headers={"content-type": "application/json", **headers}
        )


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    made = Api(FakeGenerator("héllo wörld"))
    yield made
    await made.http.aclose()


async def test_completion(api: Api) -> None:
    answer = await api.openai.completions.create(model=NAME, prompt="hi", max_tokens=100)
    assert answer.choices[0].text == "héllo wörld"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 14)
    assert api.generator.requests[0].sampling.temperature == 0.5


async def test_completion_stream_never_shows_half_a_character(api: Api) -> None:
    stream = await api.openai.completions.create(
        model=NAME, prompt="hi", max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == "héllo wörld"
    assert not any("\ufffd" in text for text in texts)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 14
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


async def test_chat_stream_and_whole_agree(api: Api) -> None:
    body: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    }
    whole = await api.openai.chat.completions.create(**body)
    chunks = [chunk async for chunk in await api.openai.chat.completions.create(**body, stream=True)]
    assert whole.choices[0].message.content == "héllo wörld"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "héllo wörld"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert api.generator.requests[0].prompt == tuple(b"user: hi\nassistant: ")


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_across_tokens(api: Api, stream: bool) -> None:
    answer = await api.openai.completions.create(
        model=NAME, prompt="x", max_tokens=50, stop=["lo w", "zzz"], stream=stream
    )
    texts = [chunk.choices[0].text async for chunk in answer] if stream else [answer.choices[0].text]
    assert "".join(texts) == "hél"
    assert api.generator.closed == ["r1"]


async def test_n_choices_draw_with_their_own_seeds(api: Api) -> None:
    answer = await api.openai.completions.create(model=NAME, prompt=["a", "bc"], n=3, max_tokens=3, seed=7)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [r.sampling.seed for r in api.generator.requests] == [7, 8, 9] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


async def test_logprobs_in_both_shapes(api: Api) -> None:
    chat = await api.openai.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2, max_tokens=1
    )
    assert chat.choices[0].logprobs is not None
    entry = chat.choices[0].logprobs.content[0]  # type: ignore[index]
    assert (entry.token, entry.logprob, entry.bytes) == ("h", -0.5, [104])
    assert [top.token for top in entry.top_logprobs] == ["h", "A"]
    text = await api.openai.completions.create(model=NAME, prompt="ab", logprobs=2, max_tokens=1)
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.tokens == ["h"]
    assert text.choices[0].logprobs.top_logprobs == [{"h": -0.5, "A": -1.5}]


async def test_echo_and_token_id_prompts(api: Api) -> None:
    answer = await api.openai.completions.create(model=NAME, prompt=[104, 105], echo=True, max_tokens=1)
    assert answer.choices[0].text == "hih"


async def test_models_tokenize_detokenize_and_metrics(api: Api) -> None:
    assert [m.id async for m in api.openai.models.list()] == [NAME]
    assert (await api.openai.models.retrieve(NAME)).id == NAME
    assert (await api.post("/tokenize", {"prompt": "hé"})).json() == {
        "tokens": [104, 195, 169],
        "count": 3,
        "max_model_len": 200,
    }
    assert (await api.post("/detokenize", {"tokens": [104, 195, 169]})).json() == {"prompt": "hé"}
    await api.openai.completions.create(model=NAME, prompt="hi")
    metrics = (await api.http.get("/metrics")).text
    assert 'baton_http_requests_total{route="/v1/completions",status="200"} 1.0' in metrics
    assert "baton_output_tokens_total 14.0" in metrics


async def test_health_is_not_readiness(api: Api) -> None:
    api.generator.ready_answer = (False, "no decode instance is alive")
    assert (await api.http.get("/health")).status_code == 200
    answer = await api.http.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "no decode instance is alive"


OK = {"model": NAME, "prompt": "x"}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BAD: list[tuple[str, Any, int, str | None]] = [
    (COMPLETIONS, b"{", 400, None),
    (COMPLETIONS, b"[]", 400, None),
    (COMPLETIONS, b'{"model": "\xff"}', 400, None),
    (COMPLETIONS, b'{"model": "fake", "prompt": "\\ud800"}', 400, None),
    (COMPLETIONS, b'{"model": "fake", "prompt": "x", "temperature": NaN}', 400, None),
    (COMPLETIONS, b"[" * 100_000, 400, None),
    (COMPLETIONS, {"prompt": "x"}, 400, "model"),
    (COMPLETIONS, {"model": NAME}, 400, "prompt"),
    (COMPLETIONS, {**OK, "model": "other"}, 404, "model"),
    (COMPLETIONS, {**OK, "prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {**OK, "prompt": []}, 400, "prompt"),
    (COMPLETIONS, {**OK, "prompt": [999]}, 400, "prompt"),
    (COMPLETIONS, {**OK, "prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {**OK, "prompt": "x" * 201}, 400, "prompt"),
    (COMPLETIONS, {**OK, "max_tokens": 200}, 400, "prompt"),
    (COMPLETIONS, {**OK, "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {**OK, "max_tokens": True}, 400, "max_tokens"),
    (COMPLETIONS, {**OK, "temperature": "1"}, 400, "temperature"),
    (COMPLETIONS, {**OK, "temperature": 2.1}, 400, "temperature"),
    (COMPLETIONS, {**OK, "top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {**OK, "logprobs": 99}, 400, "logprobs"),
    (COMPLETIONS, {**OK, "n": 1000}, 400, "n"),
    (COMPLETIONS, {**OK, "stop": ["a"] * 5}, 400, "stop"),
    (COMPLETIONS, {**OK, "stop": [""]}, 400, "stop"),
    (COMPLETIONS, {**OK, "suffix": "end"}, 400, "suffix"),
    (COMPLETIONS, {**OK, "best_of": 3}, 400, "best_of"),
    (COMPLETIONS, {**OK, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {**OK, "logit_bias": {"5000": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {**OK, "logit_bias": {"5": 101}}, 400, "logit_bias"),
    (COMPLETIONS, {**OK, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (COMPLETIONS, {**OK, "nonsense": 1}, 400, "nonsense"),
    (CHATS, {**CHAT, "messages": []}, 400, "messages"),
    (CHATS, {**CHAT, "messages": [{"role": "king", "content": "x"}]}, 400, "messages"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "refuse me"}]}, 400, "messages"),
    (
        CHATS,
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        400,
        "messages",
    ),
    (CHATS, {**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
    (CHATS, {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
    (CHATS, {**CHAT, "top_logprobs": 3}, 400, "top_logprobs"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
async def test_bad_input_is_refused_by_name(
    api: Api, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = await api.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert error["message"]
    assert answer.headers["x-request-id"]
    assert not api.generator.requests


async def test_other_refusals_have_the_same_shape(api: Api) -> None:
    wrong_type = await api.http.post(COMPLETIONS, content=b"x", headers={"content-type": "text/plain"})
    assert wrong_type.status_code == 415
    assert (await api.post(COMPLETIONS, OK, **{"x-slo-class": "royal"})).json()["error"][
        "param"
    ] == "x-slo-class"
    for answer in (await api.http.get("/nowhere"), await api.http.get(COMPLETIONS)):
        assert answer.json()["error"]["type"] in ("not_found_error", "invalid_request_error")
    small = Api(FakeGenerator(), ApiSettings(NAME, 200, 257, (END,), max_body_bytes=1024))
    assert (await small.post(COMPLETIONS, {**OK, "prompt": "x" * 2000})).status_code == 413


async def test_keys_guard_everything_but_health_and_readiness() -> None:
    api = Api(FakeGenerator(), ApiSettings(NAME, 200, 257, (END,), api_keys=("secret", "other")))
    for path in ("/v1/models", "/metrics", "/cluster"):
        answer = await api.http.get(path)
        assert answer.status_code == 401
        assert "secret" not in answer.text
    assert (await api.http.get("/health")).status_code == 200
    assert (await api.http.get("/ready")).status_code == 200
    assert (await api.http.get("/v1/models", headers={"Authorization": "Bearer other"})).status_code == 200
    assert (await api.http.get("/v1/models", headers={"Authorization": "Bearer wrong"})).status_code == 401


async def test_overload_and_loss_have_their_statuses(api: Api) -> None:
    api.generator.fail_at = (0, Overloaded("12 requests are waiting", 2.6))
    answer = await api.post(COMPLETIONS, OK)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert (await api.post(COMPLETIONS, {**OK, "stream": True})).status_code == 429
    api.generator.fail_at = (0, ReplicaLost("gone"))
    assert (await api.post(COMPLETIONS, OK)).status_code == 503
    api.generator.fail_at = (0, RuntimeError("a secret detail"))
    answer = await api.post(COMPLETIONS, OK)
    assert answer.status_code == 500
    assert "secret detail" not in answer.text


async def test_an_error_in_the_stream_is_an_event_and_cancels_the_other_choices(api: Api) -> None:
    api.generator.fail_at = (3, ReplicaLost("gone"))
    answer = await api.post(COMPLETIONS, {**OK, "stream": True, "n": 2})
    assert answer.status_code == 200
    events = [line for line in answer.text.splitlines() if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "gone"
    assert sorted(api.generator.closed) == ["r1", "r2"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_the_generation(stream: bool) -> None:
    generator = FakeGenerator("x" * 150, pause_s=0.02)
    server = HttpServer(create_app(generator, ByteTokenizer(), SETTINGS), "127.0.0.1", 0, shared=False)
    port = server._listener.getsockname()[1]
    server.start()
    body = json.dumps({**OK, "n": 2, "max_tokens": 180, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    if stream:
        await reader.readuntil(b"data: ")
    else:
        await asyncio.sleep(0.1)
    writer.close()
    await writer.wait_closed()
    async with asyncio.timeout(2):
        while len(generator.closed) < 2:
            await asyncio.sleep(0.01)
    assert not generator.finished
    await server.stop()

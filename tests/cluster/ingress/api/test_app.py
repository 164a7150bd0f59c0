"""The API through the openai client and raw HTTP, over a fake generator."""

import gzip
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.ingress.generation.request_params import ApiSettings
from core.errors import Overloaded, ReplicaLost, TargetOutOfReach
from tests.cluster.ingress.api.fakes import END, NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, COMPLETIONS, OK, Api


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


async def test_n_choices_sample_with_their_own_seeds(api: Api) -> None:
    answer = await api.openai.completions.create(model=NAME, prompt=["a", "bc"], n=3, max_tokens=3, seed=7)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [r.sampling.seed for r in api.generator.requests] == [7, 8, 9] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


async def test_the_bytes_of_logprobs_are_the_answer_where_characters_have_several_tokens(api: Api) -> None:
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    choice = (await api.openai.chat.completions.create(**asked, max_tokens=13)).choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert bytes(byte for entry in entries for byte in entry.bytes or ()).decode() == "héllo wörld"
    assert [entry.bytes for entry in entries][1:3] == [[0xC3], [0xA9]]


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


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/"])
async def test_load_balancers_may_ask_for_the_head_alone(api: Api, path: str) -> None:
    whole, head = await api.http.get(path), await api.http.head(path)
    assert head.status_code == whole.status_code
    assert head.headers["content-type" if whole.content else "location"]


async def test_the_root_leads_to_the_page(api: Api) -> None:
    answer = await api.http.get("/", follow_redirects=True)
    assert answer.url.path == "/dashboard"
    assert answer.headers["content-type"].startswith("text/html")


async def test_health_is_not_readiness(api: Api) -> None:
    api.generator.ready_answer = (False, "no decode instance is alive")
    assert (await api.http.get("/health")).status_code == 200
    answer = await api.http.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "no decode instance is alive"


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
    (COMPLETIONS, {**OK, "max_tokens": -1}, 400, "max_tokens"),
    (CHATS, {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {**OK, "max_tokens": True}, 400, "max_tokens"),
    (COMPLETIONS, {**OK, "temperature": "1"}, 400, "temperature"),
    (COMPLETIONS, {**OK, "temperature": 2.1}, 400, "temperature"),
    (COMPLETIONS, {**OK, "top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {**OK, "logprobs": 99}, 400, "logprobs"),
    (COMPLETIONS, {**OK, "n": 1000}, 400, "n"),
    (COMPLETIONS, {**OK, "stop": ["a"] * 65}, 400, "stop"),
    (COMPLETIONS, {**OK, "stop": [""]}, 400, "stop"),
    (COMPLETIONS, {**OK, "suffix": "end"}, 400, "suffix"),
    (COMPLETIONS, {**OK, "best_of": 2, "n": 3}, 400, "best_of"),
    (COMPLETIONS, {**OK, "best_of": 2, "stream": True}, 400, "best_of"),
    (COMPLETIONS, {**OK, "best_of": 1000}, 400, "best_of"),
    (COMPLETIONS, {**OK, "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    (COMPLETIONS, {**OK, "prompt_logprobs": 99}, 400, "prompt_logprobs"),
    (COMPLETIONS, {**OK, "allowed_token_ids": []}, 400, "allowed_token_ids"),
    (COMPLETIONS, {**OK, "allowed_token_ids": [5000]}, 400, "allowed_token_ids"),
    (COMPLETIONS, {**OK, "allowed_token_ids": [97], "bad_words": ["a"]}, 400, "allowed_token_ids"),
    (COMPLETIONS, {**OK, "allowed_token_ids": [END], "min_tokens": 2}, 400, "allowed_token_ids"),
    (COMPLETIONS, {**OK, "bad_words": [""]}, 400, "bad_words"),
    (COMPLETIONS, {**OK, "bad_words": ["x"] * 129}, 400, "bad_words"),
    (COMPLETIONS, {**OK, "bad_words": ["x"], "structured_outputs": {"regex": "y"}}, 400, "bad_words"),
    (
        CHATS,
        {**CHAT, "allowed_token_ids": [1], "response_format": {"type": "json_object"}},
        400,
        "allowed_token_ids",
    ),
    (COMPLETIONS, {**OK, "priority": -2}, 400, "priority"),
    (COMPLETIONS, {**OK, "priority": 5000}, 400, "priority"),
    (COMPLETIONS, {**OK, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {**OK, "logit_bias": {"5000": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {**OK, "logit_bias": {"5": 101}}, 400, "logit_bias"),
    (COMPLETIONS, {**OK, "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
    (COMPLETIONS, {**OK, "logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias"),
    (COMPLETIONS, {**OK, "logit_bias": {str(i): 0 for i in range(1025)}}, 400, "logit_bias"),
    (COMPLETIONS, b'{"model": "fake", "prompt": "x", "top_p": 1e999}', 400, "top_p"),
    (COMPLETIONS, {**OK, "prompt": ["a", 1]}, 400, "prompt"),
    (COMPLETIONS, {**OK, "prompt": [True]}, 400, "prompt"),
    (COMPLETIONS, {**OK, "prompt": [[]]}, 400, "prompt"),
    (COMPLETIONS, {**OK, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (CHATS, {**CHAT, "messages": []}, 400, "messages"),
    (CHATS, {**CHAT, "messages": [{"role": "king", "content": "x"}]}, 400, "messages"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "refuse me"}]}, 400, "messages"),
    (
        CHATS,
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        400,
        "messages",
    ),
    (
        CHATS,
        {**CHAT, "messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        400,
        "messages",
    ),
    (CHATS, {**CHAT, "chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template_kwargs"),
    (CHATS, {**CHAT, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (CHATS, {**CHAT, "chat_template_kwargs": {"add_generation_prompt": False}}, 400, "chat_template_kwargs"),
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


@pytest.mark.parametrize("limits", [(3, 9), (9, 3)])
async def test_of_two_limits_the_smaller_holds(api: Api, limits: tuple[int, int]) -> None:
    old, new = limits
    await api.openai.chat.completions.create(**CHAT, max_tokens=old, max_completion_tokens=new)
    assert api.generator.requests[0].sampling.max_tokens == 3


async def test_what_the_client_sent_is_cut_in_messages(api: Api) -> None:
    assert len((await api.post(COMPLETIONS, {**OK, "model": "x" * 100_000})).text) < 1000
    assert len((await api.post(COMPLETIONS, {**OK, "x" * 100_000: 1})).text) < 2000


async def test_long_text_is_tokenised_beside_the_event_loop(api: Api) -> None:
    api.tokenizer.encoded_on.clear()
    await api.post("/tokenize", {"prompt": "x" * 10})
    await api.post("/tokenize", {"prompt": "x" * 10_000})
    assert (await api.post(COMPLETIONS, {**OK, "prompt": "x" * 10_000})).status_code == 400
    on_loop = [thread is threading.current_thread() for thread in api.tokenizer.encoded_on]
    assert on_loop == [True, False, False]


async def test_an_answer_can_be_sent_back(api: Api) -> None:
    messages: list[Any] = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "x"}]
    answer = await api.openai.chat.completions.create(model=NAME, messages=messages)
    messages += [answer.choices[0].message, {"role": "user", "content": "y"}]
    await api.openai.chat.completions.create(model=NAME, messages=messages)
    assert bytes(api.generator.requests[1].prompt).decode() == (
        "system: be brief\nuser: x\nassistant: héllo wörld\nuser: y\nassistant: "
    )


async def test_the_sampled_token_is_always_among_the_likeliest(api: Api) -> None:
    answer = await api.openai.completions.create(model=NAME, prompt="a", logprobs=0, max_tokens=1)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.top_logprobs == [{"h": -0.5}]


async def test_stop_strings_wait_for_min_tokens(api: Api) -> None:
    answer = await api.post(COMPLETIONS, {**OK, "stop": "l", "min_tokens": 4})
    assert answer.json()["choices"][0]["text"] == "hél"


async def test_request_ids(api: Api) -> None:
    for path in ("/health", "/nowhere"):
        assert (await api.http.get(path, headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        given = await api.http.get(path, headers={"x-request-id": "x" * 200})
        assert 0 < len(given.headers["x-request-id"]) <= 128
    assert (await api.http.post("/health")).headers["allow"].split(", ") in (["GET", "HEAD"], ["HEAD", "GET"])


async def test_metrics_tell_refusals_failures_and_cancellations_apart(api: Api) -> None:
    async def count(name: str) -> float:
        lines = (await api.http.get("/metrics")).text.splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).split()[1])

    api.generator.fail_at = (0, Overloaded("full", 1.0))
    await api.post(COMPLETIONS, OK)
    assert await count("baton_requests_rejected_total") == 1
    assert await count("baton_prompt_tokens_total") == 0
    api.generator.fail_at = (0, TargetOutOfReach("too slow", 3.0))
    await api.post(COMPLETIONS, OK)
    assert await count("baton_requests_hopeless_total") == 1
    api.generator.fail_at = (2, ReplicaLost("gone"))
    await api.post(COMPLETIONS, OK)
    assert await count("baton_requests_failed_total") == 1
    assert await count("baton_requests_cancelled_total") == 0
    assert await count("baton_requests_running") == 0
    api.generator.fail_at = None
    await api.post(COMPLETIONS, OK)
    assert await count("baton_time_to_first_token_seconds_count") == 2
    assert await count("baton_request_duration_seconds_count") == 1


@pytest.mark.parametrize(
    ("asked", "there_is"), [("/chat/completions", CHATS), ("/v1/v1/messages", "/v1/messages")]
)
async def test_a_wrong_base_url_is_told_from_a_path_that_there_is_none_of(
    api: Api, asked: str, there_is: str
) -> None:
    answer = await api.post(asked, CHAT)
    assert (answer.status_code, f"There is {there_is}: look at the base URL" in answer.text) == (404, True)
    assert "base URL" not in (await api.post("/v1/audio/speech", CHAT)).text
    assert "base URL" not in (await api.http.get(CHATS)).text


async def test_other_refusals_have_the_same_shape(api: Api) -> None:
    wrong_type = await api.http.post(COMPLETIONS, content=b"x", headers={"content-type": "text/plain"})
    assert wrong_type.status_code == 415
    of_curl = {"content-type": "application/x-www-form-urlencoded"}
    assert (await api.post(COMPLETIONS, OK, **of_curl)).status_code == 200
    assert (await api.post(COMPLETIONS, OK, **of_curl, origin="http://page")).status_code == 415
    packed = await api.post(
        COMPLETIONS, gzip.compress(json.dumps(OK).encode()), **{"content-encoding": "gzip"}
    )
    assert (packed.status_code, "'gzip' is not taken" in packed.text) == (415, True)
    assert "the body is empty" in (await api.post(COMPLETIONS, b"")).text
    assert (await api.post(COMPLETIONS, OK, **{"x-slo-class": "royal"})).json()["error"][
        "param"
    ] == "x-slo-class"
    for answer in (await api.http.get("/nowhere"), await api.http.get(COMPLETIONS)):
        assert answer.json()["error"]["type"] in ("not_found_error", "invalid_request_error")
    small = Api(
        FakeGenerator(),
        ApiSettings(
            model_name=NAME, max_context_tokens=200, vocab_size=257, eos_token_ids=(END,), max_body_bytes=1024
        ),
    )
    assert (await small.post(COMPLETIONS, {**OK, "prompt": "x" * 2000})).status_code == 413


async def test_overload_and_loss_have_their_statuses(api: Api) -> None:
    api.generator.fail_at = (0, Overloaded("12 requests are waiting", 2.1))
    answer = await api.post(COMPLETIONS, OK)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert (await api.post(COMPLETIONS, {**OK, "stream": True})).status_code == 429
    api.generator.fail_at = (0, TargetOutOfReach("about 3.1 s on an idle instance", 3.06))
    for body in (OK, {**OK, "stream": True}):
        answer = await api.post(COMPLETIONS, body)
        assert answer.status_code == 429
        assert "retry-after" not in answer.headers
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["code"] == "target_out_of_reach"
        assert "3.1 s" in answer.json()["error"]["message"]
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

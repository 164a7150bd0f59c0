"""/api/chat over a generator that writes what a model of the family would."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from core.errors import Overloaded, ReplicaLost
from models.files.hub import resolve
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import (
    HERMES,
    TOOLS,
    TemplateTokenizer,
    TokenGenerator,
    last_rendered,
    served,
)
from tests.cluster.ingress.http.test_disconnect import http_post, serving
from tests.cluster.ingress.images.test_images import SEEN, SMALL, seeing
from tests.cluster.ingress.ollama.ollama_answers import ASK, CHAT, answer, lines, refusal
from tests.cluster.ingress.parsers.recorded_texts import RECORDED
from tests.models.seeing_checkpoints import data_url, encoded
from tests.patience import PATIENCE_S

THINKS, MARKS = "enable_thinking <think></think>", ["<think>", "</think>"]
CALLS = [("get_weather", {"city": "Zürich", "days": 2}), ("get_time", {})]


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_how_it_ended_and_what_it_took(stream: bool) -> None:
    api = served("It is 3 °C.")
    whole = await answer(api, stream=stream)
    assert (whole["model"], whole["message"]) == (NAME, {"role": "assistant", "content": "It is 3 °C."})
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    (request,) = api.generator.requests
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (len(request.prompt), 13)
    assert whole["created_at"].endswith("Z")


@pytest.mark.parametrize("stream", [False, True])
async def test_durations_are_those_of_the_tokens(stream: bool) -> None:
    api = Api(FakeGenerator("abcd", pause_s=0.02))
    whole = await answer(api, stream=stream)
    before, prompt = whole["load_duration"], whole["prompt_eval_duration"]
    assert prompt >= 20e6
    assert whole["eval_duration"] >= 4 * 20e6
    assert before + prompt + whole["eval_duration"] <= whole["total_duration"]


async def test_a_stream_is_the_default_and_has_a_line_for_each_piece_of_text() -> None:
    every = await lines(served("Yes."), CHAT, messages=ASK)
    assert [line["message"]["content"] for line in every] == ["Y", "e", "s", ".", ""]
    assert all("eval_count" not in line for line in every[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_come_whole_and_the_history_takes_them_back_as_they_came(stream: bool) -> None:
    api = served(RECORDED["qwen2.5"].text)
    message = (await answer(api, stream=stream, tools=TOOLS))["message"]
    assert message["content"] == "I will look."
    assert called(message) == CALLS
    assert [call["function"]["index"] for call in message["tool_calls"]] == [0, 1]
    ids = [call["id"] for call in message["tool_calls"]]
    results = [
        {"role": "tool", "content": text, "tool_call_id": i} for text, i in zip("ab", ids, strict=True)
    ]
    await answer(api, tools=TOOLS, messages=[*ASK, message, *results])
    _, said, *rest = last_rendered(api)["messages"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in said["tool_calls"]] == CALLS
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in rest] == [
        ("tool", ids[0], "a"),
        ("tool", ids[1], "b"),
    ]


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ([{}, {}, {}], ["call_0", "call_1", "call_2"]),
        ([{"tool_name": "b"}, {"tool_name": "a"}, {"tool_name": "a"}], ["call_1", "call_0", "call_2"]),
        ([{"name": "b"}, {}, {}], ["call_1", "call_0", "call_2"]),
        ([{"tool_call_id": "call_2"}, {"tool_name": "a"}, {}], ["call_2", "call_0", "call_1"]),
    ],
    ids=["in order", "by tool", "by an older client's name", "by id"],
)
async def test_results_without_ids_find_their_calls(named: list[dict[str, str]], wanted: list[str]) -> None:
    """Ollama's Python client drops the ids of calls."""
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    api = served("Yes.")
    await answer(api, messages=[*ASK, said, *({"role": "tool", "content": "x", **names} for names in named)])
    messages = last_rendered(api)["messages"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call_0", "call_1", "call_2"]
    assert [message["tool_call_id"] for message in messages[2:]] == wanted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_broke_off_is_text(stream: bool) -> None:
    """Clients run every call that they find."""
    api = served('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zür')
    whole = await answer(api, stream=stream, tools=TOOLS)
    assert "tool_calls" not in whole["message"]
    assert "get_weather" in whole["message"]["content"]
    assert "Zür" in whole["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_has_a_field_of_its_own_and_goes_back_in_it(stream: bool) -> None:
    api = served("Okay.\n</think>\n\nYes.", THINKS, MARKS, "<think>\n")
    message = (await answer(api, stream=stream, think=True))["message"]
    assert (message["thinking"], message["content"]) == ("Okay.", "Yes.")
    await answer(api, messages=[*ASK, message, *ASK])
    assert last_rendered(api)["messages"][1]["reasoning_content"] == "Okay."


@pytest.mark.parametrize(
    ("template", "think", "told"),
    [
        (THINKS, True, {"enable_thinking": True}),
        (THINKS, False, {"enable_thinking": False}),
        (THINKS, None, {}),
        ("reasoning_effort", "low", {"reasoning_effort": "low"}),
        ("reasoning_effort", "max", {"reasoning_effort": "high"}),
        ("reasoning_effort", True, {"reasoning_effort": "medium"}),
    ],
)
async def test_a_model_is_told_whether_and_how_much_to_think(template: str, think: Any, told: Any) -> None:
    api = served("Yes.", template)
    await answer(api, think=think)
    rendered = last_rendered(api)
    assert {
        name: rendered[name] for name in ("enable_thinking", "reasoning_effort") if name in rendered
    } == told


def constrained() -> Api:
    """A server whose answers can be held to a format."""
    tokenizer = TemplateTokenizer(HERMES)
    folder = resolve("embedded")
    settings = replace(SETTINGS, max_context_tokens=4000, vocab_size=4096, tokenizer_folder=folder)
    return Api(TokenGenerator("{}", tokenizer), settings, tokenizer=tokenizer)


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
async def test_a_format_holds_the_answer(form: Any) -> None:
    api = constrained()
    await answer(api, format=form)
    grammar = api.generator.requests[-1].sampling.grammar
    assert grammar is not None
    assert '"object"' in grammar.text
    await answer(api, format="")
    assert api.generator.requests[-1].sampling.grammar is None


async def test_a_format_that_is_none_is_refused() -> None:
    assert (await refusal(constrained(), format="yaml")).startswith("format must be")
    assert (await refusal(constrained(), format={"type": "nothing"})).startswith("format: ")


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_the_answers_tokens(stream: bool) -> None:
    found = (await answer(Api(FakeGenerator("hi")), stream=stream, logprobs=True, top_logprobs=2))["logprobs"]
    assert [(one["token"], one["logprob"], one["bytes"]) for one in found[:2]] == [
        ("h", -0.5, [104]),
        ("i", -0.5, [105]),
    ]
    assert [other["token"] for other in found[0]["top_logprobs"]] == ["h", "A"]
    assert "logprobs" not in await answer(Api(FakeGenerator("hi")), stream=stream)
    assert "top_logprobs goes with logprobs" in await refusal(served("x"), top_logprobs=2)


async def test_options_reach_the_engine() -> None:
    api = served("Yes.")
    options = {
        "num_predict": 7.0, "temperature": 0, "top_k": 4, "top_p": 0.5, "min_p": 0.25, "repeat_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 5, "stop": ["z"], "num_gpu": 1, "use_mmap": True,
        "mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1, "num_ctx": 2048,
    }  # fmt: skip
    got = await api.post(CHAT, {"model": NAME, "messages": ASK, "options": options})
    assert "x-baton-warning" not in got.headers
    sampling = api.generator.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (7, 0, 4, 0.5)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.25, 1.5, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)


async def test_what_open_webui_sends_is_taken_without_a_word() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "get_time", "arguments": {}}}
    body = {
        "model": f"{NAME}:latest",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "x", "images": []},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "noon", "tool_call_id": "c"},
        ],
        "stream": True,
        "tools": TOOLS,
        "options": {
            "temperature": 0.5,
            "num_predict": 9,
            "repeat_penalty": 1.1,
            "num_ctx": 4000,
            "use_mmap": True,
        },
        "metadata": {"chat_id": "1"},
    }
    got = await served("Yes.").post(CHAT, body)
    assert got.status_code == 200, got.text
    assert "x-baton-warning" not in got.headers


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 1}, (1.0, 0.0)),
        ({"repeat_last_n": -1, "repeat_penalty": 1.5}, (1.5, 0.0)),
        ({"repeat_last_n": 64, "repeat_penalty": 1.0, "presence_penalty": 0}, (1.0, 0.0)),
    ],
)
async def test_penalties_look_at_no_token_or_at_all(options: Any, wanted: Any) -> None:
    api = served("Yes.")
    got = await api.post(CHAT, {"model": NAME, "messages": ASK, "options": options})
    assert "x-baton-warning" not in got.headers
    sampling = api.generator.requests[-1].sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty) == wanted


@pytest.mark.parametrize(
    "options", [{"num_predict": -1}, {"num_predict": -2}, {"num_predict": 0}, {"num_predict": 10**6}]
)
async def test_an_answer_without_a_limit_may_fill_the_context(options: Any) -> None:
    api = served("Yes.")
    assert (await answer(api, options=options))["done_reason"] == "stop"
    request = api.generator.requests[-1]
    assert len(request.prompt) + request.sampling.max_tokens == 4000


async def test_the_likeliest_token_alone_and_a_seed_by_chance() -> None:
    api = served("Yes.")
    seeds = set[int | None]()
    for _ in range(2):
        await answer(api, options={"top_p": 0, "seed": -1})
        sampling = api.generator.requests[-1].sampling
        seeds.add(sampling.seed)
        assert 0 < sampling.top_p < 1e-3
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"keep_alive": 0}, "keep_alive: changes nothing, since the model does not sleep on demand"),
        ({"keep_alive": -1}, "keep_alive: changes nothing"),
        ({"keep_alive": "5m"}, "keep_alive: changes nothing"),
        (
            {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
            "options.repeat_last_n: penalties look at all tokens",
        ),
        ({"options": {"num_ctx": 8192}}, "options.num_ctx: this server's context has 4000 tokens"),
        ({"options": {"penalize_newline": False}}, "options.penalize_newline: penalties count line breaks"),
        ({"options": {"no_such_option": 1}}, "unknown and left out: options.no_such_option"),
        ({"truncate": True}, "truncate: a prompt that is too long is refused"),
        ({"shift": True}, "shift: an answer ends where the context does"),
        ({"no_such_field": 1}, "unknown and left out: no_such_field"),
        ({"think": True}, "reasoning effort 'medium': changes nothing"),
    ],
)
async def test_what_an_answer_does_without_is_named(more: Any, says: str) -> None:
    got = await served("Yes.").post(CHAT, {"model": NAME, "messages": ASK, **more})
    assert got.status_code == 200, got.text
    assert says in got.headers["x-baton-warning"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"options": {"mirostat": 2}}, "'options.mirostat' is not supported: this sampler does not exist here"),
        ({"options": {"typical_p": 0.5}}, "'options.typical_p' is not supported"),
        ({"options": {"tfs_z": 0.5}}, "'options.tfs_z' is not supported"),
        ({"options": {"temperature": 9}}, "options.temperature must be at most 2, not 9"),
        ({"options": {"top_k": "4"}}, "options.top_k must be an integer, not '4'"),
        ({"options": {"num_predict": 1.5}}, "options.num_predict"),
        ({"temperature": 0.5}, "'temperature' is not supported: it goes into options"),
        ({"max_tokens": 5}, "'max_tokens' is not supported: it is called options.num_predict here"),
        ({"keep_alive": "soon"}, "keep_alive: it must be a number of seconds, or a duration such as '5m'"),
        ({"keep_alive": True}, "keep_alive: it must be a number"),
        ({"think": "hard"}, "think must be"),
        ({"template": "{{ .Prompt }}"}, "'template' is not supported: a template is a program"),
        ({"messages": [{"role": "user", "content": "x", "thinking": "y"}]}, "only an assistant's message has"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role must be"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}, "messages[0].images[0]: the model"),
    ],
)  # fmt: skip
async def test_a_mistake_is_named_where_the_client_wrote_it(more: Any, says: str) -> None:
    assert says in await refusal(served("x"), **more)


@pytest.mark.parametrize("image", [data_url(encoded(SMALL)).partition(",")[2], data_url(encoded(SMALL))])
async def test_images_of_a_message_are_seen(image: str) -> None:
    api = seeing()
    message = {"role": "user", "content": "b", "images": [image]}
    whole = await answer(api, messages=[message], options={"num_predict": 2})
    (request,) = api.generator.requests
    assert [seen.data for seen in request.images] == [SEEN[0].data]
    assert whole["prompt_eval_count"] == len(request.prompt)
    assert "messages[0].images[0]: the data URL is no valid base64" in await refusal(
        api, messages=[{**message, "images": ["http://example.com/a.png"]}]
    )


async def test_an_answer_goes_on_where_the_last_message_ends() -> None:
    api = served("lo.")
    await answer(api, messages=[*ASK, {"role": "assistant", "content": "Hel"}])
    assert last_rendered(api)["continue_final_message"] is True
    for ended in (ASK, [*ASK, {"role": "assistant", "content": " "}]):
        await answer(api, messages=ended)
        assert not last_rendered(api)["continue_final_message"]


@pytest.mark.parametrize(
    ("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (0, "unload"), ("0s", "unload")]
)
async def test_a_chat_without_messages_loads_what_is_loaded(keep_alive: Any, reason: str) -> None:
    api = served("x")
    whole = (await api.post(CHAT, {"model": NAME, "keep_alive": keep_alive})).json()
    assert (whole["message"], whole["done"], whole["done_reason"]) == (
        {"role": "assistant", "content": ""},
        True,
        reason,
    )
    assert api.generator.requests == []


@pytest.mark.parametrize(("text", "limit", "reason"), [("Yes.", 2, "length"), ("Yes.", 50, "stop")])
@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_ended(text: str, limit: int, reason: str, stream: bool) -> None:
    whole = await answer(served(text), stream=stream, options={"num_predict": limit})
    assert whole["done_reason"] == reason


@pytest.mark.parametrize(
    ("error", "status"), [(Overloaded("full", retry_after_s=7), 429), (ReplicaLost("none"), 503)]
)
async def test_what_fails_before_a_stream_has_a_status(error: Exception, status: int) -> None:
    api = Api(FakeGenerator())
    api.generator.fail_at = (0, error)
    assert await refusal(api, status=status)


async def test_what_fails_within_a_stream_is_its_last_line() -> None:
    api = Api(FakeGenerator())
    api.generator.fail_at = (2, ReplicaLost("nobody is left"))
    every = await lines(api, CHAT, messages=ASK)
    assert [line.get("error", "") for line in every] == ["", "", "nobody is left"]


@pytest.mark.parametrize("stall_at", [0, 2])
async def test_a_silent_stream_sends_spaces_before_its_next_line(stall_at: int) -> None:
    generator = FakeGenerator("hello")
    generator.stall_at = stall_at
    async with serving(generator, replace(SETTINGS, keep_alive_s=0.02)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_post(CHAT, json.dumps({"model": NAME, "messages": ASK}).encode()))
        for _ in range(3):
            await asyncio.wait_for(reader.readuntil(b"1\r\n \r\n"), PATIENCE_S)
        generator.go_on.set()
        rest = await asyncio.wait_for(reader.readuntil(b'"done": true'), PATIENCE_S)
        writer.close()
        await writer.wait_closed()
    assert rest.count(b'"done": false') == 5 - stall_at


async def test_a_prompt_that_is_too_long_is_refused() -> None:
    said = await refusal(Api(FakeGenerator()), messages=[{"role": "user", "content": "x" * 300}])
    assert "too long" in said or "context" in said

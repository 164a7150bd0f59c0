"""What vLLM's clients ask for beyond OpenAI's schema, and what lm-evaluation-harness does."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from cluster.ingress.tenants.access import Access, Rules, TenantRules
from core.types import Request, Slo, TokenOut
from models.files.hub import resolve
from models.text.tokenizer import Tokenizer
from tests.cluster.ingress.api.fakes import END, FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, COMPLETIONS, OK, SETTINGS, Api

TEXT = "héllo"
IDS = [*TEXT.encode(), END]


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = Api(FakeGenerator(TEXT))
    yield api
    await api.http.aclose()


async def choices(api: Api, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await api.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


async def chunks(api: Api, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await api.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def sampled(every: Sequence[dict[str, Any]]) -> list[int]:
    return [i for chunk in every for choice in chunk["choices"] for i in choice.get("token_ids", ())]


async def test_token_ids_of_prompt_and_answer(api: Api) -> None:
    wish = {"return_token_ids": True}
    (choice,) = await choices(api, COMPLETIONS, {**OK, **wish})
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([ord("x")], IDS)
    every = await chunks(api, COMPLETIONS, {**OK, **wish})
    assert every[0]["choices"][0]["prompt_token_ids"] == [ord("x")]
    assert sampled(every) == IDS
    whole = (await api.post(CHATS, {**CHAT, **wish})).json()
    assert bytes(whole["prompt_token_ids"]).decode() == "user: x\nassistant: "
    assert whole["choices"][0]["token_ids"] == IDS
    every = await chunks(api, CHATS, {**CHAT, **wish})
    assert every[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert sampled(every) == IDS


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, OK), (CHATS, CHAT)])
async def test_usage_in_each_chunk(api: Api, path: str, body: dict[str, Any]) -> None:
    options = {"stream_options": {"continuous_usage_stats": True, "include_usage": True}}
    *every, last = await chunks(api, path, {**body, **options, "n": 2})
    totals = [chunk["usage"]["completion_tokens"] for chunk in every]
    assert totals == sorted(totals)
    assert totals[-1] == last["usage"]["completion_tokens"] == 2 * len(IDS)
    assert last["choices"] == []
    for chunk in every:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]


async def test_what_may_be_sampled_reaches_the_engine(api: Api) -> None:
    await choices(api, COMPLETIONS, {**OK, "allowed_token_ids": [97, 98], "bad_words": ["no", " no", "a"]})
    sampling = api.generator.requests[-1].sampling
    assert sampling.allowed_token_ids == (97, 98)
    assert [bytes(word).decode() for word in sampling.bad_words] == ["no", " no", "a", " a"]


async def test_echo_with_logprobs_says_how_likely_the_prompt_was(api: Api) -> None:
    body = {**OK, "prompt": "abé", "echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,) = await choices(api, COMPLETIONS, body)
    found = choice["logprobs"]
    assert choice["text"] == "abéh"
    assert found["token_logprobs"] == [None, -1.0, -2.0, -3.0, -0.5]
    assert found["tokens"][:2] == ["a", "b"]
    assert found["top_logprobs"][:2] == [None, {"A": -0.25, "b": -1.0}]
    assert found["text_offset"] == [0, 1, 2, 2, 3], "a token that ends no character adds no text"
    assert api.generator.requests[-1].sampling.num_prompt_logprobs == 1
    streamed = await chunks(api, COMPLETIONS, body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    for name, values in found.items():
        assert [value for part in parts for value in part[name]] == values


@pytest.mark.parametrize("stream", [False, True])
async def test_no_token_but_the_prompt(api: Api, stream: bool) -> None:
    body = {**OK, "prompt": ["ab", "cde"], "echo": True, "logprobs": 0, "max_tokens": 0}
    if stream:
        *every, last = await chunks(api, COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        usage, texts = last["usage"], ["", ""]
        for chunk in every:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert {chunk["choices"][0]["finish_reason"] for chunk in every} == {None, "length"}
    else:
        whole = (await api.post(COMPLETIONS, body)).json()
        usage, texts = whole["usage"], [choice["text"] for choice in whole["choices"]]
        assert [choice["logprobs"]["token_logprobs"] for choice in whole["choices"]] == [
            [None, -1.0],
            [None, -1.0, -2.0],
        ]
        assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    assert texts == ["ab", "cde"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 0, 5)
    assert {request.sampling.max_tokens for request in api.generator.requests} == {1}


async def test_prompt_logprobs_in_vllms_form(api: Api) -> None:
    (choice,) = await choices(api, COMPLETIONS, {**OK, "prompt": "ab", "prompt_logprobs": 1})
    want = [
        None,
        {
            "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
            "65": {"logprob": -0.25, "rank": 1, "decoded_token": "A"},
        },
    ]
    assert choice["prompt_logprobs"] == want
    assert choice["logprobs"] is None
    whole = (await api.post(CHATS, {**CHAT, "prompt_logprobs": 0, "n": 2})).json()
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert [len(each) for each in whole["prompt_logprobs"][1:]] == [1] * (whole["usage"]["prompt_tokens"] - 1)
    asked = [request.sampling.num_prompt_logprobs for request in api.generator.requests[-2:]]
    assert asked == [0, -1], "of a prompt with several answers once"


@pytest.mark.parametrize("more", [{"n": 3}, {"n": 1, "best_of": 3}, {"n": 2, "best_of": 3}])
async def test_every_answer_has_the_log_probabilities_of_its_prompt(api: Api, more: dict[str, int]) -> None:
    body = {**OK, "prompt": ["ab", "cde"], "max_tokens": 1, "temperature": 1.0, **more}
    scored = await choices(api, COMPLETIONS, {**body, "prompt_logprobs": 0})
    assert [len(choice["prompt_logprobs"]) for choice in scored] == [2] * more["n"] + [3] * more["n"]
    echoed = await choices(api, COMPLETIONS, {**body, "echo": True, "logprobs": 1})
    found = [choice["logprobs"]["token_logprobs"] for choice in echoed]
    assert found == [[None, -1.0, -0.5]] * more["n"] + [[None, -1.0, -2.0, -0.5]] * more["n"]
    wanted = [request.sampling.num_prompt_logprobs for request in api.generator.requests[-6:]]
    assert sorted(wanted) == [-1, -1, -1, -1, 1, 1], "each prompt is scored once"


class FirstIsLast(FakeGenerator):
    """The first choice of a prompt begins when the others are over."""

    async def generate(self, request: Request, shared: object = None):
        if request.sampling.num_prompt_logprobs >= 0:
            while len(self.finished) % 3 < 2:
                await asyncio.sleep(0)
        async for token in super().generate(request):
            yield token


async def test_a_stream_tells_how_likely_the_prompt_was_before_each_answer() -> None:
    api = Api(FirstIsLast("xy"))
    body = {**OK, "prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 2, "n": 3}
    found: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in await chunks(api, COMPLETIONS, body):
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert [found[index] for index in range(3)] == [[None, -1.0, -2.0, -0.5, -0.5]] * 3
    await api.http.aclose()


class Uneven(FakeGenerator):
    """The choice with the seed s has the log-probability -|s - 6|."""

    async def generate(self, request: Request, shared: object = None):
        async for token in super().generate(request):
            yield self._scored(token, request.sampling.seed)

    def _scored(self, token: TokenOut, seed: int) -> TokenOut:
        return replace(token, token=97 + seed if token.token != END else END, logprob=-abs(seed - 6.0))


async def test_the_best_of_several_have_the_likeliest_tokens() -> None:
    api = Api(Uneven("x"))
    found = await choices(api, COMPLETIONS, {**OK, "prompt": ["a", "b"], "best_of": 5, "n": 2, "seed": 3})
    assert [(choice["index"], choice["text"]) for choice in found] == [(0, "g"), (1, "f"), (2, "g"), (3, "f")]
    assert {choice["logprobs"] for choice in found} == {None}
    usage = (await api.post(COMPLETIONS, {**OK, "best_of": 5, "seed": 3})).json()["usage"]
    assert usage["completion_tokens"] == 10, "of which nine are not shown"
    await api.http.aclose()


def test_priority_stays_within_what_the_tenant_may_have() -> None:
    classes = {
        name: Slo(name=name, priority=level) for name, level in (("fast", 2), ("standard", 0), ("batch", -3))
    }
    access = Access(Rules(classes, {"": TenantRules(slo_classes=("standard", "fast"))}))
    tenant = access.holder_of("").tenant
    assert access.slo(tenant, None, None, 0) is classes["standard"]
    assert access.slo(tenant, None, None, -2) == replace(classes["standard"], priority=2)
    assert access.slo(tenant, None, None, 1).priority == -1
    assert access.slo(tenant, None, None, 1000).priority == -3
    with pytest.raises(Exception, match="priority -3 is above what this tenant may have: -2 is the least"):
        access.slo(tenant, None, None, -3)


async def test_the_server_describes_itself(api: Api) -> None:
    version = (await api.http.get("/version")).json()["version"]
    description = (await api.http.get("/openapi.json")).json()
    assert description["info"]["version"] == version
    OpenAPIV31SpecValidator(description).validate()
    body = description["paths"][CHATS]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert "messages" in description["components"]["schemas"][body.rpartition("/")[2]]["required"]
    known = {path for path, methods in description["paths"].items() if "post" in methods}
    assert known >= {CHATS, COMPLETIONS, "/v1/responses", "/v1/messages", "/tokenize"}


async def test_too_many_stops_are_said_to_be_too_many(api: Api) -> None:
    for stops, says in (
        (["a"] * 65, "at most 64 items"),
        (["a" * 500] * 9, "stop: 4500 characters together"),
    ):
        answer = await api.post(COMPLETIONS, {**OK, "stop": stops})
        assert says in answer.json()["error"]["message"]


async def test_an_answer_ends_at_one_of_many_stops(api: Api) -> None:
    (choice,) = await choices(api, COMPLETIONS, {**OK, "stop": [*map(str, range(63)), "ll"]})
    assert choice["text"] == "hé"


@pytest.mark.parametrize(("wish", "kept"), [("in_memory", True), ("24h", True), ("none", False)])
async def test_a_prefix_stays_unless_nobody_goes_on_from_it(api: Api, wish: str, kept: bool) -> None:
    await choices(api, CHATS, CHAT | {"prompt_cache_retention": wish})
    assert api.generator.requests[0].retain is kept


BEGUN = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so fa"}]


async def test_an_answer_that_was_begun_goes_on(api: Api) -> None:
    tokenizer = Tokenizer(resolve("embedded"))
    begun = tokenizer.render_chat(BEGUN, add_generation_prompt=False, continue_final_message=True)
    assert begun == "<|user|>\nx\n<|assistant|>\nso fa"
    body = CHAT | {"messages": BEGUN, "continue_final_message": True}
    (choice,) = await choices(api, CHATS, body)
    assert choice["message"]["content"] == TEXT
    assert not bytes(api.generator.requests[0].prompt).endswith(b"assistant: ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": BEGUN[:1]}, "the last message must be the assistant's"),
        ({"messages": [BEGUN[0], {"role": "assistant", "content": ""}]}, "with text"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
async def test_what_cannot_go_on_is_refused(api: Api, change: dict[str, Any], says: str) -> None:
    answer = await api.post(CHATS, CHAT | {"messages": BEGUN, "continue_final_message": True} | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "continue_final_message"
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("wish", "left"),
    [
        ({"truncate_prompt_tokens": 4}, "6789"),
        ({"truncate_prompt_tokens": 400, "max_tokens": 8}, None),
        ({"truncate_prompt_tokens": 150}, "x" * 140 + "0123456789"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 150}, "x" * 40 + "0123456789"),
        ({"truncate_prompt_tokens": -1}, "x" * 189 + "0123456789"),
        ({"truncate_prompt_tokens": 0}, None),
        ({"truncate_prompt_tokens": 4, "suffix": "x"}, None),
    ],
)
async def test_the_end_of_a_long_prompt_is_taken(api: Api, wish: dict[str, Any], left: str | None) -> None:
    text = "x" * 500 + "0123456789"
    for prompt in (text, list(text.encode())):
        answer = await api.post(COMPLETIONS, {**OK, "prompt": prompt, **wish})
        if left is None:
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] in ("truncate_prompt_tokens", "suffix")
        else:
            assert answer.status_code == 200, answer.text
            assert bytes(api.generator.requests[-1].prompt).decode() == left


async def test_the_end_of_a_long_conversation_is_taken(api: Api) -> None:
    messages = [{"role": "user", "content": "y" * 500}]
    wish = {"messages": messages, "truncate_prompt_tokens": -1, "max_completion_tokens": 100}
    await choices(api, CHATS, CHAT | wish)
    prompt = bytes(api.generator.requests[-1].prompt).decode()
    assert len(prompt) == SETTINGS.max_context_tokens - 100
    assert prompt.endswith("y\nassistant: ")


@pytest.mark.parametrize(
    "field", ["regex", "ebnf", "lora_path", "enable_thinking", "chat_template", "request_id"]
)
async def test_other_servers_fields_are_refused_with_what_there_is(api: Api, field: str) -> None:
    assert (await api.post(CHATS, CHAT | {field: None})).status_code == 200
    error = (await api.post(CHATS, CHAT | {field: "x"})).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)


@pytest.mark.parametrize("num_cached", [0, 5])
async def test_usage_has_the_cached_tokens(api: Api, num_cached: int) -> None:
    api.generator.num_cached = num_cached
    usage = (await api.post(CHATS, CHAT | {"n": 2})).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": num_cached}
    usage = (await api.post(COMPLETIONS, {**OK, "prompt": ["xxxxxx", "yyyyyy"]})).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2 * num_cached}
    every = await chunks(api, CHATS, CHAT | {"stream_options": {"include_usage": True}})
    assert every[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": num_cached}


async def test_every_name_of_the_model_is_answered() -> None:
    api = Api(FakeGenerator(TEXT), replace(SETTINGS, aliases=("gpt-4", "team/other")))
    names = [model["id"] for model in (await api.http.get("/v1/models")).json()["data"]]
    assert names == [SETTINGS.model_name, "gpt-4", "team/other"]
    for name in names:
        assert (await api.http.get(f"/v1/models/{name}")).json()["id"] == name
        assert (await api.post(CHATS, CHAT | {"model": name})).json()["model"] == name
    refused = await api.post(CHATS, CHAT | {"model": "nobody"})
    assert refused.status_code == 404
    assert "'team/other'" in refused.json()["error"]["message"]


async def test_pages_of_allowed_origins_may_ask() -> None:
    api = Api(FakeGenerator(TEXT), replace(SETTINGS, allowed_origins=("https://chat.example.com",)))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, allowed in (("https://chat.example.com", True), ("https://other.example.com", False)):
        before = await api.http.options(CHATS, headers={"origin": origin, **asked})
        assert (before.status_code == 200) == allowed
        answer = await api.post(CHATS, CHAT, origin=origin)
        assert (answer.headers.get("access-control-allow-origin") == origin) == allowed


async def test_without_origins_no_page_of_another_site_may_ask(api: Api) -> None:
    answer = await api.post(CHATS, CHAT, origin="https://chat.example.com")
    assert "access-control-allow-origin" not in answer.headers

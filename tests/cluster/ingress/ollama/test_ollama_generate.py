"""/api/generate: a prompt as a turn of a chat, as it is, or around what is wanted."""

from dataclasses import replace
from typing import Any

import pytest

from models.files.hub import resolve
from tests.cluster.ingress.api.fakes import END, NAME, FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import last_rendered, served
from tests.cluster.ingress.images.test_images import SEEN, SMALL, seeing
from tests.cluster.ingress.ollama.ollama_answers import GENERATE, answer, refusal
from tests.cluster.ingress.openai.test_fill_in_middle import FAMILIES, Beginning
from tests.models.seeing_checkpoints import data_url, encoded

THINKS, MARKS = "enable_thinking <think></think>", ["<think>", "</think>"]
PICTURE = data_url(encoded(SMALL)).partition(",")[2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_a_users_turn_after_the_system_message(stream: bool) -> None:
    api = served("Okay.\n</think>\n\nYes.", THINKS, MARKS, "<think>\n")
    whole = await answer(api, GENERATE, stream=stream, prompt="Hi", system="Be brief.", think=True)
    assert (whole["response"], whole["thinking"], whole["done_reason"]) == ("Yes.", "Okay.", "stop")
    assert last_rendered(api)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    (request,) = api.generator.requests
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (len(request.prompt), whole["eval_count"])
    assert whole["total_duration"] >= whole["eval_duration"] >= 0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_prompt_goes_on_after_the_context_of_the_last_answer(stream: bool) -> None:
    api = Api(FakeGenerator("hello"))
    whole = await answer(api, GENERATE, stream=stream, prompt="a")
    first = api.generator.requests[-1].prompt
    assert whole["context"] == [*first, *b"hello", END]
    again = await answer(api, GENERATE, stream=stream, prompt="b", context=whole["context"])
    second = api.generator.requests[-1].prompt
    assert bytes(second[len(whole["context"]) :]) == b"user: b\nassistant: "
    assert second[: len(whole["context"])] == tuple(whole["context"])
    assert again["prompt_eval_count"] == len(second)


class Begun(Beginning):
    """Its template, too, begins with what begins every text."""

    def render_chat(self, *args: Any, **more: Any) -> str:
        return "<s>" + super().render_chat(*args, **more)


async def test_what_begins_every_text_is_not_repeated_after_a_context() -> None:
    api = Api(FakeGenerator("x"), replace(SETTINGS, vocab_size=400), tokenizer=Begun(()))
    context = (await answer(api, GENERATE, prompt="a"))["context"]
    await answer(api, GENERATE, prompt="a", context=context)
    first, second = (request.prompt for request in api.generator.requests)
    assert first[0] == 300
    assert second == (*context, *first[1:])


async def test_a_context_is_of_the_models_own_tokens_and_fits() -> None:
    assert "999" in await refusal(Api(FakeGenerator()), GENERATE, prompt="a", context=[999])
    assert "prompt" in await refusal(Api(FakeGenerator()), GENERATE, prompt="a", context=[65] * 300)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_raw_prompt_has_no_template_and_no_context(stream: bool) -> None:
    api = Api(FakeGenerator("hello"))
    whole = await answer(api, GENERATE, stream=stream, prompt="[INST] a", raw=True)
    assert bytes(api.generator.requests[-1].prompt) == b"[INST] a"
    assert (whole["response"], "context" in whole) == ("hello", False)


async def test_a_raw_prompt_can_have_a_format() -> None:
    api = Api(FakeGenerator("{}"), replace(SETTINGS, vocab_size=4096, tokenizer_folder=resolve("embedded")))
    await answer(api, GENERATE, prompt="a", raw=True, format="json")
    grammar = api.generator.requests[-1].sampling.grammar
    assert grammar is not None
    assert '"object"' in grammar.text


@pytest.mark.parametrize("prompt", ["def f(", ""])
async def test_a_suffix_asks_for_what_stands_before_it(prompt: str) -> None:
    special, want = FAMILIES["Qwen2.5-Coder"]
    tokenizer = Beginning(special)
    api = Api(FakeGenerator("x"), replace(SETTINGS, vocab_size=400), tokenizer=tokenizer)
    whole = await answer(api, GENERATE, prompt=prompt, suffix="return x")
    told = tokenizer.decode(api.generator.requests[-1].prompt, skip_special_tokens=False)
    assert told == "<s>" + want.replace("def f(", prompt)
    assert (whole["response"], "context" in whole) == ("x", False)
    assert "no tokens for text between" in await refusal(
        Api(FakeGenerator()), GENERATE, prompt="a", suffix="b"
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"raw": True, "system": "s"}, "system does not go with raw=true"),
        ({"raw": True, "suffix": "s"}, "suffix does not go with raw=true"),
        ({"raw": True, "context": [65]}, "context does not go with raw=true"),
        ({"raw": True, "images": ["x"]}, "images does not go with raw=true"),
        ({"raw": True, "think": True}, "think does not go with raw=true"),
        ({"suffix": "s", "system": "s"}, "system does not go with suffix"),
        ({"suffix": "s", "context": [65]}, "context does not go with suffix"),
        ({"context": [65], "images": ["x"]}, "images does not go with context"),
        ({"template": "{{ .Prompt }}"}, "'template' is not supported: a template is a program"),
        ({"width": 512}, "'width' is not supported: no images are made here"),
        ({"top_p": 0.5}, "'top_p' is not supported: it goes into options"),
        ({"images": ["x"]}, "images[0]: the model"),
    ],
)
async def test_what_does_not_go_together_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    assert says in await refusal(Api(FakeGenerator()), GENERATE, prompt="a", **fields)


async def test_neutral_values_of_what_is_refused_are_taken() -> None:
    neutral = {
        "template": "",
        "system": "",
        "suffix": "",
        "context": [],
        "raw": False,
        "think": False,
        "width": 0,
    }
    got = await Api(FakeGenerator()).post(
        GENERATE, {"model": NAME, "prompt": "a", "stream": False, **neutral, "images": []}
    )
    assert got.json()["response"] == "hello world"


async def test_images_go_before_the_prompt() -> None:
    api = seeing()
    whole = await answer(api, GENERATE, prompt="b", images=[PICTURE], options={"num_predict": 2})
    (request,) = api.generator.requests
    assert [seen.data for seen in request.images] == [SEEN[0].data]
    assert "context" not in whole, "tokens without their images would be another prompt"


@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), (0, "unload")])
async def test_an_empty_prompt_loads_what_is_loaded(keep_alive: Any, reason: str) -> None:
    api = Api(FakeGenerator())
    whole = (await api.post(GENERATE, {"model": NAME, "keep_alive": keep_alive})).json()
    assert (whole["response"], whole["done"], whole["done_reason"]) == ("", True, reason)
    assert api.generator.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities(stream: bool) -> None:
    whole = await answer(Api(FakeGenerator("hi")), GENERATE, stream=stream, prompt="a", logprobs=True)
    assert [one["token"] for one in whole["logprobs"][:2]] == ["h", "i"]
    assert [one["top_logprobs"] for one in whole["logprobs"][:2]] == [[], []]

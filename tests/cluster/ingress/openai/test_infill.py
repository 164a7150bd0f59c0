"""/infill as llama.cpp's editor plugins ask, and small routes that platforms ask for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from cluster.ingress.tenants.access import Rules, TenantRules
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, SETTINGS, Api
from tests.cluster.ingress.openai.test_fill_in_middle import FAMILIES, Beginning

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
BODY: dict[str, Any] = {"input_prefix": "def f(", "input_suffix": "return x", "prompt": "  "}


def filler(special: tuple[str, ...] = QWEN, text: str = "x):", context: int = 200) -> Api:
    settings = replace(SETTINGS, max_context_tokens=context, vocab_size=400)
    return Api(FakeGenerator(text), settings, tokenizer=Beginning(special))


def prompt(api: Api) -> str:
    return api.tokenizer.decode(api.generator.requests[-1].prompt, skip_special_tokens=False)


async def test_the_middle_is_what_the_model_goes_on_with() -> None:
    api = filler()
    answer = await api.post("/infill", BODY)
    assert prompt(api) == "<s><|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>  "
    said = answer.json()
    assert (said["content"], said["stop"], said["stop_type"], said["model"]) == ("x):", True, "eos", NAME)
    assert (said["tokens_evaluated"], said["tokens_predicted"]) == (len(api.generator.requests[0].prompt), 4)


async def test_other_files_come_first_as_the_family_has_them() -> None:
    extra = [{"filename": "a.py", "text": "A = 1"}, {"text": "B = 2"}]
    api = filler()
    await api.post("/infill", {**BODY, "input_extra": extra})
    assert prompt(api) == (
        "<s><|repo_name|>repository\n<|file_sep|>a.py\nA = 1\n<|file_sep|>file\nB = 2\n<|file_sep|>current\n"
        "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>  "
    )
    assert api.tokenizer.special_tokens["<|file_sep|>"] in api.generator.requests[0].sampling.stop_token_ids
    api = filler(FAMILIES["DeepSeek-Coder"][0])
    await api.post("/infill", {**BODY, "input_extra": extra})
    assert prompt(api).startswith("<s>A = 1\nB = 2\n<｜fim▁begin｜>def f(")


async def test_the_first_of_other_files_are_left_out_where_all_are_too_long() -> None:
    extra = [{"filename": f"{number}.py", "text": "x" * 60} for number in range(8)]
    api = filler(context=260)
    answer = await api.post("/infill", {**BODY, "input_extra": extra, "n_predict": 10})
    assert answer.status_code == 200, answer.text
    assert "7.py" in prompt(api)
    assert "0.py" not in prompt(api)


async def test_a_stream_ends_with_the_event_that_says_stop() -> None:
    answer = await filler().post("/infill", {**BODY, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert "".join(event["content"] for event in events) == "x):"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["stop_type"] == "eos"


async def test_how_it_ended_is_said() -> None:
    limit = (await filler().post("/infill", {**BODY, "n_predict": 2})).json()
    assert (limit["content"], limit["stop_type"], limit["tokens_predicted"]) == ("x)", "limit", 2)
    word = (await filler().post("/infill", {**BODY, "stop": [":"]})).json()
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("x)", "word", ":")
    none = (await filler().post("/infill", {**BODY, "n_predict": 0})).json()
    assert (none["content"], none["tokens_predicted"]) == ("", 0)


async def test_what_its_plugins_send_is_taken() -> None:
    body = {
        **BODY, "id_slot": 0, "n_predict": 128, "n_indent": 4, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p"],
        "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "response_fields": ["content"],
        "seed": -1, "repeat_penalty": 1.1,
    }  # fmt: skip
    api = filler(context=300)
    answer = await api.post("/infill", body)
    assert answer.status_code == 200, answer.text
    sampling = api.generator.requests[0].sampling
    assert (sampling.top_k, sampling.repetition_penalty) == (40, pytest.approx(1.1))
    for name in ("t_max_predict_ms", "n_indent"):
        assert name in answer.headers["x-baton-warning"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**BODY, "temperature": 9}, "temperature"),
        ({**BODY, "input_extra": [{"filename": "a"}]}, "input_extra"),
        ({**BODY, "input_prefix": "x" * 500}, "input_prefix"),
        ({**BODY, "model": "other"}, "model"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    refused = await filler().post("/infill", body)
    assert refused.status_code in (400, 404)
    assert refused.json()["error"]["param"] == field


async def test_a_model_without_the_tokens_says_so() -> None:
    refused = await Api(FakeGenerator()).post("/infill", BODY)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_suffix")


async def test_platforms_ping_without_a_key() -> None:
    rules = Rules(CLASSES, {"acme": TenantRules((SecretStr("key"),))})
    api = Api(FakeGenerator(), SETTINGS, rules)
    assert (await api.http.get("/ping")).status_code == 200
    assert (await api.http.post("/ping")).status_code == 200
    assert (await api.http.get("/tokenizer_info")).status_code == 401


async def test_a_tokenizer_is_described_as_its_own_file_does(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 8}'
    )
    api = Api(FakeGenerator(), replace(SETTINGS, tokenizer_folder=tmp_path))
    api.tokenizer.template = "{{ messages }}"
    described = (await api.http.get("/tokenizer_info")).json()
    assert described == {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 8,
        "vocab_size": 257,
        "chat_template": "{{ messages }}",
    }
    assert (await Api(FakeGenerator()).http.get("/tokenizer_info")).json()["chat_template"] is None

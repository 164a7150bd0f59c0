"""Calls and stop strings as the tokens of published tokenizers spell them, through the API."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from models.text.tokenizer import load_tokenizer
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import COMPLETIONS, SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import TOOLS, TokenGenerator
from tests.cluster.ingress.generation.test_stops import chat
from tests.cluster.ingress.openai.test_tools import TWO, called
from tests.cluster.ingress.parsers.family_markup import MARKUPS
from tests.cluster.ingress.parsers.family_templates import FAMILIES
from tests.cluster.ingress.parsers.written_calls import CALL, TIME
from tests.world.artefacts import artefact, model_folder

pytestmark = pytest.mark.slow
STREAMS = pytest.mark.parametrize("stream", [False, True])
MODELS = {
    # a tokenizer: the format of its calls, and a special token that has no text
    "qwen3": ("hermes", "<|im_start|>"),
    "deepseek_v3": ("deepseek_v3", "<｜end▁of▁sentence｜>"),
    "llama3_1": ("llama3_json", "<|start_header_id|>"),
    "gptoss": ("harmony", "<|endoftext|>"),
}


class Says(TokenGenerator):
    """Generates the tokens of a text."""

    def __init__(self, text: str, tokenizer: Any) -> None:
        super().__init__("", tokenizer)
        self.ids = tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Load a tokenizer once. gpt-oss' is published without its template."""

    @cache
    def load(name: str) -> Any:
        if name != "gptoss":
            return load_tokenizer(artefact(name))
        folder = model_folder(name, tmp_path_factory.mktemp("tokenizer"))
        (folder / "chat_template.jinja").write_text(FAMILIES["gpt-oss"].template)
        return load_tokenizer(folder)

    return load


def serving(name: str, tokenizer: Any, text: str) -> Api:
    settings = replace(
        SETTINGS,
        max_context_tokens=4000,
        vocab_size=tokenizer.vocab_size,
        tool_call_parser=MODELS[name][0],
        reasoning_parser="harmony" if name == "gptoss" else "none",
    )
    return Api(Says(text, tokenizer), settings, tokenizer=tokenizer)


@STREAMS
@pytest.mark.parametrize("name", MODELS)
async def test_stop_strings_leave_calls_whole(
    tokenizers: Callable[[str], Any], name: str, stream: bool
) -> None:
    markup = MARKUPS[MODELS[name][0]]
    written = markup.write(CALL) if markup.one_call else "I look.\n" + markup.write(CALL, TIME)
    stops = ["days", "ürich", '"', "}", "name"]
    choice, _ = await chat(serving(name, tokenizers(name), written), stream, tools=TOOLS, stop=stops)
    assert called(choice.message) == (TWO[:1] if markup.one_call else TWO)
    assert (choice.message.content or "") == ("" if markup.one_call else "I look.")
    assert choice.finish_reason == "tool_calls"


@STREAMS
@pytest.mark.parametrize("name", MODELS)
async def test_a_stop_string_names_a_special_token(
    tokenizers: Callable[[str], Any], name: str, stream: bool
) -> None:
    special, tokenizer = MODELS[name][1], tokenizers(name)
    lead = "<|channel|>final<|message|>" if name == "gptoss" else ""
    for tools in (TOOLS, None):
        api = serving(name, tokenizer, f"{lead}Grüezi 水{special}user\n\nNo.")
        choice, _ = await chat(api, stream, stop=[special], **({"tools": tools} if tools else {}))
        assert (choice.message.content, choice.finish_reason) == ("Grüezi 水", "stop")
        assert api.generator.closed == ["r1"]
    body = {"model": NAME, "prompt": "x", "max_tokens": 99, "stop": f"{special}user"}
    answer = (await serving(name, tokenizer, f"Grüezi{special}user\n\nNo.").post(COMPLETIONS, body)).json()[
        "choices"
    ][0]
    assert (answer["text"], answer["finish_reason"]) == ("Grüezi", "stop")
    answer = (await serving(name, tokenizer, f"Grüezi{special} No.").post(COMPLETIONS, body)).json()[
        "choices"
    ][0]
    assert (answer["text"], answer["finish_reason"]) == ("Grüezi No.", "stop")

"""Grammars over published tokenizers: what the models really write is admitted, and nothing else."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

from cluster.ingress.bodies.structured import StructuredOutputs, structured_grammar
from cluster.ingress.generation.chat_format import ChatFormat, PreparedChat
from core.config.answer_formats import ToolFormat
from core.plan import NewSeq
from core.types import Grammar, SamplingParams
from engine.execution.sampling.grammar_matcher import GuidanceMatchers, Matching
from models.text.decoded_tokens import bytes_of_tokens
from models.text.grammar_vocabulary import load_vocabulary
from models.text.tokenizer import Tokenizer, load_tokenizer
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.templated import chat_asked
from tests.cluster.ingress.parsers.family_templates import FAMILIES
from tests.cluster.ingress.parsers.recorded_texts import WEATHER
from tests.world.artefacts import artefact, model_folder

NUM_LOGITS = {
    "qwen3": 151936,
    "deepseek_v3": 129280,
    "gemma3": 262144,
    "llama2": 32000,
    "llama3_1": 128256,
    "gptoss": 201088,
}
"""The width of the published models' logits. Gemma 3 1B's tokenizer has a token more."""
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class World:
    name: str
    folder: Path
    tokenizer: Tokenizer
    matchers: GuidanceMatchers

    @property
    def size(self) -> int:
        return NUM_LOGITS[self.name]

    def start(self, grammar: Grammar) -> Matching:
        end = self.tokenizer.eos_token_id
        assert end is not None
        sampling = SamplingParams(grammar=grammar, stop_token_ids=(end,))
        return self.matchers.start(NewSeq("k", (1,), 1, sampling), grammar)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text that stands within a longer one, before which SentencePiece puts no space."""
        before = "\n" if self.name == "llama2" else ""
        num_before = len(self.tokenizer.encode(before, add_special_tokens=False))
        return self.tokenizer.encode(before + text, add_special_tokens=False)[num_before:]

    def refused(self, grammar: Grammar, ids: Sequence[int]) -> str:
        """Where the masks refuse a whole answer of these tokens; empty: nowhere."""
        matching = self.start(grammar)
        for number, token in enumerate([*ids, self.tokenizer.eos_token_id]):
            assert token is not None
            if not allows(matching, token):
                return f"{self.tokenizer.decode([token])!r} behind {self.tokenizer.decode(ids[:number])!r}"
            matching.advance((token,))
        return ""


@cache
def world(name: str) -> World:
    folder = artefact(name)
    return World(name, folder, load_tokenizer(folder), GuidanceMatchers(folder, NUM_LOGITS[name]))


def allows(matching: Matching, token: int) -> bool:
    return bool(int(matching.mask.bits[token // 32]) >> (token % 32) & 1)


def allowed(matching: Matching) -> set[int]:
    return {*np.flatnonzero(np.unpackbits(matching.mask.bits.view(np.uint8), bitorder="little")).tolist()}


def text_of_each(tokenizer: Tokenizer, num_ids: int) -> Iterator[tuple[int, str]]:
    """What each token adds to a text."""
    anchor = tokenizer.encode("xa", add_special_tokens=False)[-1:]
    before = len(tokenizer.decode(anchor))
    for token in range(num_ids):
        yield token, tokenizer.decode([*anchor, token], skip_special_tokens=False)[before:]


@pytest.mark.parametrize("name", NUM_LOGITS)
def test_the_bytes_of_every_token_are_what_the_tokenizer_decodes(name: str) -> None:
    here = world(name)
    tokens = bytes_of_tokens(here.tokenizer.backend, here.tokenizer.vocab_size)
    for token, text in text_of_each(here.tokenizer, here.tokenizer.vocab_size):
        assert tokens[token].decode("utf-8", "replace") == text


@pytest.mark.parametrize("name", NUM_LOGITS)
def test_the_special_tokens_are_the_tokenizers_own(name: str) -> None:
    here = world(name)
    vocabulary = load_vocabulary(here.folder, here.size)
    assert vocabulary.vocab_size == here.size
    for text, token in here.tokenizer.added_tokens.items():
        is_special = text in here.tokenizer.special_tokens
        if token < here.size and (name, text) != ("gemma3", "<mask>"):  # transformers' class alone has it
            assert vocabulary.is_special_token(token) == is_special, text


CHOICES = ("<h1>Zürich</h1>", "<think> 3", " hello 水 🙂", "</s>x", "\n\t{}")


@pytest.mark.parametrize("name", NUM_LOGITS)
def test_masks_are_those_of_brute_force(name: str) -> None:
    """The allowed tokens are those whose text begins a choice, of those that the model has logits for."""
    here = world(name)
    matching = here.start(Grammar(text=structured_grammar(structured(choice=list(CHOICES)))))
    tokens = bytes_of_tokens(here.tokenizer.backend, here.size)
    special = {*here.tokenizer.special_tokens.values()}

    def begins_one(token: int, text: str) -> bool:
        if "\ufffd" in text:  # a part of a character
            return any(choice.encode().startswith(tokens[token]) for choice in CHOICES)
        return bool(text) and any(choice.startswith(text) for choice in CHOICES)

    texts = text_of_each(here.tokenizer, min(here.size, here.tokenizer.vocab_size))
    assert allowed(matching) == {
        token for token, text in texts if token not in special and begins_one(token, text)
    }


def structured(**asked: Any) -> StructuredOutputs:
    return StructuredOutputs.model_validate(asked)


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", NUM_LOGITS)
@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"regex": "<h1>[a-z ]{1,20}</h1>"}, "<h1>a title</h1>"),
        ({"regex": "<b>x</b><td>[0-9]</td>"}, "<b>x</b><td>4</td>"),
        ({"choice": ["<think>", "</think>", "<tool_call>"]}, "<think>"),
        ({"choice": ["<think>", "</think>", "<tool_call>"]}, "<tool_call>"),
        ({"json": {"const": "<think>"}}, '"<think>"'),
        ({"json": {"enum": ["<h1>", "<tool_call>"]}}, '"<tool_call>"'),
        ({"json": {"type": "object"}}, '{"html": "<h1>A <b>b</b></h1>", "z": "Zürich 水 🙂"}'),
        ({"json": {"const": "e\u0301 </s><|im_end|>"}}, None),
    ],
)  # fmt: skip
def test_words_of_added_tokens_can_be_said(name: str, asked: dict[str, Any], answer: str | None) -> None:
    here = world(name)
    grammar = Grammar(text=structured_grammar(structured(**asked)))
    if answer is not None:
        assert not here.refused(grammar, here.ids(answer))
        return
    matching, said = here.start(grammar), list[int]()
    while not matching.mask.is_complete and len(said) < 60:
        assert not matching.mask.dead_end
        said.append(min(allowed(matching)))
        matching.advance(said[-1:])
    vocabulary = load_vocabulary(here.folder, here.size)
    assert json.loads(vocabulary.decode_bytes(said)) == asked["json"]["const"]


def test_a_structural_tag_is_triggered_by_an_added_token() -> None:
    here = world("qwen3")
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"], "additionalProperties": False}  # fmt: skip
    tag = {"structures": [{"begin": "<tool_call>", "schema": schema, "end": "</tool_call>"}], "triggers": ["<tool_call>"]}  # fmt: skip
    grammar = Grammar(text=structured_grammar(structured(structural_tag=tag)))
    assert not here.refused(grammar, here.ids('I look. <tool_call>{"city": "Oslo"}</tool_call> So.'))
    assert here.refused(grammar, here.ids('I look. <tool_call>{"city": "Rome"}</tool_call>'))


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "description": "t", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
CALLS = [("get_weather", {"city": "Zürich", "days": 2}), ("get_time", {})]
CHOICE: dict[str, Any] = {
    "auto": "auto",
    "required": "required",
    "named": {"type": "function", "function": {"name": "get_weather"}},
}
PARSERS: dict[str, ToolFormat] = {"deepseek_v3": "deepseek_v3", "gemma3": "pythonic", "llama2": "hermes"}
"""Templates that show no tools."""


@cache
def with_template(name: str, template: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        beside = model_folder(name, Path(folder)) / "chat_template.json"
        beside.write_text(json.dumps({"chat_template": template}))
        return load_tokenizer(Path(folder))


def chat_of(here: World) -> ChatFormat:
    tokenizer: Any = here.tokenizer
    if here.name in ("gptoss", "llama2"):  # published without a template
        tokenizer = with_template(
            here.name, FAMILIES["gpt-oss" if here.name == "gptoss" else "qwen2.5"].template
        )
    parser = PARSERS.get(here.name, "auto")
    settings = replace(SETTINGS, vocab_size=here.size, max_context_tokens=4000, tool_call_parser=parser)
    return ChatFormat(tokenizer, settings)


def prepared(here: World, choice: str, **more: Any) -> PreparedChat:
    tools = [{**tool, "function": {**tool["function"], "strict": choice == "auto"}} for tool in TOOLS]
    body = {"model": "fake", "messages": [{"role": "user", "content": "Weather?"}], "tools": tools}
    return chat_of(here).prepare(*chat_asked({**body, "tool_choice": CHOICE[choice], **more}))


def written_by(name: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """What the model writes: as its published template renders it, or as its family does."""
    asked: list[Any] = [
        {"type": "function", "function": {"name": call, "arguments": given}} for call, given in calls
    ]
    bare = [(call, json.dumps(given, ensure_ascii=False)) for call, given in calls]
    match name:
        case "qwen3":
            return rendered(name, {"role": "assistant", "content": "", "tool_calls": asked})
        case "deepseek_v3":
            for one, (_, given) in zip(asked, bare, strict=True):
                one["function"]["arguments"] = given
            said = rendered(name, {"role": "assistant", "content": None, "tool_calls": asked})
            return (
                said if len(asked) > 1 else f"{said}<｜tool▁calls▁end｜>"
            )  # it forgets the end behind one call
        case "gemma3":
            keyed = (
                ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())
                for _, given in calls
            )
            return f"[{', '.join(f'{call}({given})' for (call, _), given in zip(calls, keyed, strict=True))}]"
        case "gptoss":
            head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions."
            return f"{head}{bare[0][0]} <|constrain|>json<|message|>{bare[0][1]}"
        case _:
            return "\n".join(f'<tool_call>\n{{"name": "{call}", "arguments": {given}}}\n</tool_call>' for call, given in bare)  # fmt: skip


def rendered(name: str, answer: dict[str, Any]) -> str:
    tokenizer, ask = world(name).tokenizer, {"role": "user", "content": "Weather?"}
    if answer["content"] is None:  # transformers drops it, and this template asks for it
        template = jinja2.Template(tokenizer.template)
        before = template.render(messages=[ask], add_generation_prompt=True)
        after = template.render(messages=[ask, answer])
    else:
        before = tokenizer.render_chat([ask])
        after = tokenizer.render_chat([ask, answer], add_generation_prompt=False)
    assert after.startswith(before)
    end = tokenizer.decode([tokenizer.eos_token_id or 0], skip_special_tokens=False)
    return after[len(before) :].rstrip("\n").removesuffix(end)


@pytest.mark.parametrize("choice", CHOICE)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gemma3", "llama2", "gptoss"])
def test_calls_that_the_model_writes_are_admitted(name: str, choice: str) -> None:
    here, chat = world(name), prepared(world(name), choice)
    assert chat.grammar is not None
    calls = CALLS[:1] if choice == "named" or name == "gptoss" else CALLS
    said = written_by(name, calls)
    assert not here.refused(chat.grammar, here.ids(said))
    assert here.refused(chat.grammar, here.ids(said.replace("get_weather", "get_water")))
    wrong = said.replace('"days": 2', '"days": "2"').replace("days=2", 'days="2"')
    assert here.refused(chat.grammar, here.ids(wrong))


@pytest.mark.parametrize("choice", CHOICE)
def test_what_a_reasoning_model_puts_before_its_call_is_admitted(choice: str) -> None:
    here, chat = world("qwen3"), prepared(world("qwen3"), choice)
    assert chat.grammar is not None
    said = written_by("qwen3", CALLS[:1])
    assert said.startswith("<think>\n\n</think>\n\n<tool_call>")
    assert not here.refused(chat.grammar, here.ids(said.replace("<think>", "<think>Hm, a call.")))
    assert not here.refused(chat.grammar, here.ids(said[said.index("<tool_call>") :]))


def test_a_mark_in_pieces_is_the_same_mark() -> None:
    """The parser reads text, so a mark that is no special token binds what follows however it was written."""
    here, chat = world("qwen3"), prepared(world("qwen3"), "auto")
    assert chat.grammar is not None
    mark = [*here.ids("<"), *here.ids("tool"), *here.ids("_call"), *here.ids(">")]
    rest = '\n{"name": "get_weather", "arguments": {"days": 2}}\n</tool_call>'
    assert not here.refused(chat.grammar, [*mark, *here.ids(rest)])
    assert here.refused(chat.grammar, [*mark, *here.ids(rest.replace("2", '"2"'))])


def test_an_answer_of_a_schema_may_stand_beside_tools() -> None:
    here = world("qwen3")
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["<tool_call>", 3]}}}
    chat = prepared(here, "auto", response_format=named)
    assert chat.grammar is not None
    for said in ('"<tool_call>"', "3", "<think>\nHm.\n</think>\n\n3", written_by("qwen3", CALLS)):
        assert not here.refused(chat.grammar, here.ids(said))
    assert here.refused(chat.grammar, here.ids("4"))


FUNCTION = TOOLS[0]["function"]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, required": ("/v1/chat/completions", {"tools": TOOLS, "tool_choice": "required"}),
    "chat, named": ("/v1/chat/completions", {"tools": TOOLS, "tool_choice": CHOICE["named"]}),
    "chat, strict": ("/v1/chat/completions", {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]}),
    "chat, with a format": ("/v1/chat/completions", {"tools": TOOLS, "response_format": {"type": "json_object"}}),
    "messages, any": ("/v1/messages", {"max_tokens": 9, "tools": [{"name": "f", "input_schema": WEATHER}], "tool_choice": {"type": "any"}}),
    "responses, required": ("/v1/responses", {"tools": [{"type": "function", "name": "f", "parameters": WEATHER}], "tool_choice": "required"}),
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
async def test_every_api_takes_forced_and_strict_tools(name: str, asked: str) -> None:
    here = world(name)
    settings = replace(
        SETTINGS,
        vocab_size=here.size,
        max_context_tokens=4000,
        tool_call_parser=PARSERS.get(name, "auto"),
        tokenizer_folder=here.folder,
    )
    tokenizer: Any = here.tokenizer
    api = Api(FakeGenerator("x"), settings, tokenizer=tokenizer)
    path, more = ASKED[asked]
    said = "Weather?" if path == "/v1/responses" else [{"role": "user", "content": "Weather?"}]
    body = {"model": SETTINGS.model_name, "input" if path == "/v1/responses" else "messages": said, **more}
    answer = await api.post(path, body)
    assert answer.status_code == 200, answer.text
    grammar = api.generator.requests[-1].sampling.grammar
    assert grammar is not None
    assert "tool" in grammar.text

"""What `response_format`, `structured_outputs` and forced calls become, and what is refused."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from cluster.ingress.grammar.grammar_checker import MAX_GRAMMAR_BYTES
from cluster.ingress.parsers import deepseek, hermes, mistral
from cluster.ingress.parsers.argument_values import Schemas
from cluster.ingress.parsers.call_formats import CALL_FORMATS, markup_of
from cluster.ingress.parsers.call_grammars import CallableTool, call_grammar
from cluster.ingress.parsers.model_formats import ModelFormats, make_parser
from cluster.ingress.parsers.output_events import CallArguments, CallBegins, Text
from core.config.answer_formats import ToolFormat
from models.files.hub import resolve
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, COMPLETIONS, OK, SETTINGS, Api
from tests.cluster.ingress.parsers.family_markup import MARKUPS
from tests.engine.execution.sampling.test_grammar_masks import generated, params, text

FOLDER = resolve("embedded")
VOCABULARY = LLTokenizer(str(FOLDER / "tokenizer.json"), n_vocab=4096)
CONSTRAINED = replace(SETTINGS, vocab_size=4096, tokenizer_folder=FOLDER)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def accepts(grammar: str, answer: str) -> bool:
    """Whether it is complete with this answer."""
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0)
    return matcher.consume_tokens(VOCABULARY.tokenize_str(answer)) and matcher.is_accepting()


@cache
def constrained() -> Api:
    """Each has a process of its own that compiles grammars, so one for all that is asked one after another."""
    return Api(FakeGenerator("x"), CONSTRAINED)


async def grammar(path: str, body: dict[str, Any]) -> str:
    """The grammar of the request that reaches the generator; empty: it has none."""
    api = constrained()
    answer = await api.post(path, body)
    assert answer.status_code == 200, answer.text
    found = api.generator.requests[-1].sampling.grammar
    return found.text if found else ""


SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
TAG = {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("field", "value", "right", "wrong"),
    [
        ("response_format", SCHEMA_FORMAT, '{"name": "a", "age": 3}', '{"name": "a"}'),
        ("response_format", {"type": "json_object"}, '{"anything": [1]}', "[1]"),
        ("structured_outputs", {"json": PERSON}, '{"name":"a","age":3}', '{"age": 3, "name": "a"}'),
        ("structured_outputs", {"json": json.dumps(PERSON)}, '{"name": "a", "age": 3}', "no"),
        ("structured_outputs", {"json": PERSON, "disable_any_whitespace": True}, '{"name":"a","age":3}', '{"name": "a","age":3}'),
        ("structured_outputs", {"regex": "[a-c]{2}"}, "ab", "abc"),
        ("structured_outputs", {"choice": ["red", "green"]}, "green", "blue"),
        ("structured_outputs", {"grammar": 'root ::= "a" ("b" | "c")'}, "ac", "ad"),
        ("structured_outputs", {"grammar": 'start: "a" ("b" | "c")'}, "ac", "ad"),
        ("structured_outputs", {"json_object": True}, "{}", "1"),
        ("structured_outputs", {"structural_tag": TAG}, 'Well: <f>{"name":"a","age":3}</f> so.', "Well: <f>3</f>"),
    ],
)  # fmt: skip
async def test_the_engine_gets_what_the_client_asked_for(
    field: str, value: Any, right: str, wrong: str
) -> None:
    for path, body in ((CHATS, CHAT), (COMPLETIONS, OK)):
        found = await grammar(path, {**body, field: value})
        assert accepts(found, right)
        assert not accepts(found, wrong)


async def test_plain_text_has_no_grammar() -> None:
    assert await grammar(CHATS, {**CHAT, "response_format": {"type": "text"}}) == ""


class Person(BaseModel):
    name: str
    age: int


async def test_the_sdks_parse_helper_gets_its_model() -> None:
    api = Api(FakeGenerator('{"name": "Ada", "age": 36}'), CONSTRAINED)
    answer = await api.openai.chat.completions.parse(
        model=SETTINGS.model_name, messages=[{"role": "user", "content": "Who?"}], response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)


DEEP: Any = {}
for _ in range(150):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is required"),
        ({"structured_outputs": {}}, "structured_outputs", "name one of json, regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "not ['regex', 'choice']"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "cannot be read"),
        ({"structured_outputs": {"json": {"not": {"type": "null"}}}}, "structured_outputs", "not"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs", "b"),
        ({"structured_outputs": {"structural_tag": {**TAG, "triggers": ["<g"]}}}, "structured_outputs", "begins with no trigger"),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": SCHEMA_FORMAT}, "structured_outputs", "exclude"),
        ({"response_format": SCHEMA_FORMAT, "ignore_eos": True}, "response_format", "ignore_eos"),
        ({"guided_json": PERSON}, "guided_json", "structured_outputs.json"),
        ({"structured_outputs": {"json": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}}, "structured_outputs", "are the limit"),
        ({"structured_outputs": {"json": DEEP}}, "structured_outputs", "nested too deeply"),
    ],
)  # fmt: skip
async def test_what_cannot_be_guaranteed_is_refused_by_name(
    body: dict[str, Any], field: str, says: str
) -> None:
    answer = await constrained().post(CHATS, {**CHAT, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert says in answer.json()["error"]["message"]


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
YEAR = {"type": "object", "properties": {"year": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["year"], "additionalProperties": False}  # fmt: skip
TOOLS: dict[str, dict[str, Any]] = {"weather": CITY, "count": YEAR}
FORMATS = list(CALL_FORMATS)
SPECIAL = {hermes.BEGIN: 1, hermes.END: 2, mistral.BEGIN: 1, deepseek.CALLS_BEGIN: 1, deepseek.CALLS_END: 2}
MARKS = {1: "A", 2: "B"}


def call_of(family: ToolFormat, call: tuple[str, Any]) -> str:
    """The call as the family's grammar has it: strings in double quotes."""
    markup = MARKUPS[{"deepseek_v3": "deepseek_v31"}.get(family, family)]
    name, arguments = call
    if family in ("pythonic", "lfm2", "olmo3"):
        arguments = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
    if family == "gemma4":  # its grammar has JSON within lists and objects
        quoted = {key: f'<|"|>{value}<|"|>' for key, value in arguments.items() if isinstance(value, str)}
        arguments = ",".join(f"{key}:{quoted.get(key) or json.dumps(arguments[key])}" for key in arguments)
    return markup.write((name, arguments))


def calls_of(
    formats: ModelFormats, answer: str, schemas: Schemas = TOOLS
) -> tuple[list[tuple[str, str]], str]:
    """As the family's parser reads it: (name, arguments) of each call, and the text beside them."""
    parser = make_parser(formats, schemas=schemas, opened=False)
    found, free = list[tuple[str, str]](), ""
    for event in [*parser.push(answer), *parser.finish()]:
        match event:
            case CallBegins(name=name):
                found.append((name, ""))
            case CallArguments(text=more):
                found[-1] = (found[-1][0], found[-1][1] + more)
            case Text(text=more):
                free += more
            case _:
                pass
    return found, free


@pytest.mark.turns(3)
@pytest.mark.parametrize("one_call", [True, False])
@pytest.mark.parametrize("template", ["", "```json"])
@pytest.mark.parametrize("family", FORMATS)
def test_forced_calls_are_calls_to_the_familys_parser(
    family: ToolFormat, template: str, one_call: bool
) -> None:
    markup = markup_of(family, list(TOOLS), {}, template)
    assert markup is not None
    tools = [CallableTool(name=name, schema=schema, strict=True) for name, schema in TOOLS.items()]
    wanted = call_grammar(markup, tools, must_call=True, one_call=one_call)
    for seed in range(3):
        tokens = generated(seed, params(wanted))
        if tokens[-1] != 0:
            continue  # it would have called forever
        calls, free = calls_of(ModelFormats(family, "none"), text(tokens))
        assert not free.strip()
        assert len(calls) == 1 or not one_call
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), TOOLS[name])


@pytest.mark.parametrize("family", FORMATS)
def test_a_strict_tool_leaves_text_free_and_binds_calls(family: ToolFormat) -> None:
    markup = markup_of(family, ["weather"], {}, "")
    assert markup is not None
    tool = [CallableTool(name="weather", schema=CITY, strict=True)]
    wanted = call_grammar(markup, tool, must_call=False, one_call=False)
    written = call_of(family, ("weather", {"city": "Oslo"}))
    before = "" if family in ("llama3_json", "pythonic") else "I look. "
    assert accepts(wanted, "It rains.")
    assert accepts(wanted, before + written)
    assert not accepts(wanted, before + written.replace("Oslo", "Bonn"))
    assert not accepts(wanted, " " + written.replace("Oslo", "Bonn"))


BARE = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
    "required": ["b"],
}


@pytest.mark.parametrize(
    ("family", "answer", "arguments"),
    [
        ("pythonic", '[f(a="x, (y", b=1)]', {"a": "x, (y", "b": 1}),
        ("pythonic", "[f(b=1)]", {"b": 1}),
        ("pythonic", '[f(a="x")]', None),
        ("pythonic", '[f(b=1, a="x")]', None),
        ("pythonic", "[f(b=1, c=2)]", None),
        ("qwen3_coder", "<parameter=a>\n2\n</parameter>\n<parameter=b>\n1\n</parameter>\n", {"a": "2", "b": 1}),
        ("qwen3_coder", "<parameter=a>\n\n</para\n\n</parameter>\n<parameter=b>\n1\n</parameter>\n", {"a": "\n</para\n", "b": 1}),
        ("qwen3_coder", "<parameter=b>\n1\n</parameter>\n", {"b": 1}),
        ("qwen3_coder", "<parameter=a>\nx\n</parameter>\n", None),
        ("qwen3_coder", "<parameter=b>\nx\n</parameter>\n", None),
        ("seed_oss", "<parameter=a>\n</para\n</parameter>\n<parameter=b>1</parameter>\n", {"a": "\n</para\n", "b": 1}),
        ("seed_oss", "<parameter=b>x</parameter>\n", None),
        ("minimax_m2", '<parameter name="a">2</parameter>\n<parameter name="b">1</parameter>\n', {"a": "2", "b": 1}),
        ("minimax_m2", '<parameter name="a">2</parameter>\n', None),
        ("glm45", "<arg_key>a</arg_key>\n<arg_value></arg_k\n</arg_value>\n<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n", {"a": "</arg_k\n", "b": 1}),
        ("glm45", "<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n", None),
        ("hy_v3", "<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n", {"b": 1}),
    ],
)  # fmt: skip
def test_arguments_one_by_one(family: ToolFormat, answer: str, arguments: dict[str, Any] | None) -> None:
    markup = markup_of(family, ["f"], {}, "")
    assert markup is not None
    wanted = call_grammar(
        markup, [CallableTool(name="f", schema=BARE, strict=True)], must_call=True, one_call=True
    )
    if family != "pythonic":
        answer = MARKUPS[family].write(("f", answer))
    assert accepts(wanted, answer) is (arguments is not None)
    if arguments is not None:
        ((_, said),), _ = calls_of(ModelFormats(family, "none"), answer, {"f": BARE})
        assert json.loads(said) == arguments


@pytest.mark.parametrize(
    ("family", "schema", "says"),
    [
        ("pythonic", {"type": "object", "minProperties": 1}, "minProperties"),
        ("pythonic", {"properties": {"a-b": {}}}, "'a-b'"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "a"}}}, "pattern"),
        ("qwen3_coder", {"properties": {"a>": {}}}, "'a>'"),
    ],
)
async def test_a_strict_tool_that_cannot_be_held_one_by_one_is_refused_by_name(
    family: ToolFormat, schema: dict[str, Any], says: str
) -> None:
    function = {"name": "f", "parameters": schema, "strict": True}
    body = {**CHAT, "tools": [{"type": "function", "function": function}]}
    settings = replace(CONSTRAINED, tool_call_parser=family)
    answer = await Api(FakeGenerator("x"), settings).post(CHATS, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "tools"
    assert says in answer.json()["error"]["message"]


def test_marks_that_are_tokens_are_forced_as_tokens() -> None:
    markup = markup_of("hermes", ["count"], SPECIAL, "")
    assert markup is not None
    tool = [CallableTool(name="count", schema=YEAR)]
    tokens = generated(4, params(call_grammar(markup, tool, must_call=True, one_call=True)))
    assert (tokens[0], tokens[-2], tokens[-1]) == (1, 2, 0)
    assert json.loads(text(tokens[1:-2]))["name"] == "count"

"""Texts that models write, or that clients describe: outputs, schemas, templates, streams."""

import copy
import json
from typing import Any, get_args

from baton.bench.sse import SseReader, error_message
from cluster.ingress.bodies.body_model import validate
from cluster.ingress.bodies.structured import StructuredOutputs, schema_grammar, structured_grammar
from cluster.ingress.http.request_json import parse_json
from cluster.ingress.parsers.call_formats import markup_of
from cluster.ingress.parsers.call_grammars import CallableTool, call_grammar
from cluster.ingress.parsers.harmony_grammar import harmony_grammar
from cluster.ingress.parsers.model_formats import ModelFormats, make_parser
from cluster.ingress.parsers.output_events import CallArguments, CallBegins, CallEnds, OutputEvent, joined
from cluster.ingress.parsers.schema_forms import enforceable, moved, part_of
from cluster.ingress.parsers.stop_strings import StopStrings
from cluster.ingress.templates.chat_messages import MessageStyle
from cluster.ingress.templates.format_probe import find_calls, find_reasoning
from cluster.ingress.templates.template_probe import TemplateUse
from core.config.answer_formats import ReasoningFormat, ToolFormat
from core.errors import RequestError
from tests.cluster.ingress.api.fakes import ByteTokenizer
from tests.cluster.ingress.api.mutations import VALUES, paths, replaced
from tests.cluster.ingress.parsers.recorded_texts import SCHEMAS
from tests.fuzz.choices import Choices, split

_TOOLS: tuple[ToolFormat, ...] = get_args(ToolFormat)
_REASONING: tuple[ReasoningFormat, ...] = get_args(ReasoningFormat)
_MARKS = {
    mark: 300 + i
    for i, mark in enumerate(("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"))
}

_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": ["string", "null"], "enum": ["x", None], "description": "d"},
        "b": {"anyOf": [{"$ref": "#/$defs/x"}, {"const": 1}], "minimum": 0},
        "c": {"type": "array", "items": {"type": "integer"}, "prefixItems": [True]},
    },
    "required": ["a", "b"],
    "allOf": [{"required": ["c"]}, {"$ref": "#/definitions/y"}],
    "patternProperties": {"^(e|f)$": {"type": "string"}, "(?=g)": False},
    "propertyNames": {"enum": ["a", "b"]},
    "$defs": {"x": {"type": "string", "pattern": "^a"}},
    "definitions": {"y": {"oneOf": [{"properties": {"h": True}}, {}]}},
}
_KEYWORDS = (
    "a",
    "0",
    "type",
    "$ref",
    "$id",
    *_SCHEMA,
    "anyOf",
    "oneOf",
    "enum",
    "const",
    "additionalProperties",
    "not",
)
_REFERENCES = (
    "#",
    "#/",
    "#/properties/a",
    "#/allOf/0",
    "#/allOf/²",
    f"#/allOf/{'9' * 5000}",
    "#/~1~0",
    "x#/a",
    "#a",
)
_MAX_CHANGES = 8
_MOST_TEMPLATE = 400
"""Dozens of conversations are rendered with it, and each is parsed in every format."""


def fuzz_outputs(data: bytes) -> None:
    """A model's text gives the same events however it is cut, and its calls are one after the other."""
    choices = Choices(data)
    formats = ModelFormats(choices.pick(_TOOLS), choices.pick(_REASONING))
    opened, with_tools, stop = (
        choices.below(2) == 1,
        choices.below(4) > 0,
        choices.piece(4).decode(errors="ignore"),
    )
    cuts, text = choices.piece(8), choices.rest().decode(errors="ignore")
    pieces = _cut(text, cuts)

    def events(parts: list[str]) -> list[OutputEvent]:
        stops = StopStrings([stop]) if stop else None
        parser = make_parser(formats, schemas=SCHEMAS if with_tools else None, opened=opened, stops=stops)
        return joined([*(event for part in parts for event in parser.push(part)), *parser.finish()])

    whole = events([text])
    assert events(pieces) == whole == events(list(text)), (formats, text, pieces)
    _in_order(whole)


def _cut(text: str, cuts: bytes) -> list[str]:
    pieces: list[str] = []
    for size in cuts:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def _in_order(events: list[OutputEvent]) -> None:
    is_open: list[int] = []
    for event in events:
        match event:
            case CallBegins(index):
                assert not is_open, events
                is_open.append(index)
            case CallArguments(index):
                assert is_open == [index], events
            case CallEnds(index):
                assert is_open.pop() == index, events
            case _:
                assert not is_open, events


class _Rendering(ByteTokenizer):
    """A template that writes, for any conversation, what the fuzzer says, with the conversation's own words in it."""

    def __init__(self, pieces: list[str]) -> None:
        super().__init__()
        self.template, self._pieces = "".join(pieces), pieces

    def render_chat(
        self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **_: Any
    ) -> str:
        if not self._pieces or self._pieces[0] == "refuse":
            raise RequestError("the template refuses these messages")
        words = [json.dumps(message) for message in messages] + [json.dumps(tools)] * bool(tools)
        pairs = zip(self._pieces * len(words), words, strict=False)
        return "".join(f"{piece}{word}" for piece, word in pairs) + self._pieces[-1] * add_generation_prompt


def fuzz_template_calls(data: bytes) -> None:
    """Whatever a chat template writes, its formats are found, or none is."""
    choices = Choices(data)
    cuts = choices.piece(3)
    pieces = [piece.decode(errors="ignore") for piece in split(choices.take(_MOST_TEMPLATE), cuts)]
    use = TemplateUse(_Rendering(pieces), with_tools=True)
    plain = MessageStyle()
    found = find_calls(use, plain, short_ids=False)
    assert found.format in _TOOLS
    assert find_reasoning([use], plain)[0] in _REASONING


def _changed_schema(choices: Choices) -> dict[str, Any]:
    """Return a schema in which values stand where no schema has them."""
    schema: dict[str, Any] = copy.deepcopy(_SCHEMA)
    for _ in range(_MAX_CHANGES):
        if not choices.num_left:
            break
        place = choices.pick(list(paths(schema)))
        value = choices.pick((*VALUES, *_SCHEMA.values(), *_REFERENCES))
        if choices.below(2) and isinstance(place[-1], str):
            place = (*place[:-1], choices.pick(_KEYWORDS))
        schema = replaced(schema, place, value)
    return schema


def fuzz_schemas(data: bytes) -> None:
    """A client's schema becomes a grammar in every place and markup, or it is refused."""
    choices = Choices(data)
    try:
        schema = parse_json(choices.rest()) if data[:1] == b"{" else _changed_schema(choices)
    except RequestError:
        return
    for strict in (True, False):
        try:
            schema_grammar(schema, strict=strict)
        except RequestError:
            continue
        _called(schema, strict=strict)
    part_of(moved(schema, "#/$defs/x"), schema)
    assert enforceable(json.loads(json.dumps(schema)), lenient=False) == enforceable(schema, lenient=False)


def _called(schema: dict[str, Any], *, strict: bool) -> None:
    tool = CallableTool(name="f", schema=schema, strict=strict)
    for family in _TOOLS:
        markup = markup_of(family, ["f"], {}, "")
        try:
            if markup is None:
                harmony_grammar(_MARKS, [tool], must_call=False)
            else:
                call_grammar(markup, [tool], must_call=True, one_call=False)
        except ValueError:
            continue


def fuzz_structured(data: bytes) -> None:
    """What an answer must be becomes a grammar, or it is refused."""
    try:
        structured_grammar(validate(StructuredOutputs, parse_json(data)))
    except RequestError:
        return


def fuzz_sse(data: bytes) -> None:
    """A stream of events is read alike however it is cut, and any error has a message."""
    choices = Choices(data)
    cuts, sent = choices.piece(8), choices.rest()
    whole, cut = SseReader(), SseReader()
    payloads = [payload for piece in split(sent, cuts) for payload in cut.feed(piece)]
    assert payloads == whole.feed(sent)
    for payload in [*payloads, sent]:
        error_message(payload)

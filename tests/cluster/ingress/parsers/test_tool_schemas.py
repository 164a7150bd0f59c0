"""Schemas of tools within the grammars of their calls: references point to where they did, and values are written as models do."""

import contextlib
import json
from typing import Any

import pytest
from llguidance import LLMatcher

from cluster.ingress.bodies.structured import SchemaFormat, form_of, schema_grammar
from cluster.ingress.parsers.argument_values import kinds_of
from cluster.ingress.parsers.call_formats import CALL_FORMATS, markup_of
from cluster.ingress.parsers.call_grammars import AnswerSchema, CallableTool, call_grammar
from cluster.ingress.parsers.model_formats import ModelFormats
from core.config.answer_formats import ToolFormat
from core.errors import RequestError
from tests.cluster.ingress.bodies.test_structured import VOCABULARY, accepts, call_of, calls_of
from tests.cluster.ingress.parsers.family_markup import TAGS
from tests.engine.execution.sampling.test_grammar_masks import generated, params, text

FORMATS = list(CALL_FORMATS)
COLOUR = {"enum": ["red", "blue"]}
REFERRING: dict[str, dict[str, Any]] = {
    "$defs": {"$defs": {"c": COLOUR}, "properties": {"a": {"$ref": "#/$defs/c"}}},
    "definitions": {"definitions": {"c": COLOUR}, "properties": {"a": {"$ref": "#/definitions/c"}}},
    "another property": {"properties": {"b": COLOUR, "a": {"$ref": "#/properties/b"}}},
    "within a property": {"properties": {"b": {"type": "array", "items": COLOUR}, "a": {"$ref": "#/properties/b/items"}}},
    "escaped": {"$defs": {"a/b~c": COLOUR}, "properties": {"a": {"$ref": "#/$defs/a~1b~0c"}}},
    "a chain": {"$defs": {"c": COLOUR, "d": {"$ref": "#/$defs/c"}}, "properties": {"a": {"$ref": "#/$defs/d"}}},
    "an id": {"$id": "https://e.org/t", "$defs": {"c": COLOUR}, "properties": {"a": {"$ref": "#/$defs/c"}}},
    "zod": {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"b": COLOUR, "a": {"$ref": "#/properties/b"}}},
    "the whole": {"$ref": "#/definitions/t", "definitions": {"t": {"type": "object", "properties": {"a": COLOUR}, "required": ["a"], "additionalProperties": False}}},
}  # fmt: skip


def held(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return schema
    return {"type": "object", "required": ["a"], "additionalProperties": False, **schema}


def written(family: ToolFormat, a: Any) -> str:
    """A call of `f` with the argument `a`, as models of the family write it."""
    return call_of(family, ("f", {"a": a}))


def grammar(family: ToolFormat, schema: dict[str, Any], *, strict: bool, must_call: bool = True) -> str:
    markup = markup_of(family, ["f"], {}, "")
    assert markup is not None
    tool = CallableTool(name="f", schema=held(schema), strict=strict)
    return call_grammar(markup, [tool], must_call=must_call, one_call=True)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("reference", REFERRING)
def test_references_point_into_the_tools_own_schema(reference: str, family: ToolFormat, strict: bool) -> None:
    wanted = grammar(family, REFERRING[reference], strict=strict)
    assert accepts(wanted, written(family, "red"))
    assert not accepts(wanted, written(family, "green"))
    assert not accepts(wanted, written(family, 1))


TREE = {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}


@pytest.mark.parametrize("family", FORMATS)
def test_a_tool_that_refers_to_itself_nests(family: ToolFormat) -> None:
    wanted = grammar(family, TREE, strict=True, must_call=False)
    assert accepts(wanted, written(family, [{"a": [{"a": []}]}]))
    assert not accepts(wanted, written(family, [{"b": []}]))
    assert not accepts(wanted, written(family, [1]))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"enum": ["red", "big blue"]}, ["red", "big blue"], ["green"]),
        ({"enum": ["red", 3, None, True]}, ["red", 3, None, True], ["green", 4]),
        ({"const": "red"}, ["red"], ["blue"]),
        ({"const": 3}, [3], [4, "red"]),
        ({"type": ["string", "null"], "enum": ["red", None]}, ["red", None], ["blue"]),
        ({"anyOf": [{"enum": ["red"]}, {"type": "integer"}]}, ["red", 7], ["blue"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["any words", None], []),
        ({"type": ["string", "null"]}, ["any words", None], []),
        ({"type": ["integer", "null"]}, [3, None], ["any words"]),
        ({"anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}]}, ["red", None], ["green"]),
        ({"type": "string", "description": "d"}, ["any words"], []),
        ({}, ["any words", 3], []),
        ({"type": "string", "enum": ["red"]}, ["red"], ["blue"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("family", TAGS)
def test_strings_are_bare_where_arguments_are_written_in_tags(
    family: ToolFormat, schema: dict[str, Any], right: list[Any], wrong: list[Any], strict: bool
) -> None:
    tool = {"properties": {"a": schema}, "$defs": {"c": COLOUR}}
    wanted = grammar(family, tool, strict=strict)
    for value in right:
        said = written(family, value)
        assert accepts(wanted, said)
        ((_, arguments),), _ = calls_of(ModelFormats(family, "none"), said, {"f": held(tool)})
        assert json.loads(arguments)["a"] in (value, str(value))
    for value in wrong:
        assert not accepts(wanted, written(family, value))


TAKEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": {"type": "integer"}}, '{"a": 1}', '{"a": "x"}'),
    "propertyNames of names": ({"type": "object", "propertyNames": {"enum": ["a", "b-c"]}, "additionalProperties": {"type": "integer"}}, '{"b-c": 1}', '{"d": 1}'),
    "zod's record": ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, '{"d": 1}', '{"d": "x"}'),
    "a format": ({"type": "string", "format": "cuid2", "maxLength": 3}, '"abc"', '"abcd"'),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1]", '["x"]'),
    "two patterns": ({"type": "object", "patternProperties": {"^a": {"type": "string"}, "b$": {"type": "integer"}}, "additionalProperties": False}, '{"ax": "x", "xb": 1}', '{"ax": []}'),
    "a look around": ({"type": "string", "pattern": "^(?!a).*$", "maxLength": 3}, '"abc"', '"abcd"'),
    "not": ({"type": "integer", "not": {"const": 3}}, "4", '"x"'),
    "nested": ({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "format": "x"}, "uniqueItems": True}}, "required": ["a"]}, '{"a": ["x"]}', '{"a": [1]}'),
}  # fmt: skip


@pytest.mark.parametrize("keyword", TAKEN)
def test_what_no_grammar_holds_is_left_out_unless_it_is_strict(keyword: str) -> None:
    schema, right, wrong = TAKEN[keyword]
    for strict in (None, False):
        wanted = format_grammar(schema, strict)
        assert accepts(wanted, right)
        assert not accepts(wanted, wrong)
    beside = call_grammar_of(AnswerSchema(schema=schema, strict=False))
    assert accepts(beside, right)
    assert not accepts(beside, wrong)
    if keyword != "zod's record":  # it says nothing
        for refused in (
            format_grammar(schema, True),
            call_grammar_of(AnswerSchema(schema=schema, strict=True)),
        ):
            assert LLMatcher(VOCABULARY, refused, log_level=0).is_error()


def format_grammar(schema: dict[str, Any], strict: bool | None) -> str:
    asked = {"name": "n", "schema": schema, "strict": strict}
    form = form_of(SchemaFormat.model_validate({"type": "json_schema", "json_schema": asked}), None)
    assert form is not None
    return form.grammar


def call_grammar_of(answer: AnswerSchema) -> str:
    markup = markup_of("hermes", ["f"], {}, "")
    assert markup is not None
    tool = CallableTool(name="f", schema={"type": "object"})
    return call_grammar(markup, [tool], must_call=False, one_call=True, answer=answer)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {"minimum": 0}}},
        {"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "patternProperties": {"^a$": {"type": "string"}}},
        {"properties": {"a": {"type": "null"}}, "patternProperties": {"^(?:a|b)$": {"type": "null"}}},
    ],
)  # fmt: skip
def test_a_pattern_over_a_property_leads_to_no_dead_end(schema: dict[str, Any]) -> None:
    wanted = schema_grammar({"type": "object", "additionalProperties": False, **schema})
    for seed in range(12):
        tokens = generated(seed, params(wanted, max_tokens=60))
        if tokens[-1] == 0:
            json.loads(text(tokens))


UNSATISFIABLE: dict[str, dict[str, Any]] = {
    "an empty enum": {"enum": []},
    "a range": {"type": "integer", "minimum": 5, "maximum": 1},
    "a constant of another type": {"type": "integer", "const": "a"},
    "a pattern over a property": {"type": "object", "properties": {"ab": {"type": "integer"}}, "patternProperties": {"^a": {"type": "string"}}, "required": ["ab"]},
    "a pattern that is a property": {"type": "object", "properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {"type": "string"}}, "required": ["a"]},
    "a length": {"type": "string", "pattern": "^abc$", "maxLength": 2},
}  # fmt: skip


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("which", UNSATISFIABLE)
def test_a_schema_that_nothing_satisfies_is_refused(which: str, strict: bool) -> None:
    matcher = LLMatcher(VOCABULARY, schema_grammar(UNSATISFIABLE[which], strict=strict), log_level=0)
    assert "nsatisfiable" in matcher.get_error()


@pytest.mark.parametrize("reference", REFERRING)
def test_references_of_an_answers_schema_point_into_it_beside_tools(reference: str) -> None:
    wanted = call_grammar_of(AnswerSchema(schema=held(REFERRING[reference]), strict=True))
    assert accepts(wanted, '{"a": "red"}')
    assert not accepts(wanted, '{"a": "green"}')


@pytest.mark.parametrize("family", FORMATS)
def test_schemas_that_refer_to_each_other_without_end_are_no_burden(family: ToolFormat) -> None:
    many = [{"$ref": "#/$defs/x"}] * 20
    circle = {"x": {"anyOf": [*many, {"$ref": "#/$defs/y"}]}, "y": {"anyOf": [*many, {"type": "integer"}]}}
    wanted = grammar(family, {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": circle}, strict=False)
    assert len(wanted) < 10_000


NO_SCHEMAS: list[dict[str, Any]] = [
    {"properties": {"a": "string"}},
    {"properties": {"a": {"$ref": "#/properties/b"}, "b": 3}},
    {"properties": ["a"]},
    {"properties": ["a"], "patternProperties": {"^a$": {}}},
    {"properties": [["a", 1, 2]], "patternProperties": {"^a$": {}}},
    *({"required": names} for names in (True, 3, {"a": 1}, [["a"]], [None], [{}])),
    *({union: value} for union in ("allOf", "anyOf", "oneOf") for value in (3, True, {"a": 1})),
    *({"properties": {"a": {"enum": ["x"], "type": kinds}}} for kinds in (3, [{}], [["string"]], {"a": 1})),
    *({"$defs": no, "properties": {"a": {"items": {"$ref": "#/required"}}}} for no in (3, [1], "x")),
    *({"allOf": [{}], "properties": {"a": {"$ref": f"#/allOf/{at}"}}} for at in ("²", "9" * 5000)),
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("schema", NO_SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_what_is_no_schema_is_refused_with_a_reason_or_left_to_the_compiler(
    schema: dict[str, Any], strict: bool
) -> None:
    for family in FORMATS:
        with contextlib.suppress(ValueError):
            grammar(family, schema, strict=strict)
    with contextlib.suppress(RequestError):
        schema_grammar(schema, strict=strict)
    assert kinds_of(held(schema), schema)


def test_the_reason_names_what_is_wrong() -> None:
    for schema, reason in (
        ({"properties": {"a": "string"}}, "the schema of the property 'a' must be an object"),
        ({"properties": ["a"]}, "properties must be an object"),
        ({"required": True}, "required must be a list"),
        ({"required": [["a"]]}, "required must be a list of names"),
    ):
        with pytest.raises(ValueError, match=reason):
            grammar("qwen3_coder", schema, strict=False)

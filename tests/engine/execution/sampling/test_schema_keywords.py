"""Every keyword of JSON schema's draft 2020-12: outputs of random logits keep to those that are taken, and the others are refused."""

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from cluster.ingress.bodies.structured import schema_grammar
from tests.engine.execution.sampling.test_grammar_masks import END, VOCABULARY, generated, params, text

NULL, FLAG = {"type": "null"}, {"type": "boolean"}
A = {"properties": {"a": NULL}, "required": ["a"]}
B = {"properties": {"b": NULL}, "required": ["b"]}
CLOSED = {"type": "object", "additionalProperties": False}


def _text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def _list(**more: Any) -> dict[str, Any]:
    return {"type": "array", **more}


TAKEN: dict[str, dict[str, Any]] = {
    "$anchor": {"$defs": {"n": {"$anchor": "x", **NULL}}, "$ref": "#x"},
    "$comment": {"$comment": "x", **NULL},
    "$defs": {"$defs": {"n": NULL}, "$ref": "#/$defs/n"},
    "$id": {"$id": "https://e.org/a", "$ref": "https://e.org/a#/$defs/n", "$defs": {"n": NULL}},
    "$ref to itself": {**CLOSED, "properties": {"next": {"anyOf": [{"$ref": "#"}, NULL]}}, "required": ["next"]},
    "$schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **NULL},
    "additionalProperties": {"type": "object", "additionalProperties": FLAG, "maxProperties": 1, **A},
    "allOf": {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 5}]},
    "allOf of objects": {"type": "object", "additionalProperties": NULL, "allOf": [A, B]},
    "annotations": {"title": "t", "description": "d", "default": 1, "deprecated": True, "readOnly": True, "writeOnly": False, "examples": [1], **FLAG},
    "anyOf": {"anyOf": [NULL, {"const": "a"}]},
    "boolean schemas": {**CLOSED, "properties": {"a": NULL, "b": False}, "required": ["a"]},
    "const": {"const": {"a": [1, 2]}},
    "contentEncoding": _text(contentEncoding="base64", maxLength=2),
    "contentMediaType": _text(contentMediaType="application/json", maxLength=2),
    "definitions": {"definitions": {"n": NULL}, "$ref": "#/definitions/n"},
    "enum": {"enum": [1, "a", None, [1], {"b": 2}]},
    "exclusiveMaximum, exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9},
    "items": _list(items=NULL, minItems=1, maxItems=2),
    "maximum, minimum of numbers": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "maxLength, minLength": _text(minLength=2, maxLength=4),
    "minProperties": {"type": "object", "additionalProperties": NULL, "minProperties": 1, "maxProperties": 2},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 70},
    "multipleOf of fractions": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 3},
    "oneOf": {"oneOf": [NULL, FLAG]},
    "pattern": _text(pattern=r"^[a-c]{2}-[0-9]$"),
    "pattern within": _text(pattern="b", maxLength=3),
    "patternProperties": {**CLOSED, "patternProperties": {"^x[ab]$": NULL}},
    "prefixItems": _list(prefixItems=[NULL, FLAG], items=False, minItems=2),
    "prefixItems before items": _list(prefixItems=[NULL], items=FLAG, minItems=2, maxItems=3),
    "properties, required": {**CLOSED, "properties": {"a": NULL, "b": FLAG}, "required": ["b"]},
    "type": {"type": ["null", "boolean"]},
    # Random logits hardly ever end an `email` or a `uri`.
    **{
        f"format {name}": _text(format=name)
        for name in ("date", "time", "date-time", "duration", "hostname", "ipv4", "ipv6", "uuid")
    },
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "$dynamicRef": {"$defs": {"n": {"$dynamicAnchor": "x", **NULL}}, "$dynamicRef": "#x"},
    "contains": _list(contains=NULL, maxItems=2),
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": B}},
    "if": {"if": NULL, "then": {"const": None}, "else": {"const": 1}},
    "minContains": _list(contains=NULL, minContains=2),
    "not": {"not": NULL},
    "oneOf constraints": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a$"}},
    "unevaluatedItems": _list(prefixItems=[NULL], unevaluatedItems=False),
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False, **A},
    "uniqueItems": _list(items=FLAG, uniqueItems=True),
    "Unknown format": _text(format="json-pointer"),
}


@pytest.mark.parametrize("keyword", TAKEN)
def test_outputs_keep_to_each_keyword(keyword: str) -> None:
    schema, num_ended = TAKEN[keyword], 0
    for seed in range(40):
        tokens = generated(seed, params(schema_grammar(schema), max_tokens=100))
        if tokens[-1] == END:
            num_ended += 1
            checks_formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(json.loads(text(tokens)), schema, format_checker=checks_formats)
        if num_ended == 3:
            return
    assert num_ended, "else this says nothing"


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_cannot_be_kept_to_is_refused_by_name(keyword: str) -> None:
    matcher = LLMatcher(VOCABULARY, schema_grammar(REFUSED[keyword]), log_level=0)
    assert matcher.is_error()
    assert keyword in matcher.get_error()

"""Turns what an answer must be (a JSON schema, a regular expression, choices, or a client's grammar) into llguidance's
grammar."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from llguidance import LLMatcher, StructTag, grammar_from
from pydantic import Field, model_validator

from cluster.ingress.bodies.body_model import Strict, validate
from cluster.ingress.bodies.json_schema import Schema
from cluster.ingress.parsers.call_grammars import AnswerSchema, json_options
from cluster.ingress.parsers.schema_forms import enforceable
from cluster.ingress.requests.generation_request import AnswerForm
from core.errors import RequestError

Text = Annotated[str, Field(min_length=1)]
FormatName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class NamedSchema(Strict):
    """OpenAI's `response_format.json_schema`. Answers keep to the schema: to all of it where it is `strict`, else as far as a
    grammar can hold it."""

    name: FormatName
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class TagStructure(Strict):
    begin: Text
    schema_: Annotated[Schema, Field(alias="schema")]
    end: str


class StructuralTag(Strict):
    """Free text in which each of `triggers` must continue as one of the `structures` that begin with it."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[TagStructure], Field(min_length=1, max_length=128)]
    triggers: Annotated[list[Text], Field(min_length=1, max_length=128)]

    @model_validator(mode="after")
    def _each_has_a_trigger(self) -> "StructuralTag":
        for structure in self.structures:
            if not structure.begin.startswith(tuple(self.triggers)):
                raise ValueError(f"the structure that begins with {structure.begin!r} begins with no trigger")
        return self


class StructuredOutputs(Strict):
    """vLLM's field. One of the first six is set."""

    json_: Annotated[Schema | Text | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=10_000)] | None = None
    grammar: Text | None = None
    """EBNF (GBNF) or Lark."""
    json_object: bool | None = None
    structural_tag: StructuralTag | Text | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Text | None = None

    @model_validator(mode="after")
    def _says_one_thing(self) -> "StructuredOutputs":
        names = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name.rstrip("_") for name in names if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"name one of json, regex, choice, grammar, json_object, structural_tag, not {given or 'none'}"
            )
        return self


def form_of(
    response_format: TextFormat | ObjectFormat | SchemaFormat | None,
    structured: StructuredOutputs | None,
    field: str = "response_format",
) -> AnswerForm | None:
    """Return what the answer must be; None where it is free. `field` is the format's. Raises RequestError."""
    if structured is None:
        match response_format:
            case ObjectFormat():
                return json_form(field, {"type": "object"}, strict=True)
            case SchemaFormat(json_schema=named):
                return json_form(field, named.schema_, strict=named.strict is True)
            case _:
                return None
    field = "structured_outputs"
    if response_format is not None and response_format.type != "text":
        raise RequestError("response_format and structured_outputs exclude each other", field=field)
    return AnswerForm(field, structured_grammar(structured))


def json_form(field: str, schema: Mapping[str, Any], *, strict: bool) -> AnswerForm:
    """Return the form of JSON that keeps to the schema, for which `field` asks. Raises RequestError."""
    grammar = schema_grammar(schema, strict=strict, field=field)
    return AnswerForm(field, grammar, AnswerSchema(schema=schema, strict=strict))


def schema_grammar(
    schema: Mapping[str, Any] | str, *, strict: bool = True, field: str = "structured_outputs", **options: Any
) -> str:
    """Return the grammar of JSON that keeps to the schema, its keys in the schema's order: to all of it where it is `strict`,
    else as far as a grammar can. Raises RequestError where the text is no JSON."""
    try:
        read: Any = json.loads(schema) if isinstance(schema, str) else schema
        held = enforceable(read, lenient=not strict) if isinstance(read, Mapping) else read  # type: ignore[reportUnknownArgumentType]
        return LLMatcher.grammar_from_json_schema(
            json.dumps(held),
            overrides={**json_options(strict=strict), **options},  # type: ignore[typeddict-item]
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field}: the JSON schema cannot be read: {error}", field=field) from None


def structured_grammar(asked: StructuredOutputs) -> str:
    """Return the grammar that is asked for. Raises RequestError."""
    options: dict[str, Any] = {}
    if asked.disable_any_whitespace:
        options = {"whitespace_flexible": False, "whitespace_pattern": None}
    elif asked.whitespace_pattern:
        options = {"whitespace_pattern": asked.whitespace_pattern}
    if asked.json_:
        return schema_grammar(asked.json_, **options)
    if asked.json_object:
        return schema_grammar({"type": "object"}, **options)
    if asked.structural_tag:
        return _tags(asked.structural_tag)
    try:
        if asked.regex:
            return grammar_from("regex", asked.regex)
        if asked.choice:
            return _choices(asked.choice)
        return grammar_from("grammar", asked.grammar or "")
    except ValueError as error:
        raise RequestError(f"structured_outputs.grammar: {error}", field="structured_outputs") from None


def _choices(words: Sequence[str]) -> str:
    """Return a grammar of which each word is all. The words are one terminal: of alternatives llguidance follows 2,000."""
    return "start: WORD\nWORD: " + " | ".join(json.dumps(word) for word in words) + "\n"


def _tags(asked: StructuralTag | str) -> str:
    if isinstance(asked, str):
        try:
            asked = validate(StructuralTag, json.loads(asked))
        except (ValueError, RequestError) as error:
            raise RequestError(
                "structured_outputs.structural_tag must have `structures` and `triggers`: "
                f"{str(error).splitlines()[0]}",
                field="structured_outputs",
            ) from None
    tags = [
        StructTag(
            trigger=next(trigger for trigger in asked.triggers if structure.begin.startswith(trigger)),
            begin=structure.begin,
            grammar=structure.schema_,
            end=structure.end,
        )
        for structure in asked.structures
    ]
    return StructTag.to_grammar(tags, assume_special=False)

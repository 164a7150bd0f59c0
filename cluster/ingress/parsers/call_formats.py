"""The formats in which models call tools, each one row: how it is read, what forces it, and what tells it from the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.ingress.parsers import deepseek, gemma, hermes, llama, mistral, pythonic, tagged_calls
from cluster.ingress.parsers.argument_values import Schemas
from cluster.ingress.parsers.call_markups import (
    AskedCalls,
    CallMarkup,
    gemma_markup,
    json_markup,
    llama3_json_markup,
    mistral_markup,
    named_markup,
    pythonic_markup,
    tagged_markup,
)
from cluster.ingress.parsers.deepseek import NamedCallMarks, named_calls
from cluster.ingress.parsers.hermes import JsonCallMarks, json_calls
from cluster.ingress.parsers.markup_parser import EventWriter, Steps
from cluster.ingress.parsers.pythonic import PythonCallMarks, pythonic_calls
from cluster.ingress.parsers.tagged_calls import CallTags
from cluster.ingress.parsers.tagged_calls import tagged_calls as read_tagged
from core.config.answer_formats import ToolFormat


@dataclass(frozen=True, slots=True)
class CallFormat:
    read: Callable[[EventWriter, Schemas], Steps[None]]
    markup: Callable[[AskedCalls], CallMarkup]
    """How a grammar forces it."""
    marks: tuple[str, ...]
    """What its parser must see even where special tokens are left out of the text."""
    opening: str = ""
    """What a turn with calls has in it. Parsers also read calls without their marks, which models leave out; templates do not.
    Where it is empty, a call begins the turn."""


def _of_json(marks: JsonCallMarks, *, sign: str = "") -> CallFormat:
    return CallFormat(
        lambda writer, schemas: json_calls(writer, schemas, marks),
        lambda asked: json_markup(asked, marks),
        marks.every,
        sign or marks.begin,
    )


def _of_tags(tags: CallTags) -> CallFormat:
    return CallFormat(
        lambda writer, schemas: read_tagged(writer, schemas, tags),
        lambda asked: tagged_markup(asked, tags),
        tags.marks,
        tags.opening,
    )


def _of_names(marks: NamedCallMarks) -> CallFormat:
    return CallFormat(
        lambda writer, schemas: named_calls(writer, schemas, marks),
        lambda asked: named_markup(asked, marks),
        marks.every,
        marks.calls_begin,
    )


def _of_python(marks: PythonCallMarks, *, has_marks: bool = True) -> CallFormat:
    return CallFormat(
        lambda writer, schemas: pythonic_calls(writer, schemas, marks),
        lambda asked: pythonic_markup(asked, marks if has_marks else None),
        (*marks.begins, marks.end),
        marks.begins[0] if has_marks else "",
    )


CALL_FORMATS: Final[Mapping[ToolFormat, CallFormat]] = {
    "deepseek_v3": _of_names(deepseek.DEEPSEEK),
    "deepseek_v32": _of_tags(tagged_calls.DEEPSEEK_V32),
    "deepseek_v4": _of_tags(tagged_calls.DEEPSEEK_V4),
    "kimi_k2": _of_names(deepseek.KIMI_K2),
    "mistral": CallFormat(
        mistral.mistral_calls,
        mistral_markup,
        (mistral.BEGIN, mistral.ID, mistral.ARGUMENTS),
        mistral.BEGIN,
    ),
    "gemma4": CallFormat(gemma.gemma_calls, gemma_markup, gemma.MARKS, gemma.BEGIN),
    "cohere": _of_json(hermes.COHERE),
    "seed_oss": _of_tags(tagged_calls.SEED_OSS),
    "minimax_m2": _of_tags(tagged_calls.MINIMAX_M2),
    "hy_v3": _of_tags(tagged_calls.HUNYUAN_3),
    "hy_v3_open": _of_tags(tagged_calls.HUNYUAN_3_OPEN),
    "hunyuan": _of_names(deepseek.HUNYUAN),
    "glm45": _of_tags(tagged_calls.GLM),
    "qwen3_coder": _of_tags(tagged_calls.QWEN_CODER),
    "hermes": _of_json(hermes.HERMES),
    "apertus": _of_json(hermes.APERTUS),
    "jamba": _of_json(hermes.JAMBA),
    "phi4_mini_json": _of_json(hermes.PHI_4_MINI, sign=hermes.PHI_4_MINI.end),
    "granite": _of_json(hermes.GRANITE),
    "nemotron": _of_json(hermes.NEMOTRON),
    "internlm": _of_json(hermes.INTERNLM),
    "lfm2": _of_python(pythonic.LFM2),
    "olmo3": _of_python(pythonic.OLMO_3),
    "llama3_json": CallFormat(llama.llama_json_calls, llama3_json_markup, (llama.PYTHON_TAG,)),
    "pythonic": _of_python(pythonic.LLAMA, has_marks=False),
}
"""All but harmony, whose calls are on channels. A template's format is the first that explains it."""


def markup_of(
    tools: ToolFormat, names: Sequence[str], special_tokens: Mapping[str, int], template: str
) -> CallMarkup | None:
    """Return a family's markup, or None where it has none of its own: the calls of harmony are on channels, of which
    `harmony_grammar` makes one grammar with everything else."""
    family = CALL_FORMATS.get(tools)
    return None if family is None else family.markup(AskedCalls(names, special_tokens, template))

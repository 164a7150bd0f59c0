"""How the families write their calls: what stands before, between and behind the arguments, as parts of Lark rules."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.ingress.parsers import deepseek, hermes, mistral, qwen_coder
from cluster.ingress.parsers.argument_rules import ArgumentMarkup
from cluster.ingress.parsers.model_formats import ToolFormat

_FENCE, _FENCE_END = "\n```json\n", "\n```"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarkup:
    """Parts of Lark rules: `opening first call (following call)* closing`."""

    opening: str = ""
    """The mark by which calls are told from text. Where it is empty, an answer that begins with `bracket` is a call."""
    bracket: str = "{"
    first: str = ""
    following: str = ""
    closing: str = ""
    heads: Mapping[str, str] = field(default_factory=dict[str, str])
    """By tool, what stands before its arguments. Where it is empty, a call is an object with the tool's name in it."""
    tail: str = ""
    """What stands behind the object or the arguments."""
    arguments_key: str = "arguments"
    one_by_one: ArgumentMarkup | None = None
    """How each argument is written. None: they are one JSON object."""


def markup_of(
    tools: ToolFormat, names: Sequence[str], special_tokens: Mapping[str, int], template: str
) -> CallMarkup | None:
    """Return a family's markup, or None where it has none of its own: the calls of harmony are on channels, of which
    `harmony_grammar` makes one grammar with everything else."""
    family = _FAMILIES.get(tools)
    return None if family is None else family(_Asked(names, special_tokens, template))


def literal(text: str) -> str:
    """Return `text` as a Lark string."""
    return json.dumps(text)


@dataclass(frozen=True, slots=True)
class _Asked:
    names: Sequence[str]
    special_tokens: Mapping[str, int]
    template: str

    def mark(self, text: str) -> str:
        """Return `text` as the special token that it is, or as a string."""
        return f"<[{self.special_tokens[text]}]>" if text in self.special_tokens else literal(text)


def _hermes(asked: _Asked) -> CallMarkup:
    return _tagged(asked.mark(hermes.BEGIN), asked.mark(hermes.END))


def _tagged(begin: str, end: str) -> CallMarkup:
    """Return the markup of calls that stand on lines of their own between two tags."""
    line = literal("\n")
    return CallMarkup(opening=begin, first=line, following=f"{line} {begin} {line}", tail=f"{line} {end}")


def _qwen3_coder(asked: _Asked) -> CallMarkup:
    tagged = _tagged(asked.mark(qwen_coder.BEGIN), asked.mark(qwen_coder.END))
    return replace(
        tagged,
        heads={name: literal(f"{qwen_coder.FUNCTION}{name}>\n") for name in asked.names},
        tail=f"{literal(qwen_coder.FUNCTION_END)} {tagged.tail}",
        one_by_one=ArgumentMarkup(
            before=qwen_coder.PARAMETER, behind_key=">", end=qwen_coder.PARAMETER_END, space="\n"
        ),
    )


def _llama3_json(asked: _Asked) -> CallMarkup:
    return CallMarkup(following=literal(";"), arguments_key="parameters")


def _mistral(asked: _Asked) -> CallMarkup:
    begin, behind = asked.mark(mistral.BEGIN), asked.mark(mistral.ARGUMENTS)
    if mistral.ARGUMENTS not in asked.special_tokens:
        return CallMarkup(opening=begin, first=literal("["), following=literal(", "), closing=literal("]"))
    heads = {name: f"{literal(name)} {behind}" for name in asked.names}
    return CallMarkup(opening=begin, following=begin, heads=heads)


def _deepseek_v3(asked: _Asked) -> CallMarkup:
    marks = (deepseek.CALL_BEGIN, deepseek.SEPARATOR, deepseek.CALL_END)
    begin, separator, end = map(asked.mark, marks)
    markup = CallMarkup(
        opening=asked.mark(deepseek.CALLS_BEGIN),
        closing=asked.mark(deepseek.CALLS_END),
        heads={name: f"{begin} {literal(name)} {separator}" for name in asked.names},
        tail=end,
    )
    if "```json" not in asked.template:
        return markup
    function = f"{begin} {literal('function')} {separator}"
    return replace(
        markup,
        following=literal("\n"),
        heads={name: f"{function} {literal(name + _FENCE)}" for name in asked.names},
        tail=f"{literal(_FENCE_END)} {end}",
    )


def _pythonic(asked: _Asked) -> CallMarkup:
    return CallMarkup(
        bracket="[",
        first=literal("["),
        following=literal(", "),
        closing=literal("]"),
        heads={name: literal(f"{name}(") for name in asked.names},
        tail=literal(")"),
        one_by_one=ArgumentMarkup(behind_key="=", separator=", ", keys_are_names=True),
    )


_FAMILIES: Mapping[ToolFormat, Callable[[_Asked], CallMarkup]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
    "pythonic": _pythonic,
    "qwen3_coder": _qwen3_coder,
}

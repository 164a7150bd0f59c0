"""How the families write their calls: what stands before, between and behind the arguments, as parts of Lark rules."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.ingress.parsers import gemma, mistral
from cluster.ingress.parsers.argument_rules import ArgumentMarkup
from cluster.ingress.parsers.deepseek import NamedCallMarks
from cluster.ingress.parsers.hermes import JsonCallMarks
from cluster.ingress.parsers.pythonic import PythonCallMarks
from cluster.ingress.parsers.tagged_calls import CallTags

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
    id_key: str = ""
    """The key of a call's number, where calls have one."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    one_by_one: ArgumentMarkup | None = None
    """How each argument is written. None: they are one JSON object."""


def literal(text: str) -> str:
    """Return `text` as a Lark string."""
    return json.dumps(text)


@dataclass(frozen=True, slots=True)
class AskedCalls:
    """What a grammar of calls is made for."""

    names: Sequence[str]
    special_tokens: Mapping[str, int]
    template: str

    def lark(self, text: str) -> str:
        """Return `text` as parts of a Lark rule: special tokens as such, anything else as a string."""
        special = sorted(
            (mark for mark in self.special_tokens if mark and mark in text), key=len, reverse=True
        )
        pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        parts = [
            f"<[{self.special_tokens[piece]}]>" if piece in self.special_tokens else literal(piece)
            for piece in pieces
            if piece
        ]
        return " ".join(parts)


def json_markup(asked: AskedCalls, marks: JsonCallMarks) -> CallMarkup:
    tail = asked.lark(marks.trail + marks.end)
    heads = {} if marks.name_key else {name: literal(f'{{"{name}": ') for name in asked.names}
    again = marks.between if marks.listed else f"\n{marks.begin}{marks.lead}"
    return CallMarkup(
        opening=asked.lark(marks.begin),
        first=asked.lark(marks.lead),
        following=asked.lark(again),
        closing=tail if marks.listed else "",
        tail=literal("}") if heads else "" if marks.listed else tail,
        heads=heads,
        id_key=marks.id_key,
        name_key=marks.name_key,
        arguments_key=marks.arguments_key,
    )


def tagged_markup(asked: AskedCalls, tags: CallTags) -> CallMarkup:
    joins = f"{tags.key_end}{tags.value}" in asked.template if tags.value else False
    line = "" if joins else "\n"
    function = tags.function if tags.begin else ""
    between = f"{line}{tags.begin or tags.function}{line if tags.begin else ''}"
    tail = tags.function_end + (line + tags.end if tags.begin and not tags.listed else "")
    return CallMarkup(
        opening=asked.lark(tags.opening),
        first=asked.lark(line) if tags.begin else "",
        following=asked.lark(line if tags.listed else between),
        closing=asked.lark(line + tags.end) if tags.listed else "",
        heads={name: asked.lark(f"{function}{name}{tags.name_end}{line}") for name in asked.names},
        tail=asked.lark(tail),
        one_by_one=ArgumentMarkup(
            before=tags.parameter,
            behind_key=tags.key_end + (line + tags.value if tags.value else ""),
            text_sign=tags.text_sign,
            json_sign=tags.json_sign,
            end=tags.parameter_end,
            space="\n" if tags.newlines else "",
            behind=line,
            lark=asked.lark,
        ),
    )


def llama3_json_markup(asked: AskedCalls) -> CallMarkup:
    return CallMarkup(following=literal(";"), arguments_key="parameters")


def mistral_markup(asked: AskedCalls) -> CallMarkup:
    begin, behind = asked.lark(mistral.BEGIN), asked.lark(mistral.ARGUMENTS)
    if mistral.ARGUMENTS not in asked.special_tokens:
        return CallMarkup(opening=begin, first=literal("["), following=literal(", "), closing=literal("]"))
    heads = {name: f"{literal(name)} {behind}" for name in asked.names}
    return CallMarkup(opening=begin, following=begin, heads=heads)


def named_markup(asked: AskedCalls, marks: NamedCallMarks) -> CallMarkup:
    is_typed = marks.may_be_typed and "```json" in asked.template
    fenced = is_typed or marks.is_fenced
    before = f"function{marks.separator}" if is_typed else "functions." if marks.is_numbered else ""
    between = _FENCE if fenced else marks.separator

    def head(name: str) -> str:
        number = " /:[0-9]{1,4}/ " if marks.is_numbered else " "
        return f"{asked.lark(marks.call_begin + before + name)}{number}{asked.lark(between)}"

    return CallMarkup(
        opening=asked.lark(marks.calls_begin),
        following=literal("\n") if fenced else "",
        closing=asked.lark(marks.calls_end),
        heads={name: head(name) for name in asked.names},
        tail=asked.lark((_FENCE_END if fenced else "") + marks.call_end),
    )


def gemma_markup(asked: AskedCalls) -> CallMarkup:
    begin = asked.lark(gemma.BEGIN)
    return CallMarkup(
        opening=begin,
        following=begin,
        heads={name: literal(f"{gemma.CALL}{name}{{") for name in asked.names},
        tail=asked.lark("}" + gemma.END),
        one_by_one=ArgumentMarkup(
            behind_key=":",
            text_sign=gemma.QUOTE,
            end=gemma.QUOTE,
            json_end="",
            separator=",",
            keys_are_names=True,
            lark=asked.lark,
        ),
    )


def pythonic_markup(asked: AskedCalls, marks: PythonCallMarks | None = None) -> CallMarkup:
    """Without `marks` the list stands alone, as Llama's does."""
    listed = marks is None or marks.listed
    begin, end = ("[", "]") if listed else ("\n", "\n")
    return CallMarkup(
        opening=asked.lark(marks.begins[0]) if marks else "",
        bracket="[",
        first=literal(begin),
        following=literal(", " if listed else "\n"),
        closing=asked.lark(end + (marks.end if marks else "")),
        heads={name: literal(f"{name}(") for name in asked.names},
        tail=literal(")"),
        one_by_one=ArgumentMarkup(behind_key="=", separator=", ", keys_are_names=True),
    )

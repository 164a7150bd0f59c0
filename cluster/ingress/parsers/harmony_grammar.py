"""A grammar over gpt-oss's channels: reasoning first, perhaps a word to the user, then one call or the final answer.

The turn begins behind the prompt's `<|start|>assistant`. Its end token is none of the grammar's: it is allowed where the grammar
is complete, after a call and after the final answer alone."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.ingress.parsers import harmony
from cluster.ingress.parsers.call_grammars import CallableTool, arguments_rule

_MARKS = (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, harmony.END)


def harmony_grammar(
    special_tokens: Mapping[str, int], tools: Sequence[CallableTool], *, must_call: bool, answer: str = ""
) -> str:
    """Return llguidance's JSON. `answer` is the grammar of the final channel; without it the channel is free.

    Raises ValueError where the tokenizer lacks a mark."""
    if missing := [mark for mark in _MARKS if mark not in special_tokens]:
        raise ValueError(f"the tokenizer has no token {missing[0]}")
    start, channel, constrain, message, end = (f"<[{special_tokens[mark]}]>" for mark in _MARKS)
    next_message = f"{end} {start} {json.dumps('assistant')}"
    rules = [
        f"thought: {channel} {json.dumps('analysis')} {message} TEXT {next_message}",
        f"preamble: {channel} {json.dumps('commentary')} {message} TEXT {next_message}",
        r"TEXT: /(.|\n)*/",
    ]
    ways = [f"call_{i}" for i in range(len(tools))]
    for i, tool in enumerate(tools):
        header = json.dumps(f"commentary to=functions.{tool.name} ")
        json_part = f"{constrain} {json.dumps('json')} {message} {arguments_rule(tool)}"
        rules.append(f"call_{i}: {channel} {header} {json_part}")
    if not must_call:
        ways.append("final")
        body = "@answer" if answer else "TEXT"
        rules.append(f"final: {channel} {json.dumps('final')} {message} {body}")
    turn = "\n".join((f"start: thought? preamble? ({' | '.join(ways)})", *rules))
    parts: list[dict[str, Any]] = [{"name": "turn", "lark_grammar": f"%llguidance {{}}\n{turn}\n"}]
    if answer and not must_call:
        parts.append(_named(answer))
    return json.dumps({"grammars": parts})


def _named(grammar: str) -> dict[str, Any]:
    """A whole grammar, JSON or Lark, as a part of another one."""
    part: dict[str, Any] = {"lark_grammar": grammar}
    if grammar.lstrip().startswith("{"):
        (part,) = json.loads(grammar)["grammars"]
    return {**part, "name": "answer"}

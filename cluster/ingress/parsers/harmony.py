"""gpt-oss's harmony: messages on channels. `analysis` is reasoning, `to=functions.f` a call, everything else text.

The openai-harmony package could parse tokens, but it fetches its vocabulary from the network when it is loaded."""

import re

from cluster.ingress.parsers.argument_values import Schema, Schemas, object_text
from cluster.ingress.parsers.json_calls import known_name
from cluster.ingress.parsers.json_text import JsonText, Malformed
from cluster.ingress.parsers.markup_parser import EndOfText, EventWriter, Sink, Steps, copy_until

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{START}assistant{CHANNEL}final{MESSAGE}"
_RECIPIENT = re.compile(r"to=(?P<is_function>functions\.)?(?P<name>[^\s<]+)")
_ENDS = (END, CALL, RETURN, START)
_ON_ANALYSIS = re.compile(re.escape(CHANNEL) + r"\s*analysis")


def harmony_output(writer: EventWriter, schemas: Schemas | None) -> Steps[None]:
    """Read from behind the prompt's `<|start|>assistant` on. Without `schemas` messages to functions are text."""
    end = ""
    while True:
        header = end if end == START else ""
        try:
            header += yield from _header()
        except _NoHeader as none:
            writer.text(none.text)
            raise EndOfText from None
        end = yield from _message(writer, header, schemas)


class _NoHeader(Exception):
    """The text ended within what should have been a header."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def _header() -> Steps[str]:
    parts: list[str] = []
    try:
        yield from copy_until((MESSAGE,), parts.append)
    except EndOfText:
        text = "".join(parts)
        raise _NoHeader("" if CHANNEL in text or START in text else text) from None
    return "".join(parts)


def _message(writer: EventWriter, header: str, schemas: Schemas | None) -> Steps[str]:
    """Read one message, and return the mark that ends it."""
    if schemas is not None and (name := _called(header, schemas)):
        return (yield from _call(writer, name, schemas.get(name, {})))
    sink: Sink = writer.text
    if _ON_ANALYSIS.search(header):
        writer.is_reasoning = True
        sink = writer.reasoning
    end = yield from copy_until(_ENDS, sink)
    writer.is_reasoning = False
    return end


def _called(header: str, schemas: Schemas) -> str:
    """Return the function that a message is for; empty where it is for none."""
    recipient = _RECIPIENT.search(header)
    if recipient is None or not (recipient["is_function"] or recipient["name"] in schemas):
        return ""
    return known_name(recipient["name"], schemas)


def _call(writer: EventWriter, name: str, tool: Schema) -> Steps[str]:
    writer.begin_call(name)
    arguments = _Arguments(writer, tool)
    try:
        end = yield from copy_until(_ENDS, arguments.push)
    except EndOfText as ended:
        arguments.finish(cut=ended.cut)  # the token that ends a call ends the turn, and has no text
        raise
    arguments.finish(cut=False)
    writer.end_call()
    return end


class _Arguments:
    """A call's message: an object, or what stands for one."""

    def __init__(self, writer: EventWriter, tool: Schema) -> None:
        self._writer, self._tool = writer, tool
        self._begun = self._is_broken = False
        self._held: list[str] = []
        self._value = JsonText(self._held.append)

    def push(self, text: str) -> None:
        text = text if self._begun else text.lstrip()
        if not text:
            return
        if not self._begun:
            self._begun = True
            if text[0] == "{":
                self._value = JsonText(self._writer.arguments)
        try:
            if not self._is_broken:
                self._value.feed(text)
        except Malformed:
            self._is_broken = True

    def finish(self, *, cut: bool) -> None:
        if cut:
            self._value.cut()
            self._writer.arguments("".join(self._held))
        elif not self._begun or (not self._is_broken and self._value.close()):
            held = "".join(self._held)
            if held or not self._begun:
                self._writer.arguments(object_text(held or "null", self._tool))
            self._writer.complete_arguments()

"""gpt-oss's harmony: messages on channels. `analysis` is reasoning, `to=functions.f` a call, everything else text.

The openai-harmony package could parse tokens, but it fetches its vocabulary from the network when it is loaded."""

import re

from cluster.ingress.parsers.markup_parser import EndOfText, EventWriter, Sink, Steps, copy_until

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{START}assistant{CHANNEL}final{MESSAGE}"
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_ON_ANALYSIS = re.compile(re.escape(CHANNEL) + r"\s*analysis")


def harmony_output(writer: EventWriter, with_calls: bool) -> Steps[None]:
    """Read from behind the prompt's `<|start|>assistant` on. Without `with_calls`, messages to functions are text."""
    end = ""
    while True:
        header = end if end == START else ""
        try:
            header += yield from _header()
        except _NoHeader as none:
            writer.text(none.text)
            raise EndOfText from None
        end = yield from _message(writer, header, with_calls)


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


def _message(writer: EventWriter, header: str, with_calls: bool) -> Steps[str]:
    """Read one message, and return the mark that ends it."""
    sink: Sink = writer.text
    if with_calls and (recipient := _RECIPIENT.search(header)):
        writer.begin_call(recipient[1])
        sink = writer.arguments
    elif _ON_ANALYSIS.search(header):
        writer.is_reasoning = True
        sink = writer.reasoning
    try:
        end = yield from copy_until((END, CALL, RETURN, START), sink)
    except EndOfText as ended:
        if not ended.cut:  # the token that ends a call ends the turn, and has no text
            writer.complete_arguments()
        raise
    writer.is_reasoning = False
    writer.complete_arguments()
    writer.end_call()
    return end

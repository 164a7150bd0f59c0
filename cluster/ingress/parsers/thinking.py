"""Reasoning between two marks at the beginning of an answer: `<think>` of Qwen3 and DeepSeek-R1, `[THINK]` of Magistral."""

from collections.abc import Callable

from cluster.ingress.parsers.markup_parser import EventWriter, Steps, begins_with, copy_until


def thinking(
    writer: EventWriter, marks: tuple[str, str], then: Callable[[EventWriter], Steps[None]], *, opened: bool
) -> Steps[None]:
    """Read the reasoning; `then` reads what follows. `opened` says that the prompt ends within it, as with DeepSeek-R1's
    template."""
    begin, end = marks
    if not opened:
        opened = yield from begins_with(writer, begin)
    writer.is_reasoning = opened
    if opened:
        yield from copy_until((end,), writer.reasoning)
        writer.is_reasoning = False
    yield from then(writer)

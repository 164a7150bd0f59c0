"""Reasoning between two marks at the beginning of an answer: `<think>` of Qwen3 and DeepSeek-R1, `[THINK]` of Magistral."""

from collections.abc import Callable

from cluster.ingress.parsers.markup_parser import EventWriter, Steps, begins_with, copy_until


def thinking(
    writer: EventWriter, marks: tuple[str, str], opened: bool, then: Callable[[EventWriter], Steps[None]]
) -> Steps[None]:
    """`opened`: the prompt ends within the reasoning, as with DeepSeek-R1's template. `then` reads what follows."""
    begin, end = marks
    if not opened:
        opened = yield from begins_with(writer, begin)
    writer.is_reasoning = opened
    if opened:
        yield from copy_until((end,), writer.reasoning)
        writer.is_reasoning = False
    yield from then(writer)

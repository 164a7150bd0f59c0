"""Texts of each family become the right events, however they are split."""

from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ingress.parsers import deepseek, harmony, hermes, llama, mistral, pythonic
from cluster.ingress.parsers.call_formats import CALL_FORMATS
from cluster.ingress.parsers.model_formats import THINK_MARKS, ModelFormats, make_parser
from cluster.ingress.parsers.output_events import (
    CallArguments,
    CallBegins,
    CallEnds,
    OutputEvent,
    Text,
    joined,
)
from core.config.answer_formats import ReasoningFormat, ToolFormat
from tests.cluster.ingress.parsers.recorded_texts import RECORDED, SCHEMAS, Recorded

MARKUP = [
    *(
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        hermes.BEGIN,
        hermes.END,
        "<function=get_time>",
        "<parameter=a>",
    ),
    *(
        "</parameter>",
        "</function>",
        mistral.BEGIN,
        mistral.ARGUMENTS,
        llama.PYTHON_TAG,
        pythonic.PYTHON_START,
    ),
    *(deepseek.CALLS_BEGIN, deepseek.CALL_BEGIN, deepseek.SEPARATOR, deepseek.CALL_END, deepseek.CALLS_END),
    *(
        harmony.START,
        harmony.CHANNEL,
        harmony.MESSAGE,
        harmony.END,
        "analysis",
        " to=functions.get_time",
        "\n",
    ),
    *(
        '{"name": "get_time", "arguments": {"a": 1}}',
        '"arguments": {"b": "}"}',
        '"name": "f"',
        "{",
        "}",
        "[",
        "]",
    ),
    *sorted(
        {mark for each in CALL_FORMATS.values() for mark in each.marks}
        | {mark for each in THINK_MARKS.values() for mark in each}
    ),
    *(
        "<function=get_time>",
        '<invoke name="get_time">',
        '<parameter name="a">',
        "get_time\n",
        "functions.get_time:0",
    ),
    *("get_time(a=1)", "get_time(", ")", ",", ":", '"', "\\", " ", "<", "a"),
]


def parse(recorded: Recorded, pieces: list[str], max_calls: int | None = None) -> list[OutputEvent]:
    parser = make_parser(recorded.formats, schemas=SCHEMAS, opened=recorded.opened, max_calls=max_calls)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def split(text: str, at: list[int]) -> list[str]:
    bounds = [0, *sorted({cut % (len(text) + 1) for cut in at}), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_text_has_its_events_wherever_it_is_split(name: str) -> None:
    recorded = RECORDED[name]
    assert parse(recorded, [recorded.text]) == recorded.events
    for cut in range(len(recorded.text) + 1):
        assert parse(recorded, [recorded.text[:cut], recorded.text[cut:]]) == recorded.events
    assert parse(recorded, list(recorded.text)) == recorded.events


@given(
    tools=st.sampled_from(get_args(ToolFormat)),
    reasoning=st.sampled_from(get_args(ReasoningFormat)),
    text=st.lists(st.sampled_from(MARKUP) | st.text(max_size=5), max_size=14).map("".join),
    at=st.lists(st.integers(0, 400), max_size=8),
    opened=st.booleans(),
)
def test_any_split_of_any_text_gives_the_same_events(
    tools: ToolFormat, reasoning: ReasoningFormat, text: str, at: list[int], opened: bool
) -> None:
    recorded = Recorded(ModelFormats(tools, reasoning), text, opened=opened)
    whole = parse(recorded, [text])
    assert parse(recorded, split(text, at)) == whole
    assert parse(recorded, list(text)) == whole
    open_calls: list[int] = []
    for event in whole:
        match event:
            case CallBegins(index):
                assert not open_calls
                open_calls.append(index)
            case CallArguments(index):
                assert open_calls == [index]
            case CallEnds(index):
                assert open_calls.pop() == index
            case _:
                assert not open_calls
    assert not open_calls


@pytest.mark.parametrize("name", RECORDED)
def test_a_text_that_is_cut_short_gives_the_beginning_of_its_calls(name: str) -> None:
    recorded = RECORDED[name]
    calls = [event for event in recorded.events if isinstance(event, CallBegins)]
    for end in range(len(recorded.text)):
        begun = [e for e in parse(recorded, [recorded.text[:end]]) if isinstance(e, CallBegins)]
        assert begun == calls[: len(begun)]


def test_what_is_no_call_is_shown_as_it_stands() -> None:
    text = 'See <tool_call>this</tool_call> and <tool_call>{"nam'
    assert parse(Recorded(ModelFormats("hermes", "none"), text), [text]) == [Text(text)]


@pytest.mark.parametrize(
    ("tools", "begin", "end"),
    [
        ("hermes", '<tool_call>{"a":[', "]}x"),
        ("mistral", "[TOOL_CALLS] ", "{"),
        ("mistral", '[TOOL_CALLS]{"a":[', "]}x"),
        ("deepseek_v3", deepseek.CALL_BEGIN, "x"),
        ("qwen3_coder", "<tool_call>", ">"),
        ("hermes", '<tool_call>{"', "x"),
        ("llama3_json", '{"name": "', "x"),
        ("pythonic", "\nget_", "x"),
        ("deepseek_v3", deepseek.CALLS_BEGIN + deepseek.CALL_BEGIN, "x"),
    ],
)
def test_marks_within_marks_are_read_once(tools: ToolFormat, begin: str, end: str) -> None:
    """A client can make a model write such text: read again for each mark it would hold the ingress up for minutes."""
    text = begin * 4000 + end * 4000
    events = parse(Recorded(ModelFormats(tools, "think"), text), [text])
    assert "".join(event.text for event in events if isinstance(event, Text)) == text


def test_nothing_follows_the_last_call_that_is_allowed() -> None:
    recorded = RECORDED["qwen2.5"]
    assert parse(recorded, [recorded.text], max_calls=1) == recorded.events[:4]


def test_the_reasoning_ends_where_its_mark_ends() -> None:
    parser = make_parser(ModelFormats("none", "think"), schemas=None, opened=True)
    states: list[bool] = []
    for piece in ["a", "</th", "ink>", "b"]:
        states.append(parser.is_reasoning)
        parser.push(piece)
    assert states == [True, True, True, False]

"""Stop strings end what a parser shows as text, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ingress.parsers.model_formats import ModelFormats, make_parser
from cluster.ingress.parsers.output_events import OutputEvent, Reasoning, Text, joined
from cluster.ingress.parsers.stop_strings import StopStrings
from tests.cluster.ingress.parsers.recorded_texts import RECORDED, SCHEMAS, Recorded, call
from tests.cluster.ingress.parsers.test_parsers import MARKUP, split


def parse(recorded: Recorded, pieces: list[str], stops: StopStrings) -> list[OutputEvent]:
    parser = make_parser(recorded.formats, schemas=SCHEMAS, opened=recorded.opened, stops=stops)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def content(events: list[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


@pytest.mark.parametrize("name", RECORDED)
def test_no_stop_string_is_found_in_markup_arguments_or_reasoning(name: str) -> None:
    recorded = RECORDED[name]
    shown = content(recorded.events)
    words = {recorded.text[at : at + n] for n in (1, 2, 4, 8) for at in range(len(recorded.text) - n + 1)}
    for word in words:
        if word in shown:
            continue
        stops = StopStrings([word])
        assert parse(recorded, [recorded.text], stops) == recorded.events, word
        assert stops.found is None


@given(
    name=st.sampled_from(sorted(RECORDED)),
    text=st.lists(st.sampled_from(MARKUP) | st.text("ab \n", max_size=5), max_size=14).map("".join),
    stops=st.lists(st.text("ab \n<", min_size=1, max_size=4), min_size=1, max_size=3),
    at=st.lists(st.integers(0, 400), max_size=8),
)
def test_no_split_changes_where_a_text_ends(name: str, text: str, stops: list[str], at: list[int]) -> None:
    recorded = Recorded(RECORDED[name].formats, text, opened=RECORDED[name].opened)
    # Which of two stop strings is found first depends on the tokens. With one there is no question.
    for stop in stops:
        whole, letters, pieces = StopStrings([stop]), StopStrings([stop]), StopStrings([stop])
        events = parse(recorded, list(text), letters)
        assert parse(recorded, split(text, at), pieces) == events
        assert parse(recorded, [text], whole) == events
        assert letters.found == pieces.found == whole.found
        assert stop not in content(events) or letters.found is None


def test_a_text_ends_before_a_call_that_follows_the_stop_string() -> None:
    text = RECORDED["qwen2.5"].text
    stops = StopStrings(["will"])
    assert parse(RECORDED["qwen2.5"], [text], stops) == [Text("I ")]
    assert stops.found == "will"


def test_a_stop_string_does_not_span_a_call() -> None:
    recorded = Recorded(
        ModelFormats("hermes", "none"),
        'one t<tool_call>{"name": "get_time", "arguments": {}}</tool_call>wo, two',
    )
    stops = StopStrings(["two"])
    events = parse(recorded, list(recorded.text), stops)
    assert events == [Text("one t"), *call(0, "get_time", "{}"), Text("wo, ")]
    assert stops.found == "two"


def test_what_begins_like_a_stop_string_is_shown_where_it_is_none() -> None:
    recorded = Recorded(ModelFormats("hermes", "think"), "<think>Hm.</think>one tw")
    assert parse(recorded, list(recorded.text), StopStrings(["two"])) == [Reasoning("Hm."), Text("one tw")]


def test_white_space_after_a_text_is_found_at_once() -> None:
    stops = StopStrings(["\n\n"])
    parser = make_parser(ModelFormats("hermes", "think"), schemas=None, opened=True, stops=stops)
    seen: list[OutputEvent] = []
    for piece in ("Hm.\n\n", "</think>", "\n\n", "One.\n"):
        seen += parser.push(piece)
        assert stops.found is None
    seen += parser.push("\n")
    assert stops.found == "\n\n"
    assert joined([*seen, *parser.finish()]) == [Reasoning("Hm."), Text("One.")]


def test_a_stop_string_of_special_tokens_is_found_by_their_placeholders() -> None:
    stops = StopStrings(["\n<|start|>user", "<|pad|>"], hidden={"<|start|>": 7, "<|pad|>": 8, "<|other|>": 9})
    assert set(stops.placeholders) == {7, 8}
    shown = [
        stops.push(text) for text in ("Yes.\n", stops.placeholders[7], "assistant\n", stops.placeholders[7])
    ]
    assert "".join(shown) == "Yes.\nassistant"
    assert stops.push("user: no") == ""
    assert stops.found == "\n<|start|>user"

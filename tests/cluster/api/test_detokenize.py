from hypothesis import given
from hypothesis import strategies as st

from cluster.api.detokenize import TextStream
from tests.cluster.api.fakes import ByteTokenizer

TOKENIZER = ByteTokenizer()
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def feed(
    text: str, stops: tuple[str, ...] = (), prompt: str = "", **options: bool
) -> tuple[list[str], TextStream]:
    stream = TextStream(TOKENIZER, TOKENIZER.encode(prompt), stops, **options)
    pieces: list[str] = []
    for token in text.encode():
        pieces.append(stream.push(token))
        if stream.stopped is not None:
            return pieces, stream
    pieces.append(stream.finish())
    return pieces, stream


@given(TEXT, TEXT)
def test_pieces_join_to_the_text_and_none_has_half_a_character(text: str, prompt: str) -> None:
    pieces, _ = feed(text, prompt=prompt)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_at_the_first_occurrence(text: str, stops: list[str]) -> None:
    pieces, stream = feed(text, tuple(stops))
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    if not ends:
        assert "".join(pieces) == text
        assert stream.stopped is None
        return
    # Tokens come one by one: the stop string that is complete first ends the text.
    first_end = min(ends.values())
    at = min(text.find(stop) for stop in stops if ends.get(stop) == first_end)
    assert "".join(pieces) == text[:at]


def test_the_stop_string_can_be_kept() -> None:
    pieces, _ = feed("one two three", ("two",), include_stop=True)
    assert "".join(pieces) == "one two"


def test_garbage_is_shown_as_such_and_does_not_hold_the_text_back() -> None:
    stream = TextStream(TOKENIZER, ())
    shown = "".join(stream.push(0xFF) for _ in range(50))
    assert len(shown) >= 40
    assert shown + stream.finish() == "\ufffd" * 50


@given(st.binary(max_size=60))
def test_any_bytes_come_out_as_they_decode(data: bytes) -> None:
    stream = TextStream(TOKENIZER, ())
    shown = "".join(stream.push(byte) for byte in data) + stream.finish()
    assert shown.replace("\ufffd", "") == data.decode(errors="replace").replace("\ufffd", "")

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ingress.generation.detokenize import TextStream
from cluster.ingress.parsers.stop_strings import StopStrings
from core.ports import TokenCodec
from tests.cluster.ingress.api.fakes import END, ByteTokenizer, byte_fallback_tokenizer, byte_level_tokenizer

TOKENIZER = ByteTokenizer()
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def feed(
    text: str, stops: tuple[str, ...] = (), prompt: str = "", **options: Any
) -> tuple[list[str], StopStrings]:
    stream, found = TextStream(TOKENIZER, TOKENIZER.encode(prompt)), StopStrings(stops, **options)
    pieces: list[str] = []
    for token in text.encode():
        found.begin_token()
        pieces.append(found.push(stream.push(token)))
        if found.found is not None:
            return pieces, found
    return [*pieces, found.push(stream.finish()), found.flush()], found


@given(TEXT, TEXT)
def test_pieces_join_to_the_text_and_none_has_half_a_character(text: str, prompt: str) -> None:
    pieces, _ = feed(text, prompt=prompt)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_at_the_first_occurrence(text: str, stops: list[str]) -> None:
    pieces, found = feed(text, tuple(stops))
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    if not ends:
        assert "".join(pieces) == text
        assert found.found is None
        return
    # Tokens come one by one: the stop string that is complete first ends the text.
    first_end = min(ends.values())
    at = min(text.find(stop) for stop in stops if ends.get(stop) == first_end)
    assert "".join(pieces) == text[:at]


def test_the_stop_string_can_be_kept() -> None:
    pieces, _ = feed("one two three", ("two",), include=True)
    assert "".join(pieces) == "one two"


def test_stop_strings_wait_for_the_least_number_of_tokens() -> None:
    assert "".join(feed("ab ab ab", ("ab",), min_tokens=3)[0]) == "ab "
    assert "".join(feed("ab ab ab", ("ab",), min_tokens=4)[0]) == "ab ab "


@pytest.mark.parametrize("codec", [byte_level_tokenizer(), byte_fallback_tokenizer()])
@given(
    prompt=st.text("ab 한界é😀", max_size=12),
    text=st.text("ab 한界é😀", min_size=1, max_size=40) | TEXT.filter(bool),
)
def test_real_tokenizers_give_what_they_decode_at_once(codec: TokenCodec, prompt: str, text: str) -> None:
    ids = codec.encode(prompt) + codec.encode(text)
    num_prompt = len(codec.encode(prompt))
    stream = TextStream(codec, ids[:num_prompt])
    pieces = [stream.push(token) for token in ids[num_prompt:]]
    assert "".join(pieces) + stream.finish() == codec.decode(ids)[len(codec.decode(ids[:num_prompt])) :]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_prompt_that_ends_in_bytes_does_not_spoil_what_follows() -> None:
    codec = byte_fallback_tokenizer()
    ids = codec.encode("한국어")
    stream = TextStream(codec, ids[:-3])
    assert [stream.push(token) for token in ids[-3:]] == ["", "", "어"]


def test_a_character_that_the_prompt_began_is_finished() -> None:
    stream = TextStream(TOKENIZER, [97, *"é".encode()[:1]])
    assert stream.push("é".encode()[1]) == "é"


def test_a_character_after_garbage_is_whole() -> None:
    stream = TextStream(TOKENIZER, ())
    pieces = [stream.push(byte) for byte in b"\xff" * 7 + "你好".encode()]
    assert "".join(pieces) == "\ufffd" * 7 + "你好"


class Counting(ByteTokenizer):
    longest = calls = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.longest, self.calls = max(self.longest, len(ids)), self.calls + 1
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("token", [65, END, 0xFF])
def test_the_cost_of_a_token_does_not_grow(token: int) -> None:
    codec = Counting()
    stream = TextStream(codec, [65] * 100)
    for _ in range(1000):
        stream.push(token)
    assert codec.longest <= 32
    assert codec.calls < 2500


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

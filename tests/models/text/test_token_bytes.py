"""The bytes of tokens that are parts of characters, by two kinds of vocabularies of the tokenizers library."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from models.files.hub import resolve
from models.text.token_bytes import bytes_of_piece
from models.text.tokenizer import Tokenizer, load_tokenizer

EMBEDDED = load_tokenizer(resolve("embedded"))


def data_of(tokenizer: Tokenizer, text: str) -> bytes:
    """The bytes of its tokens, put together."""
    data = b""
    for token in tokenizer.encode(text, add_special_tokens=False):
        alone = tokenizer.decode([token])
        data += (tokenizer.bytes_of_part(token) or b"?") if "\ufffd" in alone else alone.encode()
    return data


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_bytes_of_a_vocabulary_in_letters(text: str) -> None:
    assert data_of(EMBEDDED, text) == text.encode()


@pytest.mark.parametrize("text", ["a", "漢b😀", "\x00é"])
def test_bytes_of_a_vocabulary_that_falls_back_to_them(tmp_path: Path, text: str) -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "b": 257}
    inner = Fast(BPE(vocabulary, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path)
    assert data_of(load_tokenizer(tmp_path), text) == text.encode()


def test_a_piece_that_is_text_has_no_bytes_of_its_own() -> None:
    assert bytes_of_piece("\ufffd") is None
    assert bytes_of_piece("▁the") is None

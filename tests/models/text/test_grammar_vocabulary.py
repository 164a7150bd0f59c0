"""Tokens in llguidance's form: their bytes, which of them are special, and what a text is tokenized to within an output."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from models.text.grammar_vocabulary import load_vocabulary
from models.text.tokenizer import load_tokenizer


def byte_level(folder: Path, added: tuple[AddedToken, ...] = (), **parts: Any) -> Tokenizer:
    """A tokenizer of bytes, `ab`, and what is `added`."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, [("a", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_tokens([*added])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


MARKS = (
    AddedToken("<mark>"),
    AddedToken("<end>", special=True),
    AddedToken("[END]", special=True),
    AddedToken(" é"),
)


def test_a_token_is_special_where_the_tokenizer_says_so(tmp_path: Path) -> None:
    ids = byte_level(tmp_path, MARKS).get_vocab()
    vocabulary = load_vocabulary(tmp_path, len(ids))
    assert [vocabulary.is_special_token(ids[mark.content]) for mark in MARKS] == [False, True, True, False]
    assert vocabulary.tokenize_str("ab<mark>") == [ids["ab"], ids["<mark>"]]
    assert all(token not in (ids["<end>"], ids["[END]"]) for token in vocabulary.tokenize_str("<end>[END]"))
    for text in ("ab<mark>ü", "<end>", " é", "e\u0301", "\n"):
        assert vocabulary.decode_bytes(vocabulary.tokenize_str(text)) == text.encode()


CONFIGS: dict[str, dict[str, Any]] = {
    "a named token": {"eos_token": "<mark>", "pad_token": "<pad>"},
    "more named tokens": {"image_token": "<picture>", "add_bos_token": True},
    "further tokens": {"additional_special_tokens": ["<a>", "<mark>"]},
    "tokens by name": {"extra_special_tokens": {"eoi_token": "<a>", "boi_token": "<mark>"}},
    "a named token with flags": {
        "eos_token": {"__type": "AddedToken", "content": "<mark>", "special": False}
    },
    "a list of all": {
        "added_tokens_decoder": {
            "257": {"content": "<mark>", "special": True},
            "261": {"content": "<new>", "special": False},
        }
    },
}


@pytest.mark.parametrize("which", CONFIGS)
def test_the_configuration_adds_the_tokens_that_it_adds_for_transformers(which: str, tmp_path: Path) -> None:
    byte_level(tmp_path, MARKS)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **CONFIGS[which]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = load_tokenizer(tmp_path)
    vocabulary = load_vocabulary(tmp_path, theirs.vocab_size)
    for text, token in theirs.added_tokens.items():
        assert vocabulary.is_special_token(token) == (text in theirs.special_tokens), text
    assert max(theirs.added_tokens.values()) == theirs.vocab_size - 1


def test_tokens_that_the_model_has_no_logits_for_are_never_used(tmp_path: Path) -> None:
    ids = byte_level(tmp_path, MARKS).get_vocab()
    vocabulary = load_vocabulary(tmp_path, ids["<mark>"])
    assert vocabulary.vocab_size == ids["<mark>"]
    assert vocabulary.decode_str(vocabulary.tokenize_str("ab<mark>")) == "ab<mark>"
    wide = load_vocabulary(tmp_path, 1000)
    assert wide.vocab_size == 1000


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": normalizers.NFC()},
        {"normalizer": normalizers.Sequence([normalizers.Prepend("x"), normalizers.Strip()])},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])},
    ],
)
def test_a_text_within_an_output_is_tokenized_as_it_is(parts: dict[str, Any], tmp_path: Path) -> None:
    size = byte_level(tmp_path, **parts).get_vocab_size()
    vocabulary = load_vocabulary(tmp_path, size)
    for text in ("ABab", " e\u0301 ", "ab 12"):
        assert vocabulary.decode_bytes(vocabulary.tokenize_str(text)) == text.encode()


def test_sentencepiece_puts_no_space_before_a_text(tmp_path: Path) -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    model = BPE(
        {piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(tmp_path, len(pieces))
    assert vocabulary.tokenize_str("a a") == [pieces.index("a"), pieces.index("▁a")]
    assert vocabulary.decode_bytes(vocabulary.tokenize_str("é a")) == "é a".encode()


def test_a_tokenizer_without_a_tokenizer_json_is_converted(tmp_path: Path) -> None:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary = load_vocabulary(tmp_path, len(pieces))
    assert vocabulary.tokenize_str("ab") == [pieces.index("ab")]
    assert vocabulary.is_special_token(len(pieces) - 1)


def test_a_decoder_that_makes_no_bytes_of_tokens_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="WordPiece"):
        load_vocabulary(tmp_path, 2)

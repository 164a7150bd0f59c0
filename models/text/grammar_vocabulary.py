"""A checkpoint's tokens in llguidance's form. The ranks and the process that checks grammars read them here alone.

llguidance's own reader takes every added token of the shape `<...>` for a special one, so that no text could hold Qwen3's
`<tool_call>`. Which tokens are special is what the tokenizer says."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from core.errors import ConfigError
from models.text.decoded_tokens import bytes_of_tokens
from models.text.tokenizer import load_tokenizer

_NO_TOKEN = 0xFFFFFFFF
"""llguidance's id of none. Baton allows end tokens by itself."""
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def load_vocabulary(folder: Path, vocab_size: int, *, makes_many: bool = True) -> LLTokenizer:
    """Return the first `vocab_size` tokens, those that the model has logits for. `makes_many`: it takes longer, and each mask is
    made sooner. Raises ValueError for a tokenizer that is missing, or whose tokens stand for no bytes."""
    try:
        tokenizer = _read(folder)
        tokens = bytes_of_tokens(tokenizer, vocab_size)
    except (ConfigError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"this model's tokenizer cannot be constrained: {folder}: {reason}") from None
    added = tokenizer.get_added_tokens_decoder()
    special = [token for token, name in added.items() if name.special and token < vocab_size]
    # In two calls, since other threads of Python stand still in each.
    plain = LLTokenizer(TokenizerWrapper(_Source(tokenizer, tokens, special)), slices=[])
    return plain.with_slices(LLTokenizer.general_slices()) if makes_many else plain


class _Source:
    """What `TokenizerWrapper` asks for. A call returns the tokens that the model would write a text with."""

    eos_token_id = _NO_TOKEN
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: Sequence[int]) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self._tokenizer, self._special = _of_inner_text(tokenizer), frozenset(special)

    def __call__(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        is_text = all(token < len(self.tokens) and token not in self._special for token in ids)
        if is_text and b"".join([self.tokens[token] for token in ids]) == text.encode():
            return ids
        return self._longest_first(text.encode())

    def _longest_first(self, text: bytes) -> list[int]:
        """Return the longest token at each place, where the tokenizer would have changed the text or used a token that the model
        cannot."""
        ids, start = list[int](), 0
        while start < len(text):
            ends = range(min(len(text), start + self._max_bytes), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[text[start:end]])
            start = end
        return ids

    @cached_property
    def _ids(self) -> Mapping[bytes, int]:
        return {text: token for token, text in enumerate(self.tokens) if text and token not in self._special}

    @cached_property
    def _max_bytes(self) -> int:
        return max(map(len, self._ids), default=0)


def _read(folder: Path) -> Tokenizer:
    """Return the tokenizer with the tokens that transformers would add. Raises ConfigError.

    A tokenizer.json is read without transformers, whose import takes seconds."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _converted(folder)
    try:
        tokenizer = Tokenizer.from_file(str(file))
        config = folder / "tokenizer_config.json"
        settings = json.loads(config.read_text()) if config.is_file() else {}
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise ConfigError(f"tokenizer.json cannot be read: {error}") from None
    tokenizer.add_tokens([*_additions(tokenizer, settings)])
    return tokenizer


def _converted(folder: Path) -> Tokenizer:
    try:
        return load_tokenizer(folder).backend
    except ConfigError as error:
        raise ConfigError(f"there is no tokenizer.json, and {error}") from None


def _additions(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the tokens that tokenizer_config.json adds to those of tokenizer.json, or calls special, as transformers does."""
    there = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    listed: Mapping[str, Any] = settings.get("added_tokens_decoder") or {}
    for _, fields in sorted(listed.items(), key=lambda pair: int(pair[0])):
        token = _token(fields)
        if repr(token) != repr(there.get(token.content)):
            there[token.content] = token
            yield token
    more: Any = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    named = [value for key, value in settings.items() if key.endswith("_token")]
    named += more.values() if isinstance(more, dict) else ()
    for value in filter(_is_token, named):
        token = _token(value)
        known = there.get(token.content, token)
        if known is token or not known.special:
            known.special = True
            there[known.content] = known
            yield known
    for value in filter(_is_token, more if isinstance(more, list) else ()):
        if (token := _token(value)).content not in there:
            there[token.content] = token
            yield token


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _token(value: Any) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(value["content"], **{flag: value[flag] for flag in _FLAGS if flag in value})


def _of_inner_text(tokenizer: Tokenizer) -> Tokenizer:
    """Have it tokenize text as it stands within an output: nothing is put before it or changed, and special tokens in it are
    text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if tokenizer.normalizer is not None:
        state = json.loads(tokenizer.normalizer.__getstate__())
        kept = [*_replacements(state)]
        tokenizer.normalizer = normalizers.Sequence(kept) if kept else None
    if tokenizer.pre_tokenizer is not None:
        _put_nothing_before(tokenizer.pre_tokenizer)
    return tokenizer


def _replacements(normalizer: Mapping[str, Any]) -> Iterator[normalizers.Normalizer]:
    match normalizer:
        case {"type": "Sequence", "normalizers": [*inner]}:
            for each in inner:
                yield from _replacements(each)
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            yield normalizers.Replace(old, new)
        case _:
            pass


def _put_nothing_before(pre_tokenizer: Any) -> None:
    if isinstance(pre_tokenizer, pre_tokenizers.Metaspace):
        pre_tokenizer.prepend_scheme = "never"
    elif isinstance(pre_tokenizer, pre_tokenizers.ByteLevel):
        pre_tokenizer.add_prefix_space = False
    elif isinstance(pre_tokenizer, pre_tokenizers.Sequence):
        for number in range(len(json.loads(pre_tokenizer.__getstate__())["pretokenizers"])):
            _put_nothing_before(pre_tokenizer[number])

"""The bytes that each token adds to a text, as the tokenizer's own decoder makes them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from models.text.token_bytes import FALLBACK, LETTERS

_Step = Callable[[str | bytes], str | bytes]


class _Letters(dict[int, int]):
    """What `str.translate` makes bytes of. A character that stands for no byte becomes one that Latin-1 has not."""

    def __missing__(self, key: int) -> int:
        return 0x100


_TABLE = _Letters({ord(letter): byte for letter, byte in LETTERS.items()})


def bytes_of_tokens(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Return the bytes of each id below `size`, empty where it has no token. Raises ValueError for a decoder that does not make
    bytes of each token by itself."""
    steps = [*_steps(json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {})]
    out = [b""] * size
    for piece, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token < size:
            made: str | bytes = piece
            for step in steps:
                made = step(made)
            out[token] = made if isinstance(made, bytes) else made.encode()
    return out


def _steps(decoder: Mapping[str, Any]) -> list[_Step]:
    match decoder:
        case {"type": "Sequence", "decoders": [*inner]}:
            return [step for each in inner for step in _steps(each)]
        case {"type": "ByteLevel"}:
            return [_byte_level]
        case {"type": "ByteFallback"}:
            return [_byte_fallback]
        case {"type": "Metaspace", "replacement": old}:
            return [_replacing(old, " ")]
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return [_replacing(old, new)]
        case {"type": "Fuse" | "Strip"}:
            return []  # they act on a whole text
        case _:
            kind = decoder.get("type", "none")
            raise ValueError(f"its decoder ({kind}) does not make bytes of each token by itself")


def _byte_level(made: str | bytes) -> str | bytes:
    assert isinstance(made, str)
    try:
        return made.translate(_TABLE).encode("latin-1")
    except UnicodeEncodeError:
        return made.encode()


def _byte_fallback(made: str | bytes) -> str | bytes:
    if isinstance(made, str) and (found := FALLBACK.fullmatch(made)):
        return bytes.fromhex(found[1])
    return made


def _replacing(old: str, new: str) -> _Step:
    return lambda made: made.replace(old, new) if isinstance(made, str) else made

"""The bytes of a token that is only part of a character, from its piece in the vocabulary."""

import re

FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece writes a byte of a character that it has no token for."""


def _letters() -> dict[str, int]:
    """Return GPT-2's letter of each byte: itself where it is printable in Latin-1, else the next one from U+0100 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


LETTERS = _letters()
"""The byte that each letter of a byte-level piece stands for."""


def bytes_of_piece(piece: str) -> bytes | None:
    """Return the bytes that `piece` stands for. None where it is not written in bytes."""
    if found := FALLBACK.fullmatch(piece):
        return bytes.fromhex(found[1])
    return bytes(LETTERS[letter] for letter in piece) if all(letter in LETTERS for letter in piece) else None

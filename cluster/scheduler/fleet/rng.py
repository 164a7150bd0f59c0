"""Choices that look random and can be repeated: the same request draws the same numbers in every replay."""

from typing import Final
from zlib import crc32

_MULTIPLIER: Final = 48271
_MODULUS: Final = (1 << 31) - 1


class RequestRng:
    """A multiplicative congruential generator (Park, Miller and Stockmeyer, CACM 36 no. 7, 1993), seeded with a name. It is cheap
    to make for each decision. No product is too large for a machine word."""

    __slots__ = ("_state",)

    def __init__(self, name: str, turn: int = 0) -> None:
        self._state = 1 + crc32(name.encode(), turn) % (_MODULUS - 1)

    def below(self, limit: int) -> int:
        """Return a number from 0 to `limit` - 1. Each is about as likely."""
        self._state = self._state * _MULTIPLIER % _MODULUS
        return self._state % limit

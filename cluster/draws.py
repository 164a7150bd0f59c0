"""Choices that look random and can be repeated: the same request draws the same numbers in every replay. Pure."""

from zlib import crc32

_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407
_MASK = (1 << 64) - 1


class Draws:
    """A linear congruential generator (Knuth's MMIX constants), begun from a name; cheap to make for each decision."""

    __slots__ = ("_state",)

    def __init__(self, name: str, turn: int = 0) -> None:
        self._state = crc32(name.encode(), turn) * _MULTIPLIER & _MASK

    def below(self, limit: int) -> int:
        """Of 0 .. `limit` - 1, each about as likely."""
        self._state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
        return (self._state >> 33) % limit

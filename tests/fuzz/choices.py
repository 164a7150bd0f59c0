"""Turns the bytes of a fuzzer into choices, so that a small change of the bytes is a small change of what is tried."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Past the end every byte is zero."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def num_left(self) -> int:
        return len(self._data) - self._at

    def below(self, limit: int) -> int:
        """Return a number from 0 to `limit` - 1."""
        size = 1 if limit <= 256 else 2
        return int.from_bytes(self.take(size)) % limit

    def pick(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes, fewer where the input ends."""
        taken = self._data[self._at : self._at + num_bytes]
        self._at += len(taken)
        return taken

    def piece(self, longest: int) -> bytes:
        """Return bytes whose number is a choice as well."""
        return self.take(self.below(longest + 1))

    def rest(self) -> bytes:
        return self.take(self.num_left)


def split(data: bytes, cuts: bytes) -> list[bytes]:
    """Return `data` in pieces. Each byte of `cuts` is the length of one of them, and the last one has the rest."""
    pieces: list[bytes] = []
    for size in cuts:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]

"""What a prefix cache remembers of blocks that it has given up, in columns: a lesson reads tens of thousands at once. Pure.

Invariant: `_places` names exactly the rows that are remembered; other rows belong to nobody until they are swept out."""

from array import array
from typing import NamedTuple

import numpy as np

_SLACK = 2
"""Rows for each ghost that may be remembered, before those that belong to nobody are swept out."""


class Ghost(NamedTuple):
    group: int
    idle_since: int
    uses: int


class Ghosts:
    def __init__(self, limit: int) -> None:
        """Of more than `limit` the one that came first is forgotten."""
        self._limit = limit
        self._places: dict[int, int] = {}
        self._oldest = 0
        """No row before this one is remembered."""
        self._hashes, self._columns = array("Q"), (array("q"), array("q"), array("q"))

    def __len__(self) -> int:
        return len(self._places)

    def remember(self, block_hash: int, ghost: Ghost) -> None:
        """`block_hash` (64 bits) is not remembered yet."""
        if len(self._hashes) >= _SLACK * (self._limit + 1):
            self._sweep()
        self._places[block_hash] = len(self._hashes)
        self._hashes.append(block_hash)
        groups, since, uses = self._columns
        groups.append(ghost.group)
        since.append(ghost.idle_since)
        uses.append(ghost.uses)
        if len(self._places) > self._limit:
            self._forget_oldest()

    def recall(self, block_hash: int) -> Ghost | None:
        """It is wanted again, and so no ghost any more; None: it was none."""
        place = self._places.pop(block_hash, None)
        if place is None:
            return None
        groups, since, uses = self._columns
        return Ghost(groups[place], since[place], uses[place])

    def groups_and_times(self) -> tuple[np.ndarray, np.ndarray]:
        """Of all, `group` and `idle_since`, the first that came first."""
        rows = self._rows()
        groups, since, _ = self._columns
        return np.array(groups)[rows], np.array(since)[rows]

    def _forget_oldest(self) -> None:
        hashes, places = self._hashes, self._places
        while places.get(hashes[self._oldest]) != self._oldest:
            self._oldest += 1
        del places[hashes[self._oldest]]

    def _sweep(self) -> None:
        """Only rows that are remembered stay."""
        rows = self._rows()
        self._hashes = array("Q", np.array(self._hashes)[rows].tobytes())
        groups, since, uses = self._columns
        self._columns = _chosen(groups, rows), _chosen(since, rows), _chosen(uses, rows)
        self._places = dict(zip(self._hashes, range(len(rows)), strict=True))
        self._oldest = 0

    def _rows(self) -> np.ndarray:
        """Of all that are remembered, in order."""
        return np.fromiter(self._places.values(), np.int64, len(self._places))


def _chosen(column: "array[int]", rows: np.ndarray) -> "array[int]":
    return array("q", np.array(column)[rows].tobytes())

"""The prompts that reservations to one instance pay for, and how much of another prompt they have in common."""

from collections.abc import Sequence


class ReservedPrefixes:
    """The block hashes of prompts that reservations pay for. A hash covers all that comes before its block
    (`core.kv.block_hashes`), so the last block in which two prompts agree tells how much they have in common."""

    __slots__ = ("_by_first",)

    def __init__(self) -> None:
        self._by_first: dict[int, dict[str, tuple[int, ...]]] = {}
        """First hash -> reservation -> all hashes."""

    def add(self, key: str, hashes: tuple[int, ...]) -> None:
        chains = self._by_first.get(hashes[0])
        if chains is None:
            self._by_first[hashes[0]] = {key: hashes}
        else:
            chains[key] = hashes

    def remove(self, key: str, hashes: tuple[int, ...]) -> None:
        chains = self._by_first[hashes[0]]
        del chains[key]
        if not chains:
            del self._by_first[hashes[0]]

    def num_shared(self, hashes: Sequence[int], limit: int) -> int:
        """Return the most leading blocks, of the first `limit` (at least one), that some reservation pays for."""
        most = 0
        if (chains := self._by_first.get(hashes[0])) is not None:
            for chain in chains.values():
                end = min(limit, len(chain))
                if most < end and chain[most] == hashes[most]:
                    most = _num_common(chain, hashes, most + 1, end)
        return most


def _num_common(one: Sequence[int], other: Sequence[int], low: int, high: int) -> int:
    """Return how many leading hashes are the same in both. It is at least `low` and at most `high`."""
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low

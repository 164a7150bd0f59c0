"""Which instance caches which prefix, as far as the instances have told. Pure.

Invariant: an instance is among the holders of a block hash if and only if its latest report about that hash said so."""

from collections import defaultdict
from collections.abc import Iterable, Sequence


class PrefixIndex:
    """Block hashes (`core.kv.block_hashes`, chained) to the addresses of the instances that hold them.

    Answers are hints: a block may have been evicted since; the instance then computes it again."""

    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = {}
        self._held: defaultdict[str, set[int]] = defaultdict(set)

    def __len__(self) -> int:
        """Distinct block hashes that some instance holds."""
        return len(self._holders)

    def update(self, instance: str, added: Iterable[int], removed: Iterable[int]) -> None:
        """Apply one report. A hash in both counts as removed: a missed hit costs less than a false one."""
        held = self._held[instance]
        for block in added:
            held.add(block)
            self._holders.setdefault(block, set()).add(instance)
        for block in removed:
            if block in held:
                held.discard(block)
                self._withdraw(block, instance)

    def drop(self, instance: str) -> None:
        """Forget an instance that is gone or starts anew."""
        for block in self._held.pop(instance, ()):
            self._withdraw(block, instance)

    def runs(self, hashes: Sequence[int]) -> dict[str, int]:
        """For each instance that holds the first block: how many leading blocks of `hashes` it holds without a gap.

        O(longest run); `hashes` are in prompt order."""
        runs: dict[str, int] = {}
        alive: set[str] = self._holders.get(hashes[0], set()) if hashes else set()
        length = 0
        for block in hashes:
            holders = self._holders.get(block, _NOBODY)
            if not alive <= holders:
                runs.update(dict.fromkeys(alive - holders, length))
                alive = alive & holders
            if not alive:
                break
            length += 1
        runs.update(dict.fromkeys(alive, length))
        return runs

    def _withdraw(self, block: int, instance: str) -> None:
        holders = self._holders[block]
        holders.discard(instance)
        if not holders:
            del self._holders[block]


_NOBODY: frozenset[str] = frozenset()

"""Which instance caches which prefix, as far as the instances have reported.

Invariant: an instance is among the holders of a block hash if and only if its latest report about that hash said so, and the hash
is one of those that are kept. All are kept at first. When there are more than `max_entries` pairs of a hash and a holder, only
every second hash is kept from then on, chosen by its value. All instances and prompts agree on which, and runs are then known a
little too short."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

from cluster.scheduler.fleet.rng import RequestRng

MAX_ENTRIES: Final = 8_000_000
"""Takes 1.1 to 2 GB: 142 bytes each where nine of ten are shared by several instances, 249 where none is."""


class PrefixIndex:
    """Maps block hashes (`core.kv.block_hashes`, chained) to the addresses of the instances that hold them.

    Answers are hints: a block may have been evicted since. The instance then computes it again."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self.num_entries = 0
        self.stride = 1
        """One of so many hashes is kept; a power of two."""
        self._holders: dict[int, list[str]] = {}
        """Hash -> holders, in the order of their reports, so that a replay finds the same order."""
        self._held: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Return the number of distinct block hashes that some instance holds."""
        return len(self._holders)

    def update(self, instance: str, added: Iterable[int], removed: Iterable[int]) -> None:
        """Apply one report. A hash in both counts as removed: a missed hit costs less than a false one."""
        held = self._held.setdefault(instance, set())
        before, mask = len(held), self.stride - 1
        for block in added:
            if not block & mask and block not in held:
                held.add(block)
                self._holders.setdefault(block, []).append(instance)
        for block in removed:
            if block in held:
                held.discard(block)
                self._withdraw(block, instance)
        self.num_entries += len(held) - before
        while self.num_entries > self._max_entries:
            self._thin_out()

    def drop(self, instance: str) -> None:
        """Forget an instance that is gone or starts anew."""
        held = self._held.pop(instance, set[int]())
        self.num_entries -= len(held)
        for block in held:
            self._withdraw(block, instance)

    def match(self, hashes: Sequence[int]) -> "PrefixHolders":
        """Return which instances hold how much of the prompt with these block hashes, in prompt order."""
        mask = self.stride - 1
        ends: Sequence[int] = range(1, len(hashes) + 1)
        if mask:
            kept = [(end, block) for end, block in zip(ends, hashes, strict=True) if not block & mask]
            ends, hashes = [end for end, _ in kept], [block for _, block in kept]
        return PrefixHolders(self._holders, self._held, hashes, ends)

    def _withdraw(self, block: int, instance: str) -> None:
        holders = self._holders[block]
        holders.remove(instance)
        if not holders:
            del self._holders[block]

    def _thin_out(self) -> None:
        self.stride *= 2
        mask = self.stride - 1
        self._holders = {block: holders for block, holders in self._holders.items() if not block & mask}
        self._held = {
            name: {block for block in held if not block & mask} for name, held in self._held.items()
        }
        self.num_entries = sum(len(held) for held in self._held.values())


class PrefixHolders:
    """For each instance, how many leading blocks of one prompt it holds. It is worked out on request.

    An instance that holds a block is taken to hold all before it, since a prefix cache gives up the last first."""

    __slots__ = ("_deepest", "_ends", "_found", "_hashes", "_held", "_holders", "_rest", "_runs")

    def __init__(
        self,
        holders: Mapping[int, Sequence[str]],
        held: Mapping[str, set[int]],
        hashes: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        self._holders, self._held, self._hashes, self._ends = holders, held, hashes, ends
        self._runs: dict[str, int] = {}
        self._found: dict[str, int] = {}
        """Address -> an upper bound of its leading blocks."""
        self._deepest = self._rest = _num_known(holders, hashes, len(hashes))
        """`_deepest` is the most that any instance holds, and `_rest` the most that an instance which is not in `_found` may
        hold."""

    def get(self, address: str, default: int = 0, /) -> int:
        if not self._deepest:
            return default
        if (run := self._runs.get(address)) is None:
            depth = self._found.get(address, self._rest)
            if depth:
                depth = _num_known(self._held.get(address, _NOTHING), self._hashes, depth)
            run = self._runs[address] = self._ends[depth - 1] if depth else 0
        return run or default

    def longest(self, count: int, rng: RequestRng) -> list[str]:
        """Return up to `count` instances that hold most of it, most first. Among equals a draw decides."""
        depth = self._deepest
        found = self._found = dict[str, int]()
        while depth and len(found) < count:
            holders = self._holders[self._hashes[depth - 1]]
            size = len(holders)
            if size > count:
                first = rng.below(size)
                holders = [holders[(first + index) % size] for index in range(count)]
            for address in holders:
                found.setdefault(address, depth)
            if size <= count:
                depth = _last_with_more(self._holders, self._hashes, depth - 1, size)
        self._rest = depth
        return [address for address in found if self._hashes[0] in self._held[address]][:count]


def _num_known(known: Container[int], hashes: Sequence[int], length: int) -> int:
    """Return how many of the first `length` hashes are known, given that none is known after one that is not."""
    low, high = int(length > 0 and hashes[0] in known), length + 1
    while low and high - low > 1:
        middle = (low + high) // 2
        if hashes[middle - 1] in known:
            low = middle
        else:
            high = middle
    return low


def _last_with_more(
    holders: Mapping[int, Sequence[str]], hashes: Sequence[int], length: int, count: int
) -> int:
    """Return the largest number of leading hashes, at most `length`, the last of which more than `count` instances hold."""
    low, high = 0, length + 1
    while high - low > 1:
        middle = (low + high) // 2
        if len(holders.get(hashes[middle - 1], ())) > count:
            low = middle
        else:
            high = middle
    return low


_NOTHING: frozenset[int] = frozenset()

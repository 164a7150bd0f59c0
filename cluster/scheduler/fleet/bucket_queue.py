"""Instances in rough order of a quantity, so that the least and the most loaded are found without a scan.

Each instance is in the bucket of its quantity. Moving one, and finding the lowest bucket that is not empty, take constant time.
Instances of one bucket count as equal, and a draw says which one is taken, so that schedulers that do not see each other do not
all take the first.

Invariant: an entry belongs to one queue, its bucket and position say where it is found there, and the bits of `_filled` are those
of the buckets that are not empty."""

from math import inf, log2
from typing import Final

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.fleet.rng import RequestRng

_PER_DOUBLING: Final = 8
HIGHEST: Final = 255
NOWHERE: Final = -1


def bucket_of(quantity: float, unit: float) -> int:
    """Return the bucket of a quantity: 0 for nothing. Buckets are `unit` / 11 wide at first, and 9 % of the quantity later."""
    if quantity <= 0:
        return 0
    if quantity == inf:
        return HIGHEST
    return min(HIGHEST, 1 + int(_PER_DOUBLING * log2(1 + quantity / unit)))


class BucketEntry:
    """Where one member is in a queue, which alone moves it."""

    __slots__ = ("bucket", "member", "position")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.bucket = NOWHERE
        self.position = 0


class BucketQueue:
    def __init__(self) -> None:
        self._buckets: dict[int, list[BucketEntry]] = {}
        self._filled = 0
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def put(self, entry: BucketEntry, bucket: int) -> None:
        """Move the entry to that bucket."""
        if entry.bucket == bucket:
            return
        self.take(entry)
        entries = self._buckets.get(bucket)
        if entries is None:
            entries = self._buckets[bucket] = []
        if not entries:
            self._filled |= 1 << bucket
        entry.bucket, entry.position = bucket, len(entries)
        entries.append(entry)
        self._num_entries += 1

    def take(self, entry: BucketEntry) -> None:
        """Take the entry out. Nothing happens where it is in no bucket."""
        bucket = entry.bucket
        if bucket == NOWHERE:
            return
        entries = self._buckets[bucket]
        last = entries.pop()
        if last is not entry:
            entries[entry.position] = last
            last.position = entry.position
        elif not entries:
            self._filled &= ~(1 << bucket)
        entry.bucket = NOWHERE
        self._num_entries -= 1

    @property
    def lowest_bucket(self) -> int:
        """Return the first bucket that is not empty, or NOWHERE when there is none."""
        return (self._filled & -self._filled).bit_length() - 1

    @property
    def highest_bucket(self) -> int:
        """Return the last bucket that is not empty, or NOWHERE when there is none."""
        return self._filled.bit_length() - 1

    def one_low(self, rng: RequestRng) -> Member | None:
        """Return one member of the lowest bucket, or None when the queue is empty."""
        return _one(self._buckets[self.lowest_bucket], rng) if self._filled else None

    def one_high(self, rng: RequestRng, at_most: int = HIGHEST) -> Member | None:
        """Return one member of the highest bucket that is not above `at_most`."""
        if not (filled := self._filled & ((2 << at_most) - 1)):
            return None
        return _one(self._buckets[filled.bit_length() - 1], rng)

    def lowest(self, count: int, rng: RequestRng) -> list[Member]:
        """Return up to `count` members, from the lowest bucket upwards."""
        found: list[Member] = []
        filled = self._filled
        while filled and len(found) < count:
            bucket = (filled & -filled).bit_length() - 1
            self._some(bucket, count - len(found), rng, found)
            filled &= filled - 1
        return found

    def _some(self, bucket: int, count: int, rng: RequestRng, found: list[Member]) -> None:
        entries = self._buckets[bucket]
        size = len(entries)
        first = rng.below(size) if size > count else 0
        found += [entries[(first + index) % size].member for index in range(min(size, count))]


def _one(entries: list[BucketEntry], rng: RequestRng) -> Member:
    return entries[rng.below(len(entries)) if len(entries) > 1 else 0].member

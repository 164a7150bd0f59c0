"""Which cached block is given up first.

A policy puts blocks that are expected to be used again alike into one group. Within a group the block that has been idle
longest goes first. Between groups, the one whose longest idle block is worth least goes first. Ages count blocks released, not
seconds."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import numpy as np

_NUM_AGES = 48
_USES = (1, 2, 3, 5, 8)
_TOKENS = (1_536, 4_096, 16_384, 65_536)
_REMEMBERED = 0.998
"""The share of earlier observations that still counts at the next lesson, since loads change."""
_GUESS_USES = 100.0
"""The number of observed uses at which a group's own evidence counts as much as that of all groups together."""


class Eviction(Protocol):
    """What RadixCache asks of an eviction policy. Groups are small integers."""

    @property
    def learns(self) -> bool:
        """Whether `reused` and `learn` are to be called."""
        ...

    def group(self, uses: int, num_tokens: int, priority: int) -> int:
        """Return the group of a block that falls idle. Blocks like it were used `uses` times, last in a sequence of
        `num_tokens`."""
        ...

    def value(self, group: int, age: int) -> float:
        """Return what it is worth to keep a block that has been idle for `age`. The block that is worth least goes first."""
        ...

    def reused(self, group: int, age: int) -> None:
        """Learn that a block was wanted again after `age`, whether it was still there or not."""
        ...

    def learn(self, groups: np.ndarray, ages: np.ndarray) -> None:
        """Learn from blocks that have not been wanted again: those that are idle now or were given up recently. Called now and
        then."""
        ...


class LeastRecentlyUsed:
    learns = False

    def group(self, uses: int, num_tokens: int, priority: int) -> int:
        return 0

    def value(self, group: int, age: int) -> float:
        return -age

    def reused(self, group: int, age: int) -> None:
        return

    def learn(self, groups: np.ndarray, ages: np.ndarray) -> None:
        return


class HitDensity:
    """Value a block by the most hits that it can be expected to give for the time that it is kept, times its class's weight. This
    is LHD's measure (Beckmann, Chen, Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018, section 3).

    The rates of use by group and age are learned from blocks that were wanted again and from those that were not. A group is made
    of how often blocks like it were used and of its sequence's length, since these tell conversations that go on from those that
    have ended. Until something is learned the order is LRU."""

    learns = True

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int, int], int] = {}
        self._weights: list[float] = []
        self._ended: list[list[float]] = []
        """(groups, ages): blocks that were wanted again at that age. `_excess` has the sum of their ages beyond the bucket's
        begin. Lists, since they are added to one by one."""
        self._excess: list[list[float]] = []
        self._values: list[list[float]] = []

    def group(self, uses: int, num_tokens: int, priority: int) -> int:
        key = (_rank(_USES, uses), _rank(_TOKENS, num_tokens), priority)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows)
            self._weights.append(2.0**priority)
            self._ended.append([0.0] * _NUM_AGES)
            self._excess.append([0.0] * _NUM_AGES)
        return row

    def value(self, group: int, age: int) -> float:
        if group >= len(self._values):
            return 1.0 / (age + 1)
        return self._values[group][_bucket(age)]

    def reused(self, group: int, age: int) -> None:
        bucket = _bucket(age)
        self._ended[group][bucket] += 1
        self._excess[group][bucket] += age - _BEGIN_LIST[bucket]

    def learn(self, groups: np.ndarray, ages: np.ndarray) -> None:
        waiting, waiting_excess = _histogram(groups, ages, len(self._rows))
        ended, excess = _table(self._ended), _table(self._excess)
        exposure = _exposure(waiting + ended, waiting_excess + excess)
        pooled = (ended.sum(0) + 0.1) / (exposure.sum(0) + _BEGINS[1:] - _BEGINS[:-1])
        rates = (ended + _GUESS_USES) / (exposure + _GUESS_USES / pooled)
        weights = np.asarray(self._weights)[:, None]
        self._values = (_hit_density(rates) * weights).tolist()
        self._ended = (ended * _REMEMBERED).tolist()
        self._excess = (excess * _REMEMBERED).tolist()


_BEGINS = np.array([0.0, *(2.0 ** (i / 2) for i in range(1, _NUM_AGES + 1))])
"""The ages at which the buckets begin, two in each doubling. The last entry ends the last bucket."""
_BEGIN_LIST: list[float] = _BEGINS.tolist()


def _bucket(age: int) -> int:
    """Return an age's bucket, two in each doubling, without a logarithm."""
    if age < 2:
        return 0
    octave = age.bit_length() - 1
    return min(2 * octave + (age * age >= 1 << (2 * octave + 1)), _NUM_AGES - 1)


def _table(rows: list[list[float]]) -> np.ndarray:
    """Return an array (groups, _NUM_AGES), also where there is no group."""
    return np.array(rows).reshape(-1, _NUM_AGES)


def _rank(limits: Sequence[int], number: int) -> int:
    """Return how many of the rising `limits` are below `number`."""
    return bisect_left(limits, number)


def _histogram(groups: np.ndarray, ages: np.ndarray, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays (num_groups, _NUM_AGES): the number of blocks, and the sum of their ages beyond their bucket's begin."""
    age = ages.astype(float)
    bucket = np.clip(np.searchsorted(_BEGINS, age, "right") - 1, 0, _NUM_AGES - 1)
    cell = groups * _NUM_AGES + bucket
    size = num_groups * _NUM_AGES
    count = np.bincount(cell, minlength=size).reshape(num_groups, _NUM_AGES)
    excess = np.bincount(cell, age - _BEGINS[bucket], size).reshape(num_groups, _NUM_AGES)
    return count, excess


def _exposure(count: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """Return (groups, ages) block-ages spent in each bucket by blocks that ended, or still wait, in it or a later one."""
    beyond = count[:, ::-1].cumsum(1)[:, ::-1] - count
    return beyond * np.diff(_BEGINS) + excess


def _hit_density(rates: np.ndarray) -> np.ndarray:
    """Return (groups, ages) the largest ratio of expected hits to expected age, over all times to keep a block, from rates of
    use."""
    widths = np.diff(_BEGINS)
    used = -np.expm1(-rates * widths)
    held = used / rates
    best = np.zeros_like(rates)
    for begin in range(_NUM_AGES):
        left = np.cumprod(1.0 - used[:, begin:], 1)
        left = np.hstack((np.ones((len(rates), 1)), left[:, :-1]))
        hits = np.cumsum(left * used[:, begin:], 1)
        ages = np.cumsum(left * held[:, begin:], 1)
        best[:, begin] = (hits / ages).max(1)
    return best

"""Which share of outputs ends at which length, estimated while many of them still run.

It is a life table (Kaplan and Meier, 1958) over buckets of lengths: of the outputs that come to a bucket, some end in it. One
that is still in a bucket has passed half of it, on the average, so it counts as half an output there (the actuarial estimate),
and makes no output look short. All counts are of what has happened lately, whenever those outputs began (a period life table),
so a change shows at each length as soon as outputs pass it. What was expected beforehand counts as some outputs that came
before all others (Susarla and Van Ryzin, 1976): it decides where none has come, and is forgotten where many have."""

from math import log2, pi, sin, sqrt
from typing import Final

from core.output_marks import MARKS_PER_DOUBLING, mark

NUM_BUCKETS: Final = 24 * MARKS_PER_DOUBLING
_LEAST_EXPECTED: Final = 1e-6
"""What was expected beforehand counts as this part of an output at the least, and so decides where no output has come."""

_LEAST_SHARE: Final = 1e-9
"""No output is so long that none is taken to be longer."""


def bucket_of(num_tokens: int) -> int:
    """Return the bucket that a length of at least 1 is in. Each begins at a `core.output_marks.mark`; the second is
    empty, since no length is between 1 and 2."""
    return min(NUM_BUCKETS - 1, int(log2(max(1, num_tokens)) * MARKS_PER_DOUBLING))


class LengthCurve:
    """A distribution of output lengths. Never changed."""

    __slots__ = ("_quantiles", "hazards", "mean", "means", "reach")

    def __init__(self, reach: list[float], hazards: list[float], means: list[float]) -> None:
        """For each bucket: `reach` is the share of outputs that come to it, `hazards` the share of those that end in it, and
        `means` the mean length of these."""
        self.reach, self.hazards, self.means = reach, hazards, means
        mean = 0.0
        for bucket in range(NUM_BUCKETS):
            mean += reach[bucket] * hazards[bucket] * means[bucket]
        self.mean = mean
        self._quantiles: dict[float, int] = {}

    def quantile(self, share: float) -> int:
        """Return how many tokens `share` of the outputs do not exceed, to a fifth: the mean of those that end in that bucket."""
        if (known := self._quantiles.get(share)) is None:
            known = self._quantiles[share] = self._find(share)
        return known

    def longer_than(self, num_tokens: int) -> float:
        """Return the share of outputs that are longer. It is never 0, since any output may go on."""
        bucket = bucket_of(num_tokens)
        begin, end = mark(bucket), mark(bucket + 1)
        passed = min(1.0, max(0, num_tokens - begin) / max(1, end - begin))
        return max(_LEAST_SHARE, self.reach[bucket] * (1 - self.hazards[bucket] * passed))

    def _find(self, share: float) -> int:
        longer, bucket = 1 - share, 0
        while bucket < NUM_BUCKETS - 1 and self.reach[bucket] * (1 - self.hazards[bucket]) > longer:
            bucket += 1
        return round(self.means[bucket])


def expected_curve(mean_tokens: float, shape: float) -> LengthCurve:
    """Return the log-logistic distribution with this mean and shape. Its tail is long: the further an output has
    come, the longer it goes on."""
    scale = mean_tokens * sin(pi / shape) / (pi / shape)
    edges = [mark(bucket) for bucket in range(NUM_BUCKETS + 1)]
    reach = [1 / (1 + ((edge - 1) / scale) ** shape) for edge in edges]
    hazards = [1 - reach[i + 1] / reach[i] for i in range(NUM_BUCKETS - 1)]
    means = [sqrt(edges[i] * edges[i + 1]) for i in range(NUM_BUCKETS)]
    return LengthCurve(reach[:-1], [*hazards, 1.0], means)


class LengthCounts:
    """How many outputs have been in each bucket, and have ended in it, lately. Newer ones weigh more, instead of older ones
    less."""

    __slots__ = (
        "_been",
        "_decay",
        "_ended",
        "_expected_unit",
        "_tokens",
        "_unit",
        "num_changes",
        "num_ended",
    )

    def __init__(self, decay: float) -> None:
        """What an output counts is multiplied by `decay` with each that comes later."""
        self._decay = decay
        self._been = [0.0] * NUM_BUCKETS
        self._ended = [0.0] * NUM_BUCKETS
        self._tokens = [0.0] * NUM_BUCKETS
        """The lengths of those that have ended, added up."""
        self._unit = self._expected_unit = 1.0
        """What the next output counts, and each that was expected beforehand."""
        self.num_ended = 0
        self.num_changes = 0

    def enter(self, bucket: int, before: int) -> None:
        """Count an output that is now in a bucket, and was in the one `before`; -1: it is new."""
        if before < 0:
            self._age()
        else:
            self._been[before] += self._unit / 2
        for passed in range(before + 1, bucket):
            self._been[passed] += self._unit
        self._been[bucket] += self._unit / 2
        self.num_changes += 1

    def end(self, bucket: int, num_tokens: int) -> None:
        """Count one that has ended in the bucket in which it was."""
        self._been[bucket] += self._unit / 2
        self._ended[bucket] += self._unit
        self._tokens[bucket] += self._unit * num_tokens
        self.num_ended += 1
        self.num_changes += 1

    def curve(self, expected: LengthCurve, num_expected: float) -> LengthCurve:
        """Return the distribution, with what was `expected` beforehand as so many outputs."""
        weight = max(num_expected * self._expected_unit, _LEAST_EXPECTED * self._unit)
        reach, hazards, means, alive = list[float](), list[float](), list[float](), 1.0
        for bucket in range(NUM_BUCKETS):
            foreseen = weight * expected.reach[bucket]
            ending = foreseen * expected.hazards[bucket]
            been, ended = self._been[bucket] + foreseen, self._ended[bucket] + ending
            tokens = self._tokens[bucket] + ending * expected.means[bucket]
            hazard = min(1.0, ended / been) if been and bucket < NUM_BUCKETS - 1 else 1.0
            reach.append(alive)
            hazards.append(hazard)
            means.append(tokens / ended if ended else expected.means[bucket])
            alive *= 1 - hazard
        return LengthCurve(reach, hazards, means)

    def _age(self) -> None:
        self._unit /= self._decay
        if self._unit > 1e9:
            scale = 1 / self._unit
            self._been = [count * scale for count in self._been]
            self._ended = [count * scale for count in self._ended]
            self._tokens = [count * scale for count in self._tokens]
            self._expected_unit *= scale
            self._unit = 1.0

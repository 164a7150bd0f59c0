"""How long outputs are, learned from those that have ended: a distribution for each class and tenant.

Invariant: once enough is known of a tenant's own class, that answers; else the class, then all requests; else nothing is
known."""

from math import log2
from typing import Final

_BUCKETS_PER_DOUBLING: Final = 4
_NUM_BUCKETS: Final = 24 * _BUCKETS_PER_DOUBLING
_DECAY: Final = 0.998
"""The factor on an observation's weight for each later one: about the last 500 count."""
_ENOUGH: Final = 20.0
_MAX_REMEMBERED: Final = 4096


class OutputLengths:
    def __init__(self) -> None:
        self._of: dict[tuple[str, str], _Histogram] = {}

    def observe(self, tenant: str, slo_class: str, num_tokens: int) -> None:
        """Learn that a request of this class and tenant has ended after so many output tokens."""
        for key in {(tenant, slo_class): 0, ("", slo_class): 0, ("", ""): 0}:
            histogram = self._of.pop(key, None) or _Histogram()
            self._of[key] = histogram
            histogram.add(num_tokens)
        if len(self._of) > _MAX_REMEMBERED:
            del self._of[next(iter(self._of))]

    def quantile(self, tenant: str, slo_class: str, share: float) -> int | None:
        """Return how many tokens (rounded up by at most a fifth) `share` of the outputs do not exceed, or None where it is not
        known."""
        histogram = self._known(tenant, slo_class)
        return None if histogram is None else histogram.quantile(share)

    def mean(self, tenant: str, slo_class: str) -> float | None:
        histogram = self._known(tenant, slo_class)
        return None if histogram is None else histogram.mean()

    def _known(self, tenant: str, slo_class: str) -> "_Histogram | None":
        for key in ((tenant, slo_class), ("", slo_class), ("", "")):
            histogram = self._of.get(key)
            if histogram is not None and histogram.num_seen >= _ENOUGH:
                return histogram
        return None


class _Histogram:
    """Counts in buckets whose sizes grow by a fifth. Newer observations weigh more, instead of older ones less."""

    def __init__(self) -> None:
        self._counts = [0.0] * _NUM_BUCKETS
        self._total = self._sum = 0.0
        self._unit = 1.0
        self.num_seen = 0
        self._quantiles: dict[float, int] = {}
        """The quantiles since the last observation."""

    def add(self, num_tokens: int) -> None:
        self.num_seen += 1
        self._quantiles.clear()
        self._counts[_bucket(num_tokens)] += self._unit
        self._total += self._unit
        self._sum += self._unit * num_tokens
        self._unit /= _DECAY
        if self._unit > 1e9:
            scale = 1 / self._unit
            self._counts = [count * scale for count in self._counts]
            self._total, self._sum, self._unit = self._total * scale, self._sum * scale, 1.0

    def quantile(self, share: float) -> int:
        if (known := self._quantiles.get(share)) is None:
            known = self._quantiles[share] = self._find(share)
        return known

    def mean(self) -> float:
        return self._sum / self._total

    def _find(self, share: float) -> int:
        left = share * self._total
        for index, count in enumerate(self._counts):
            left -= count
            if left <= 0 and count > 0:
                return _upper(index)
        return _upper(max(i for i, count in enumerate(self._counts) if count > 0))


def _bucket(num_tokens: int) -> int:
    return min(_NUM_BUCKETS - 1, int(log2(max(1, num_tokens)) * _BUCKETS_PER_DOUBLING))


def _upper(index: int) -> int:
    """Return the largest count in a bucket."""
    return max(1, int(2 ** ((index + 1) / _BUCKETS_PER_DOUBLING) - 1e-9))

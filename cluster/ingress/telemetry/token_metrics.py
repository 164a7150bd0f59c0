"""The metrics that each token changes: plain numbers of the event loop that tokens pass through, which a scrape reads.

The client library's own take a lock and several calls for each change."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """How much was counted for one set of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        self.value += amount


class TokenCounter(Collector):
    """As the library's Counter, of whole numbers."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = f"baton_{name}", text, labels
        self._tallies: dict[tuple[str, ...], Tally] = {}
        self._whole = Tally()
        registry.register(self)

    def labels(self, *values: str) -> Tally:
        return self._tallies.setdefault(values, Tally())

    def inc(self, amount: int = 1) -> None:
        """Count for no labels, where the metric has none."""
        self._whole.value += amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, tally in self._tallies.items() if self._labels else [((), self._whole)]:
            family.add_metric(values, tally.value)
        yield family


class TokenHistogram(Collector):
    """As the library's Histogram."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = f"baton_{name}", text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        names = map(floatToGoString, (*self._bounds, float("inf")))
        buckets = [*zip(names, accumulate(self._counts), strict=True)]
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)

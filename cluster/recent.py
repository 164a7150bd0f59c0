"""The last minute of one ingress, for people who watch it: how each service class fares and what each link carries. Pure.

Of more than MAX_REQUESTS in the minute only the latest count, and rates are over the time that those took."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.timeline import Timeline, attained, first_token_s

WINDOW_S = 60.0
MAX_REQUESTS = 4096


@dataclass(frozen=True, slots=True)
class ClassStatus:
    """Times are None where no request came so far."""

    name: str
    ttft_target_s: float
    tpot_target_s: float
    requests_per_s: float
    attainment: float
    """Of all requests that ended, the refused ones included."""
    goodput_per_s: float
    """Requests per second that met both targets."""
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None


@dataclass(frozen=True, slots=True)
class LinkStatus:
    source: str
    target: str
    transport: str
    transfers_per_s: float
    bytes_per_s: float
    exposed_p50_s: float


class Recent:
    """`observe` is a cluster.timeline.Observe."""

    def __init__(self) -> None:
        self._ended: deque[Timeline] = deque(maxlen=MAX_REQUESTS)

    def observe(self, timeline: Timeline) -> None:
        self._ended.append(timeline)

    def classes(self, now: float) -> list[ClassStatus]:
        found: dict[str, list[Timeline]] = {}
        for timeline in self._lately(now):
            found.setdefault(timeline.request.slo.name, []).append(timeline)
        span_s = self._span_s(now)
        return [_class_status(found[name], span_s) for name in sorted(found)]

    def links(self, now: float) -> list[LinkStatus]:
        found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
        for timeline in self._lately(now):
            for attempt in timeline.attempts:
                if attempt.handed_over is not None and attempt.route is not None:
                    times = attempt.handed_over.times
                    link = (attempt.route.prefill, attempt.route.decode, times.transport)
                    found.setdefault(link, []).append((attempt.handed_over.num_bytes, times.exposed_s))
        span_s = self._span_s(now)
        return [
            LinkStatus(
                *link,
                transfers_per_s=len(moved) / span_s,
                bytes_per_s=sum(num_bytes for num_bytes, _ in moved) / span_s,
                exposed_p50_s=quantile([exposed_s for _, exposed_s in moved], 0.5) or 0.0,
            )
            for link, moved in sorted(found.items())
        ]

    def _lately(self, now: float) -> list[Timeline]:
        while self._ended and self._ended[0].ended_s < now - WINDOW_S:
            self._ended.popleft()
        return list(self._ended)

    def _span_s(self, now: float) -> float:
        if len(self._ended) < MAX_REQUESTS:
            return WINDOW_S
        return max(1.0, now - self._ended[0].ended_s)


def _class_status(timelines: Sequence[Timeline], span_s: float) -> ClassStatus:
    slo = timelines[-1].request.slo
    good = [timeline for timeline in timelines if attained(timeline)]
    first = [(t, at_s) for t in timelines if (at_s := first_token_s(t)) is not None]
    ttft = [at_s - t.started_s for t, at_s in first]
    tpot = [(t.ended_s - at_s) / (t.num_output - 1) for t, at_s in first if t.num_output > 1]
    return ClassStatus(
        name=slo.name,
        ttft_target_s=slo.ttft_s,
        tpot_target_s=slo.tpot_s,
        requests_per_s=len(timelines) / span_s,
        attainment=len(good) / len(timelines),
        goodput_per_s=len(good) / span_s,
        output_tokens_per_s=sum(t.num_output for t in timelines) / span_s,
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        tpot_p50_s=quantile(tpot, 0.5),
        tpot_p99_s=quantile(tpot, 0.99),
    )


def quantile(values: Sequence[float], q: float) -> float | None:
    """The nearest rank's value; None of nothing."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]

"""The last minute of one ingress, for people who watch it: how each service class and each route fares, and what links carry.

Where the minute has more than MAX_REQUESTS only the latest count, and rates are over the time that those took."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from cluster.ingress.telemetry import request_context
from cluster.ingress.telemetry.timeline import Timeline, attained, first_token_at, mean_gap_s
from core.types import Slo

WINDOW_S = 60.0
MAX_REQUESTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatus:
    """One class's figures. Times are None where no request came so far, targets where the class has none."""

    name: str
    ttft_target_s: float | None
    tpot_target_s: float | None
    requests_per_s: float
    attainment: float
    """The share of all requests that ended, the refused ones included."""
    goodput_per_s: float
    """Requests per second that met both targets."""
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteStatus:
    """One HTTP route's figures. Times are None where no request came so far."""

    name: str
    requests_per_s: float
    attainment: float
    """The share of all requests that met their classes' targets, of those that ended."""
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    source: str
    target: str
    transport: str
    transfers_per_s: float
    bytes_per_s: float
    exposed_p50_s: float


@dataclass(frozen=True, slots=True)
class _Moved:
    link: tuple[str, str, str]
    num_bytes: int
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """What is kept of a request. Its tokens are not: there may be a million."""

    ended_at: float
    route: str
    slo: Slo
    attained: bool
    num_output: int
    ttft_s: float | None
    tpot_s: float | None
    moved: tuple[_Moved, ...]


class Recent:
    """The last minute. `observe` is a cluster.ingress.telemetry.timeline.Observe."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=MAX_REQUESTS)

    def observe(self, timeline: Timeline) -> None:
        first_at = first_token_at(timeline)
        ended = _Ended(
            ended_at=timeline.ended_at,
            route=request_context.route.get(),
            slo=timeline.request.slo,
            attained=attained(timeline),
            num_output=timeline.num_output,
            ttft_s=None if first_at is None else first_at - timeline.started_at,
            tpot_s=mean_gap_s(timeline),
            moved=tuple(_moves(timeline)),
        )
        self._ended.append(ended)

    def classes(self, now: float) -> list[ClassStatus]:
        found: dict[str, list[_Ended]] = {}
        for ended in self._lately(now):
            found.setdefault(ended.slo.name, []).append(ended)
        span_s = self._span_s(now)
        return [_class_status(found[name], span_s) for name in sorted(found)]

    def routes(self, now: float) -> list[RouteStatus]:
        found: dict[str, list[_Ended]] = {}
        for ended in self._lately(now):
            found.setdefault(ended.route, []).append(ended)
        span_s = self._span_s(now)
        return [_route_status(found[name], span_s) for name in sorted(found)]

    def links(self, now: float) -> list[LinkStatus]:
        found: dict[tuple[str, str, str], list[_Moved]] = {}
        for ended in self._lately(now):
            for moved in ended.moved:
                found.setdefault(moved.link, []).append(moved)
        span_s = self._span_s(now)
        return [
            LinkStatus(
                source=source,
                target=target,
                transport=transport,
                transfers_per_s=len(moves) / span_s,
                bytes_per_s=sum(moved.num_bytes for moved in moves) / span_s,
                exposed_p50_s=quantile([moved.exposed_s for moved in moves], 0.5) or 0.0,
            )
            for (source, target, transport), moves in sorted(found.items())
        ]

    def _lately(self, now: float) -> Iterable[_Ended]:
        while self._ended and self._ended[0].ended_at < now - WINDOW_S:
            self._ended.popleft()
        return self._ended

    def _span_s(self, now: float) -> float:
        if len(self._ended) < MAX_REQUESTS:
            return WINDOW_S
        return max(1.0, now - self._ended[0].ended_at)


def _moves(timeline: Timeline) -> Iterable[_Moved]:
    for attempt in timeline.attempts:
        handed, route = attempt.handed_over, attempt.route
        if handed is not None and route is not None:
            link = (route.prefill, route.decode, handed.times.transport)
            yield _Moved(link, handed.num_bytes, handed.times.exposed_s)


def _class_status(ended: Sequence[_Ended], span_s: float) -> ClassStatus:
    slo, num_good = ended[-1].slo, sum(one.attained for one in ended)
    ttft = [one.ttft_s for one in ended if one.ttft_s is not None]
    tpot = [one.tpot_s for one in ended if one.tpot_s is not None]
    return ClassStatus(
        name=slo.name,
        ttft_target_s=shown_target(slo.ttft_s),
        tpot_target_s=shown_target(slo.tpot_s),
        requests_per_s=len(ended) / span_s,
        attainment=num_good / len(ended),
        goodput_per_s=num_good / span_s,
        output_tokens_per_s=sum(one.num_output for one in ended) / span_s,
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        tpot_p50_s=quantile(tpot, 0.5),
        tpot_p99_s=quantile(tpot, 0.99),
    )


def shown_target(limit_s: float) -> float | None:
    """Return a class's target; None where it has none."""
    return None if limit_s == inf else limit_s


def _route_status(ended: Sequence[_Ended], span_s: float) -> RouteStatus:
    ttft = [one.ttft_s for one in ended if one.ttft_s is not None]
    return RouteStatus(
        name=ended[-1].route,
        requests_per_s=len(ended) / span_s,
        attainment=sum(one.attained for one in ended) / len(ended),
        output_tokens_per_s=sum(one.num_output for one in ended) / span_s,
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
    )


def quantile(values: Sequence[float], q: float) -> float | None:
    """Return the nearest rank's value; None where there is none."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]

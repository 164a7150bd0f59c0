"""What is kept of the requests that have ended at one ingress: each with its phases, and why it was slow or failed.

Neither a prompt nor an answer is kept."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nlargest
from math import inf
from typing import Final

from cluster.ingress.telemetry import request_context
from cluster.ingress.telemetry.timeline import (
    Attempt,
    Timeline,
    attained,
    decode_at,
    first_token_at,
    mean_gap_s,
)

NUM_KEPT: Final = 2048
WINDOW_S: Final = 900.0
"""How far back the slowest and the failed ones are looked for."""
NUM_SHOWN: Final = 20
_TTFT_S, _TPOT_S = 10.0, 1.0
"""What counts as slow where a class has no target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """One placing. Times are seconds after the request came; None: it did not come so far."""

    number: int
    started_s: float
    placed_s: float | None
    first_token_s: float | None
    decode_s: float | None
    """When its decode instance had the whole prompt's KV."""
    ended_s: float
    prefill: str
    """Empty where the decode instance computed the prompt."""
    decode: str
    transport: str
    num_bytes: int
    prefill_queue_s: float
    longest_gap_s: float
    lost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    id: str
    client_id: str
    """As `X-Request-Id` said it."""
    route: str
    tenant: str
    slo_class: str
    started_at: float
    took_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    attained: bool
    error: str
    slowness: float
    """TTFT or TPOT over its target, whichever is more."""
    why: str
    """What took longest, in words."""
    attempts: list[EndedAttempt]


class EndedRequests:
    """`observe` is a cluster.ingress.telemetry.timeline.Observe."""

    def __init__(self) -> None:
        self._kept: deque[EndedRequest] = deque(maxlen=NUM_KEPT)

    def observe(self, timeline: Timeline) -> None:
        self._kept.append(_ended(timeline))

    def find(self, request_id: str) -> list[EndedRequest]:
        """Return what is kept under this id, whether the client gave it or not, the latest first."""
        return [one for one in reversed(self._kept) if request_id in (one.id, one.client_id)]

    def slowest(self, now: float) -> list[EndedRequest]:
        """Return the requests of the last minutes whose times were the largest parts of their targets."""
        done = (one for one in self._lately(now) if not one.error and one.ttft_s is not None)
        return nlargest(NUM_SHOWN, done, key=lambda one: one.slowness)

    def failed(self, now: float) -> list[EndedRequest]:
        """Return the failed requests of the last minutes, the latest first."""
        return [one for one in self._lately(now) if one.error][:NUM_SHOWN]

    def _lately(self, now: float) -> Iterable[EndedRequest]:
        return (one for one in reversed(self._kept) if one.started_at + one.took_s >= now - WINDOW_S)


def _ended(timeline: Timeline) -> EndedRequest:
    request, began_at = timeline.request, timeline.started_at
    first_at, tpot_s = first_token_at(timeline), mean_gap_s(timeline)
    ttft_s = None if first_at is None else first_at - began_at
    attempts = [_ended_attempt(one, began_at, timeline.ended_at) for one in timeline.attempts]
    ttft_share = (ttft_s or 0.0) / (request.slo.ttft_s if request.slo.ttft_s < inf else _TTFT_S)
    tpot_share = (tpot_s or 0.0) / (request.slo.tpot_s if request.slo.tpot_s < inf else _TPOT_S)
    return EndedRequest(
        id=request.id,
        client_id=request_context.request_id.get(),
        route=request_context.route.get(),
        tenant=request.tenant,
        slo_class=request.slo.name,
        started_at=began_at,
        took_s=timeline.ended_at - began_at,
        prompt_tokens=len(request.prompt),
        output_tokens=timeline.num_output,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        attained=attained(timeline),
        error=timeline.error,
        slowness=max(ttft_share, tpot_share),
        why=timeline.error or _why(attempts, is_late=ttft_share >= tpot_share),
        attempts=attempts,
    )


def _ended_attempt(attempt: Attempt, began_at: float, request_ended_at: float) -> EndedAttempt:
    route, handed = attempt.route, attempt.handed_over
    ended_at = request_ended_at if attempt.ended_at is None else attempt.ended_at
    return EndedAttempt(
        number=attempt.number,
        started_s=attempt.started_at - began_at,
        placed_s=_since(began_at, attempt.placed_at),
        first_token_s=_since(began_at, attempt.first_token_at),
        decode_s=_since(began_at, decode_at(attempt, ended_at)),
        ended_s=ended_at - began_at,
        prefill=route.prefill if route is not None else "",
        decode=route.decode if route is not None else "",
        transport=handed.times.transport if handed is not None else "",
        num_bytes=handed.num_bytes if handed is not None else 0,
        prefill_queue_s=handed.times.queue_s if handed is not None else 0.0,
        longest_gap_s=attempt.longest_gap_s,
        lost=attempt.lost,
    )


def _since(began_at: float, at: float | None) -> float | None:
    return None if at is None else at - began_at


def _why(attempts: list[EndedAttempt], *, is_late: bool) -> str:
    """Say what took longest before the first token, or behind it. An instance that was lost is named in any case."""
    lost = [one.lost for one in attempts if one.lost]
    went_on = f"; it went on after {', '.join(lost)} was lost" if lost else ""
    phases = [phase for one in attempts for phase in (_before(one) if is_late else _behind(one))]
    return (max(phases)[1] if phases else "nobody took it") + went_on


def _before(attempt: EndedAttempt) -> list[tuple[float, str]]:
    placed_s = attempt.ended_s if attempt.placed_s is None else attempt.placed_s
    waited_s = placed_s - attempt.started_s
    found = [(waited_s, f"it waited {_shown(waited_s)} for a place")]
    if attempt.placed_s is not None:
        took_s = (attempt.ended_s if attempt.first_token_s is None else attempt.first_token_s) - placed_s
        where = attempt.prefill or attempt.decode
        queue = f", {_shown(attempt.prefill_queue_s)} of it in a queue" if attempt.prefill_queue_s else ""
        found.append((took_s, f"its prompt took {_shown(took_s)} at {where}{queue}"))
    return found


def _behind(attempt: EndedAttempt) -> list[tuple[float, str]]:
    if attempt.first_token_s is None or attempt.decode_s is None:
        return []
    exposed_s, whole_s = attempt.decode_s - attempt.first_token_s, attempt.ended_s - attempt.first_token_s
    found = [(exposed_s, f"its KV came {_shown(exposed_s)} behind the first token")]
    gap_s = attempt.longest_gap_s
    if gap_s > whole_s / 2:
        found.append((gap_s, f"no token came for {_shown(gap_s)} from {attempt.decode}"))
    found.append((whole_s / 2, f"its steps were slow at {attempt.decode}, {_shown(gap_s)} at the most"))
    return found


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"

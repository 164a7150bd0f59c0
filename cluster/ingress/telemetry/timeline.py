"""What happened to one request, and when: what the ingress has seen, and what the instances have told it. It reads no clock
itself."""

from collections.abc import Callable
from dataclasses import dataclass, field

from core.messages import HandedOver
from core.types import Request, Route


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One placing. Times are the ingress's clock. What did not happen is None."""

    number: int
    started_at: float
    route: Route | None = None
    placed_at: float | None = None
    first_token_at: float | None = None
    longest_gap_s: float = 0.0
    """Between tokens as they came from instances."""
    ended_at: float | None = None
    handed_over: HandedOver | None = None
    """How the KV went from prefill to decode. None when decode computed the prompt itself, or it is not known yet."""
    lost: str = ""
    """The instance that was lost, or left."""


@dataclass(slots=True, kw_only=True)
class Timeline:
    request: Request
    started_at: float
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    num_output: int = 0
    ended_at: float = 0.0
    error: str = ""
    """Empty where it finished, or its client went away."""
    error_type: str = ""
    """The error's class."""


Observe = Callable[[Timeline], None]
"""Called with every request once, at its end."""


def first_token_at(timeline: Timeline) -> float | None:
    return next((a.first_token_at for a in timeline.attempts if a.first_token_at is not None), None)


def decode_at(attempt: Attempt, ended_at: float) -> float | None:
    """Return when the decode instance had the whole prompt's KV, by `ended_at` at the latest; None before the first token."""
    if attempt.first_token_at is None or attempt.handed_over is None:
        return attempt.first_token_at
    return min(ended_at, attempt.first_token_at + attempt.handed_over.times.exposed_s)


def mean_gap_s(timeline: Timeline) -> float | None:
    """Return the mean time per token behind the first, as MLPerf has it; None where there was none."""
    first_at = first_token_at(timeline)
    if first_at is None or timeline.num_output < 2:
        return None
    return (timeline.ended_at - first_at) / (timeline.num_output - 1)


def attained(timeline: Timeline) -> bool:
    """Return whether the class's targets were met. A failed request misses."""
    slo, first_at = timeline.request.slo, first_token_at(timeline)
    if timeline.error or first_at is None or first_at - timeline.started_at > slo.ttft_s:
        return False
    return (mean_gap_s(timeline) or 0.0) <= slo.tpot_s


def all_of(*observers: Observe) -> Observe:
    def observe(timeline: Timeline) -> None:
        for observer in observers:
            observer(timeline)

    return observe


def nobody(timeline: Timeline) -> None:
    """Observe nothing."""

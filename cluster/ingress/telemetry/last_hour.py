"""The last hour of one ingress by service class, for people who look at what has changed.

It is kept in slots of ten seconds. Times of a slot are counted in steps of a tenth, so a quantile is off by 5 % at the most."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, floor, log
from typing import Any, Final

from cluster.ingress.telemetry.last_minute import shown_target
from cluster.ingress.telemetry.timeline import Timeline, attained, first_token_at, mean_gap_s
from core.types import Slo

SLOT_S: Final = 10
NUM_SLOTS: Final = 360
_STEP: Final = log(1.1)


@dataclass(slots=True)
class _Slot:
    """One class in ten seconds."""

    number: int
    slo: Slo
    num_ended: int = 0
    num_attained: int = 0
    num_failed: int = 0
    num_output: int = 0
    ttft: Counter[int] = field(default_factory=Counter[int])
    tpot: Counter[int] = field(default_factory=Counter[int])


class LastHour:
    """`observe` is a cluster.ingress.telemetry.timeline.Observe."""

    def __init__(self) -> None:
        self._slots: dict[str, deque[_Slot]] = {}

    def observe(self, timeline: Timeline) -> None:
        slo, number = timeline.request.slo, int(timeline.ended_at // SLOT_S)
        slots = self._slots.setdefault(slo.name, deque(maxlen=NUM_SLOTS))
        if not slots or slots[-1].number < number:
            slots.append(_Slot(number, slo))
        slot = slots[-1]
        slot.num_ended += 1
        slot.num_attained += attained(timeline)
        slot.num_failed += bool(timeline.error)
        slot.num_output += timeline.num_output
        if (first_at := first_token_at(timeline)) is not None:
            slot.ttft[_step_of(first_at - timeline.started_at)] += 1
        if (gap_s := mean_gap_s(timeline)) is not None:
            slot.tpot[_step_of(gap_s)] += 1

    def history(self, now: float) -> dict[str, Any]:
        """Return `{slot_s, begins_at, classes}`. A class has a list for each figure, with a value for each slot, the latest last.
        Where nothing ended counts are 0 and times None."""
        last = int(now // SLOT_S)
        first = last - NUM_SLOTS + 1
        classes = [
            _class_history(name, kept, first)
            for name, slots in sorted(self._slots.items())
            if (kept := [slot for slot in slots if first <= slot.number <= last])
        ]
        return {"slot_s": SLOT_S, "begins_at": first * SLOT_S, "classes": classes}


def _class_history(name: str, slots: Sequence[_Slot], first: int) -> dict[str, Any]:
    counts = {key: [0] * NUM_SLOTS for key in ("ended", "attained", "failed", "output_tokens")}
    times: dict[str, list[float | None]] = {
        key: [None] * NUM_SLOTS for key in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
    }
    for slot in slots:
        at = slot.number - first
        of = (slot.num_ended, slot.num_attained, slot.num_failed, slot.num_output)
        for key, count in zip(counts, of, strict=True):
            counts[key][at] = count
        for key, steps in (("ttft", slot.ttft), ("tpot", slot.tpot)):
            times[f"{key}_p50_s"][at] = _quantile(steps, 0.5)
            times[f"{key}_p99_s"][at] = _quantile(steps, 0.99)
    slo = slots[-1].slo
    targets = {"ttft_target_s": shown_target(slo.ttft_s), "tpot_target_s": shown_target(slo.tpot_s)}
    return {"name": name, **targets, **counts, **times}


def _step_of(seconds: float) -> int:
    return floor(log(max(seconds, 1e-6)) / _STEP)


def _quantile(steps: Counter[int], q: float) -> float | None:
    rank = min(steps.total() - 1, int(q * steps.total()))
    for step in sorted(steps):
        rank -= steps[step]
        if rank < 0:
            return exp((step + 0.5) * _STEP)
    return None

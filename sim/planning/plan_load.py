"""The load that a plan is for, as columns of numbers, and the windows of it that decide.

A fleet that holds its targets where most prompt tokens are to be computed, where most tokens are to be decoded, and where the
sum of both takes longest, holds them in the rest: no other window of that length asks for more of either. Each is simulated
with what comes before and after it, so that it begins and ends as busy as it is; those requests do not count."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy
from numpy.typing import NDArray

from core.types import Slo
from sim.agent_sessions import BLOCK_TOKENS, SessionLoad
from sim.coarse.coarse_workload import natural_block_tokens
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.goodput import Offered, Window
from sim.trace_workload import Row

Column = NDArray[numpy.float64]
_MISSES, _FEWEST, _MOST = 3, 120, 400
"""A window has as many requests, at the trace's mean rate, as let so many miss, within these bounds."""
_SHORTEST_S, _LONGEST_S = 20.0, 240.0
_AROUND = 0.25
"""What comes before and after is so much of a window's length, at least."""
_LONG_ANSWER, _PACE = 0.9, 0.2
"""Nine in ten answers are no longer than what comes before a window lasts, at this share of the target for a token: then as many
run when it begins as do later."""
_STEPS = 8
"""Windows begin at multiples of their length over this."""


@dataclass(frozen=True, slots=True)
class Columns:
    """One entry for each request: when it comes, its prompt, what of it no prompt before had, and its answer, in tokens."""

    at: Column
    prompt: Column
    new: Column
    output: Column

    def between(self, start_at: float, end_at: float) -> "Columns":
        low, high = numpy.searchsorted(self.at, [start_at, end_at])
        return Columns(*(column[low:high] for column in (self.at, self.prompt, self.new, self.output)))

    def __len__(self) -> int:
        return len(self.at)

    @property
    def span_s(self) -> float:
        """From 0 to the last."""
        return float(self.at[-1]) if len(self.at) else 0.0

    @property
    def tokens(self) -> float:
        return float(self.prompt.sum() + self.output.sum())


class Work(Protocol):
    """What prompts and answers take, in seconds of any instance, one entry for each request."""

    @property
    def prompt_s(self) -> Column: ...
    @property
    def decode_s(self) -> Column: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakLoad:
    """What is simulated. Requests that come in the first `lead_s` do not count, nor those from `end_at` on."""

    offered: Offered
    lead_s: float
    end_at: float
    start_at: float
    """Where in the trace those begin that count."""
    why: str
    columns: Columns
    """The requests that count, and for sessions about those."""
    follows: bool = False
    """Whether requests follow others, so that nobody knows how many will come."""

    @property
    def duration_s(self) -> float:
        return self.end_at - self.lead_s

    def jobs(self, copies: float, slo: Slo, share: float) -> list[SimulatedRequest]:
        return self.offered.jobs(copies, 0, slo, share)


def columns_of(rows: Sequence[Row]) -> Columns:
    """Return the requests of a trace. Whatever was computed once counts as cached."""
    seen: set[int] = set()
    new = numpy.empty(len(rows))
    for index, row in enumerate(rows):
        cached = 0
        for id_ in row.prefix_ids:
            if id_ not in seen:
                break
            cached += row.prefix_block_tokens
        seen.update(row.prefix_ids)
        new[index] = max(1, row.input_tokens - cached)
    prompts = numpy.fromiter((max(1, row.input_tokens) for row in rows), float, len(rows))
    outputs = numpy.fromiter((max(1, row.output_tokens) for row in rows), float, len(rows))
    return Columns(numpy.fromiter((row.arrival_at for row in rows), float, len(rows)), prompts, new, outputs)


def window_s(columns: Columns, attainment: float, copies: float = 1.0) -> float:
    """Return how long a window is: long enough for some of its requests to miss."""
    wanted = min(max(_MISSES / max(1e-9, 1 - attainment), _FEWEST), _MOST)
    wanted_s = wanted * columns.span_s / max(1.0, copies * len(columns))
    return max(1.0, min(max(wanted_s, _SHORTEST_S), _LONGEST_S, columns.span_s))


def answer_s(columns: Columns, slo: Slo) -> float:
    """Return how long all but the longest answers last."""
    longest = float(numpy.quantile(columns.output, _LONG_ANSWER)) if len(columns) else 0.0
    return _PACE * slo.tpot_s * longest


def peaks(
    rows: Sequence[Row], columns: Columns, work: Work, duration_s: float, before_s: float
) -> list[PeakLoad]:
    """Return the windows that decide, with `before_s` of what comes before them: the one with most of both kinds of work first.
    One may be so for several reasons."""
    starts = numpy.arange(0.0, max(1e-9, columns.span_s - duration_s + 1e-9), duration_s / _STEPS)
    first = numpy.searchsorted(columns.at, starts)
    last = numpy.searchsorted(columns.at, starts + duration_s)
    measures = {
        "all work": work.prompt_s + work.decode_s,
        "prompts": work.prompt_s,
        "decoding": work.decode_s,
    }
    found: dict[float, list[str]] = {}
    for name, measure in measures.items():
        sums = numpy.concatenate([[0.0], numpy.cumsum(measure)])
        start_at = float(starts[int((sums[last] - sums[first]).argmax())])
        near = next((one for one in found if abs(one - start_at) < duration_s / 2), start_at)
        found.setdefault(near, []).append(name)
    return [
        window_at(rows, columns, start_at, duration_s, before_s, why=f"most of {' and of '.join(why)}")
        for start_at, why in found.items()
    ]


def window_at(
    rows: Sequence[Row],
    columns: Columns,
    start_at: float,
    duration_s: float,
    before_s: float,
    *,
    why: str = "as asked for",
) -> PeakLoad:
    """Return the window that begins at `start_at`."""
    around_s = _AROUND * duration_s
    lead_s = min(start_at, max(around_s, before_s))
    low, high = numpy.searchsorted(columns.at, [start_at - lead_s, start_at + duration_s + around_s])
    return PeakLoad(
        offered=Window(
            rows[low:high],
            start_at - lead_s,
            lead_s + duration_s + around_s,
            natural_block_tokens(rows),
        ),
        lead_s=lead_s,
        end_at=lead_s + duration_s,
        start_at=start_at,
        why=why,
        columns=columns.between(start_at, start_at + duration_s),
    )


def session_peak(load: SessionLoad) -> PeakLoad:
    """Return the second half of the time within which sessions begin: most of them run then."""
    seconds = load.start_within_s
    return PeakLoad(
        offered=replace(load, ends_at=seconds),
        lead_s=seconds / 2,
        end_at=seconds,
        start_at=seconds / 2,
        why="most sessions at once",
        columns=all_turns(load).between(seconds / 2, seconds),
        follows=True,
    )


def all_turns(load: SessionLoad) -> Columns:
    """Return the turns of sessions, about when they come, were they answered at once."""
    rng, seen = random.Random(0), set[int]()
    rows: list[tuple[float, float, float, float]] = []
    for session in load.sessions:
        at = rng.random() * load.start_within_s
        for before, turn in zip((None, *session), session, strict=False):
            at += turn.gap_s
            num_shared = 0
            for id_ in turn.block_ids[: turn.input_tokens // BLOCK_TOKENS]:
                if id_ not in seen:
                    break
                num_shared += BLOCK_TOKENS
            seen.update(turn.block_ids)
            if before is not None and turn.has_answer_of(before):
                num_shared += before.output_tokens
            rows.append((at, turn.input_tokens, max(1, turn.input_tokens - num_shared), turn.output_tokens))
    rows.sort()
    return Columns(*numpy.array(rows, dtype=float).reshape(-1, 4).T)

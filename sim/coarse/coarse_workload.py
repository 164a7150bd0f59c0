"""Jobs for the coarse simulation from trace rows: block ids that are equal where the trace says that prompts are.

The load is scaled by superposing copies, shifted in time and with prefixes of their own; a fraction is a copy of which each
request is kept with that probability."""

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.kv import block_hashes, num_blocks_for
from core.types import Request, SamplingParams, Slo
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.trace_workload import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`copies` of the trace's seconds [start_at, start_at + duration_s)."""

    rows: Sequence[Row]
    duration_s: float
    copies: float = 1.0
    share: float = 1.0
    """What is kept of each copy, at random: as steady a load, and less of it, where fewer copies would be burstier."""
    start_at: float = 0.0
    seed: int = 0
    named: bool = False
    """Whether each request's tenant is the trace's client; tenants share no prefixes."""


def jobs(load: Load, slo: Slo | Sequence[Slo], block_tokens: int) -> list[SimulatedRequest]:
    """Return jobs in order of arrival, of several classes in turn. Rows without tokens to compute or generate get one of each."""
    return list(arriving(load, slo, block_tokens))


def arriving(load: Load, slo: Slo | Sequence[Slo], block_tokens: int) -> Iterator[SimulatedRequest]:
    """Yield the jobs, each made when it is asked for: those of a fleet's hour would take all memory at once."""
    names, may_recur = _Names(block_tokens), any(row.prefix_ids for row in load.rows)
    rng = random.Random(load.seed)
    timed: list[tuple[float, int, Row]] = []
    end_at = load.start_at + load.duration_s
    chosen = [row for row in load.rows if load.start_at <= row.arrival_at < end_at]
    num_copies = -int(-load.copies // 1)
    for copy in range(num_copies):
        share = min(1.0, load.copies - copy) * load.share
        shift_s = rng.random() * load.duration_s if copy or load.seed else 0.0
        timed += [
            ((row.arrival_at - load.start_at + shift_s) % load.duration_s, copy, row)
            for row in chosen
            if share >= 1.0 or rng.random() < share
        ]
    timed.sort(key=_at)
    slos = [slo] if isinstance(slo, Slo) else slo
    for number, (at, copy, row) in enumerate(timed):
        tenant = row.client if load.named else ""
        num_prompt, ids = max(1, row.input_tokens), names.of((copy, tenant), row)
        whole = ids[: num_prompt // block_tokens]
        hashes = (
            block_hashes(whole, 1) if may_recur else whole
        )  # which then say already what comes before them
        request = Request(
            id=f"r{number}",
            prompt=(),
            sampling=_sampling(max(1, row.output_tokens)),
            reply_to="",
            slo=slos[number % len(slos)],
            arrival_at=at,
            tenant=tenant,
        )
        yield SimulatedRequest(
            request=request, ids=ids, hashes=hashes, num_prompt=num_prompt, may_recur=may_recur
        )


def _at(timed: tuple[float, int, Row]) -> float:
    return timed[0]


@functools.cache
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


class _Names:
    """Numbers for blocks: shared ones by what of the trace they cover, in one copy of it and for one tenant; the rest of a prompt
    has its own."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: dict[tuple[tuple[int, str], tuple[int, ...], int], int] = {}
        self._count = 0

    def of(self, whose: tuple[int, str], row: Row) -> tuple[int, ...]:
        size, unit = self._block_tokens, row.prefix_block_tokens
        num_prompt = max(1, row.input_tokens)
        num_named = min(len(row.prefix_ids) * unit, num_prompt) // size if unit else 0
        ids = [
            self._shared(
                whose, row.prefix_ids[i * size // unit : -(-(i + 1) * size // unit)], i * size % unit
            )
            for i in range(num_named)
        ]
        return (*ids, *(self._new() for _ in range(num_blocks_for(num_prompt, size) - num_named)))

    def _shared(self, whose: tuple[int, str], covered: tuple[int, ...], offset: int) -> int:
        """Return the block that covers these ids of the trace, from `offset` tokens into the first."""
        key = (whose, covered, offset)
        if key not in self._known:
            self._known[key] = self._new()
        return self._known[key]

    def _new(self) -> int:
        self._count += 1
        return self._count


def natural_block_tokens(rows: Sequence[Row]) -> int:
    """Return the trace's own block size where it has one that is large enough to pay."""
    return max(64, max((row.prefix_block_tokens for row in rows), default=0))

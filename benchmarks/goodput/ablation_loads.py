"""The loads of the ablation: what is offered, to which fleet, near the highest rate that the full law serves.

Kinds: `sustained` loads of three minutes on ten devices and those with `host` memory among them, `bursts` of 20 s, `agents` in
closed loop, `classes` and `tenants`, `hopeless` prompts, routed `experts`, `pools` of fixed roles and such behind slow `links`,
and an `overload` with what comes after it. Of each kind what takes least to run comes first."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final
from zlib import crc32

from benchmarks.goodput.loads import Cell
from sim.coarse.simulated_sequence import SimulatedRequest

FLOOD_S: Final = 30.0
"""So long twice as much comes; what comes later counts."""


@dataclass(frozen=True, slots=True)
class AblationLoad:
    kind: str
    place: str
    """window|device|scheduler, as `benchmarks.goodput.loads` names them."""
    guess: float
    """Requests per second and instance, or copies of all sessions, at which the search for the knee begins."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.place}"

    def cell(self, traces: Path) -> Cell:
        window, device, scheduler = self.place.split("|")
        return Cell(traces, window, device, scheduler)

    def copies(self, cell: Cell, rate: float) -> float:
        """Return how many copies of the window have that rate; of sessions a rate is their copies."""
        return rate if self.kind == "agents" else rate / cell.rate_per_copy

    def work(self, cell: Cell, rate: float, arrivals: int) -> list[SimulatedRequest]:
        copies = self.copies(cell, rate)
        if self.kind != "overload":
            return cell.part.jobs(copies, arrivals, cell.targets)
        work = cell.part.jobs(2 * copies, arrivals, cell.targets)
        return [job for job in work if job.request.arrival_at < FLOOD_S or crc32(job.request.id.encode()) % 2]

    def counted(self, work: Sequence[SimulatedRequest]) -> list[SimulatedRequest]:
        """Return the requests whose targets count. Turns that follow others have no arrival yet."""
        if self.kind != "overload":
            return [*work]
        return [job for job in work if isfinite(at := job.request.arrival_at) and at >= FLOOD_S]


def _of(kind: str, places: Sequence[tuple[str, float]]) -> tuple[AblationLoad, ...]:
    whole = [(place if place.count("|") > 1 else f"{place}|baton", guess) for place, guess in places]
    return tuple(AblationLoad(kind, place, guess) for place, guess in whole)


_SUSTAINED = (
    ("sharegpt/interactive/0/180|L40S", 2.2),
    ("conversation/standard/0/180|base", 2.0),
    ("azure-chat/interactive/0/180|A100", 7.3),
    ("deepseek-r1/interactive/0/180|base", 21.0),
    ("sharegpt/interactive/1/180|memory/2", 9.0),
    ("azure-code/interactive/0/180|base", 14.0),
    ("azure-chat/interactive/0/180|L40S", 4.8),
    ("sharegpt/interactive/0/180|prefill/2", 12.5),
    ("azure-chat/interactive/0/180|70B on 4", 10.5),
    ("azure-chat/interactive/1/180|prefill*2", 35.0),
    ("sharegpt/interactive/0/180|memory*2", 20.0),
    ("sharegpt/interactive/0/180|base", 17.5),
    ("azure-chat/interactive/0/180|base", 26.0),
    ("deepseek-r1/interactive/0/180|memory/2", 11.5),
    ("azure-chat/interactive/1/180|memory/2", 20.0),
    ("azure-chat/interactive/0/180|memory*2", 27.0),
    ("azure-chat/interactive/0/180|prefill/2", 13.0),
    ("azure-code/interactive/1/180|prefill/2", 7.5),
    ("deepseek-r1/interactive/2/180|prefill*2", 22.0),
    ("sharegpt/interactive/0/180|A100", 7.5),
    ("sharegpt/interactive/0/180|70B on 4", 11.0),
)
_HOST = (
    ("deepseek-r1/interactive/1/180|base+host", 22.0),
    ("sharegpt/interactive/1/180|base+host", 18.0),
    ("sharegpt/interactive/0/180|memory/2+host", 9.5),
)
_BURSTS = (
    ("sharegpt/interactive/0|L40S", 3.9),
    ("azure-chat/interactive/0|A100", 8.4),
    ("conversation/standard/0|base", 2.1),
    ("deepseek-r1/interactive/0|base", 36.0),
    ("azure-chat/interactive/0|memory/2", 20.0),
    ("sharegpt/interactive/0|prefill/2", 16.0),
    ("azure-code/interactive/0|base", 17.0),
    ("azure-chat/interactive/0|70B on 4", 11.2),
    ("deepseek-r1/interactive/0|memory/2", 24.0),
    ("azure-code/mixed/0|base", 20.0),
    ("azure-chat/interactive/0|base", 25.6),
    ("sharegpt/interactive/0|base", 24.0),
    ("sharegpt/interactive/0|memory/2", 13.4),
    ("azure-code/interactive/0|memory/2", 17.0),
    ("azure-code/mixed/0|memory/2", 20.0),
    ("conversation/standard/0|memory/2", 2.1),
    ("azure-chat/interactive/0|memory*2", 25.6),
    ("sharegpt/interactive/0|memory*2", 28.8),
    ("azure-chat/interactive/0|prefill/2", 13.4),
    ("azure-chat/interactive/0|prefill*2", 36.4),
    ("sharegpt/interactive/0|prefill*2", 25.6),
    ("azure-chat/interactive/0|link/4", 25.6),
    ("sharegpt/interactive/0|link/4", 24.0),
    ("sharegpt/interactive/0|A100", 11.0),
    ("azure-chat/interactive/0|L40S", 5.2),
    ("sharegpt/interactive/0|70B on 4", 14.0),
    ("synthetic/standard/1|base", 2.4),
    ("synthetic/standard/1|memory/2", 2.4),
)
BY_KIND: Final = {
    "sustained": _of("sustained", _SUSTAINED),
    "bursts": _of("bursts", _BURSTS),
    "classes": _of(
        "classes",
        [
            ("azure-code/mixed/0/180|base", 17.0),
            ("deepseek-r1/mixed/0/180|base", 20.0),
            ("sharegpt/mixed/0/180|memory/2", 9.0),
        ],
    ),
    "pools": _of(
        "pools",
        [
            ("deepseek-r1/interactive/0/180|base|baton:2", 11.0),
            ("sharegpt/standard/0/180|base|baton:2", 12.0),
            ("azure-code/standard/0/180|base|baton:3", 17.0),
        ],
    ),
    "overload": _of(
        "overload",
        [("sharegpt/interactive/0/180|base", 15.0), ("deepseek-r1/interactive/0/180|memory/2", 10.0)],
    ),
    "links": _of(
        "links",
        [
            ("conversation/standard/0/180|link 1 GB/s|baton:2", 1.2),
            ("azure-chat/interactive/0/180|link 1 GB/s|baton:2", 8.0),
        ],
    ),
    "agents": _of("agents", [("agents/interactive/0|base", 22.0), ("agents/mixed/0|base+host", 22.0)]),
    "tenants": _of(
        "tenants",
        [
            ("deepseek-r1+tenants/interactive/0/180|base", 21.0),
            ("deepseek-r1+tenants/mixed/0/180|memory/2", 12.0),
        ],
    ),
    "hopeless": _of(
        "hopeless",
        [("synthetic/standard/0|base", 2.0), ("conversation/standard/1/180|base", 1.2)],
    ),
    "host": _of("host", _HOST),
    "experts": _of(
        "experts",
        [
            ("azure-chat/interactive/0/180|MoE on 8", 28.0),
            ("azure-chat/interactive/0/180|Qwen3-30B", 25.0),
            ("deepseek-r1/interactive/0/180|gpt-oss-120b", 15.0),
        ],
    ),
}  # fmt: skip


def in_turn(kinds: Sequence[str]) -> list[AblationLoad]:
    """Return the loads of these kinds: one of each, the second one of each, and so on."""
    most = max(len(BY_KIND[kind]) for kind in kinds)
    return [BY_KIND[kind][index] for index in range(most) for kind in kinds if index < len(BY_KIND[kind])]

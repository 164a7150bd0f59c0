"""What the studies of goodput offer, and to which fleets: windows of public traces, agents' sessions, classes and devices.

A window is `trace/targets/seed`, or `trace/targets/seed/seconds` where it is not 20 s long. Traces are those of `TRACES`,
`synthetic`, and `agents`, whose sessions run in closed loop (`sim.agent_sessions`). `deepseek-r1+tenants` has the trace's
clients for tenants. Targets are the keys of `TARGETS`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from baton.bench.traces import read_trace
from benchmarks.goodput.devices import DEVICES, GPU
from core.config.cluster_config import load
from core.errors import ConfigError
from core.types import Slo
from sim.agent_sessions import SessionLoad, read_sessions
from sim.baselines.table import Entry, entry_of
from sim.catalogued import Fleet
from sim.coarse.coarse_workload import natural_block_tokens
from sim.goodput import Window
from sim.trace_workload import Row

TRACES = {
    "conversation": "mooncake_fast25_conversation.jsonl.gz",
    "azure-code": "azure2023_code.csv.gz",
    "azure-chat": "azure2023_conv.csv.gz",
    "deepseek-r1": "servegen_deepseek-r1_1h.csv.gz",
    "sharegpt": "sharegpt_llama31_300req_blk16.jsonl.gz",
}
SESSIONS, SYNTHETIC = "agent_lmcache_sessions.jsonl.gz", "mooncake_fast25_synthetic.jsonl.gz"
SLOS = {
    "interactive": Slo(name="interactive", ttft_s=0.45, tpot_s=0.04, hopeless="refuse"),
    "standard": Slo(name="standard", ttft_s=2.0, tpot_s=0.1, hopeless="refuse"),
    "long-context": Slo(name="long-context", ttft_s=10.0, tpot_s=0.1, hopeless="refuse"),
}
_CLASSES = load(None, {}, {}).slo_classes
TARGETS: dict[str, Slo | tuple[Slo, ...]] = {
    **SLOS,
    "mixed": (_CLASSES["interactive"], _CLASSES["long-context"]),
}
"""`mixed`: of two requests one is interactive, which has priority, and one may take long."""
NUM_INSTANCES = 4
WINDOW_S, FIRST_WINDOW_S, BETWEEN_WINDOWS_S, BETWEEN_SYNTHETIC_S = 20.0, 300.0, 600.0, 140.0
LEAST_REQUESTS = 30
"""The least requests of a window; where a trace pauses, the next one that has so many is taken."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One scheduler on one window and device."""

    traces: Path
    window: str
    device: str
    scheduler: str
    """As `sim.baselines.table.entry_of` names it; `:2` behind it: a fixed fleet with so many prefill instances."""

    @property
    def key(self) -> str:
        return f"{self.window}|{self.device}|{self.scheduler}"

    @property
    def trace(self) -> str:
        return self.window.split("/")[0]

    @property
    def targets(self) -> Slo | tuple[Slo, ...]:
        return TARGETS[self.window.split("/")[1]]

    @property
    def seed(self) -> int:
        return int(self.window.split("/")[2])

    @property
    def entry(self) -> Entry:
        return entry_of(self.scheduler.partition(":")[0])

    @property
    def fleet(self) -> Fleet:
        device, prefills = DEVICES[self.device], self.scheduler.partition(":")[2]
        is_split = bool(prefills) or self.entry.kind == "static"
        num = int(prefills or NUM_INSTANCES // 2) if is_split else 0
        return Fleet(
            gpu=GPU,
            model=device.model,
            num_prefill=num,
            num_decode=NUM_INSTANCES - num if is_split else 0,
            num_both=0 if is_split else NUM_INSTANCES,
            tp=device.tp,
            changed=device.gpu,
            read=device.read,
            host_bytes=device.host_bytes,
        )

    @property
    def part(self) -> Window | SessionLoad:
        """What is offered. Raises ConfigError for a length that a trace's windows cannot have."""
        seconds = self.window.split("/")[3:]
        return offered(self.traces, self.trace, self.seed, float(seconds[0]) if seconds else WINDOW_S)

    @property
    def rate_per_copy(self) -> float:
        """Requests per second and instance of one copy of what is offered."""
        return self.part.rate / NUM_INSTANCES


@cache
def offered(folder: Path, trace: str, seed: int, window_s: float) -> Window | SessionLoad:
    """Return a window or sessions. Each seed has a window of its own, of a trace that is long enough; arrivals are shifted by the
    seed in any case. Raises ConfigError for an unknown trace, and for a length that its windows cannot have."""
    trace, _, tenants = trace.partition("+")
    if trace not in (*TRACES, "synthetic", "agents"):
        raise ConfigError(f"unknown trace {trace!r}; known: {', '.join(TRACES)}, synthetic and agents")
    if trace not in TRACES and window_s != WINDOW_S:
        raise ConfigError(f"a window of {trace!r} is {WINDOW_S:g} s long, not {window_s:g} s")
    if trace == "agents":
        return SessionLoad(sessions=read_sessions(folder / SESSIONS), start_within_s=60.0)
    rows = read_trace(folder / TRACES.get(trace, SYNTHETIC))
    end_at = rows[-1].arrival_at
    if trace in TRACES:
        start_at = FIRST_WINDOW_S + seed * BETWEEN_WINDOWS_S
        start_at = 0.0 if start_at + window_s > end_at else start_at
    else:
        start_at = (FIRST_WINDOW_S + seed * BETWEEN_SYNTHETIC_S) % max(window_s, end_at - window_s)
    while _num_within(rows, start_at, window_s) < LEAST_REQUESTS:
        start_at += window_s
        if trace not in TRACES:
            start_at %= end_at
    part = Window(rows, start_at, window_s, natural_block_tokens(rows))
    return replace(part, named=bool(tenants))


def _num_within(rows: Sequence[Row], start_at: float, window_s: float) -> int:
    return sum(start_at <= row.arrival_at < start_at + window_s for row in rows)

"""What a plan is for, from a trace or from sessions."""

from collections.abc import Sequence

from core.errors import ConfigError
from sim.agent_sessions import SessionLoad
from sim.coarse.coarse_workload import natural_block_tokens
from sim.planning.plan_fleets import Hardware, kinds
from sim.planning.plan_load import all_turns, answer_s, columns_of, peaks, session_peak, window_at, window_s
from sim.planning.planner import Demand, Targets
from sim.trace_workload import Row


def trace_demand(
    rows: Sequence[Row],
    hardware: Hardware,
    targets: Targets,
    start_at: float | None = None,
    seconds: float = 0.0,
) -> Demand:
    """Plan for the windows that decide, or for the one that begins at `start_at`. What takes of the cheapest instance says which
    windows decide. Raises ConfigError where the model fits no instance, and for a window without requests."""
    columns, block_tokens = columns_of(rows), natural_block_tokens(rows)
    cheapest = hardware.instances(block_tokens)[:1]
    duration_s = (
        min(seconds, columns.span_s) if seconds else window_s(columns, targets.attainment, targets.copies)
    )
    before_s = answer_s(columns, targets.slo)
    if start_at is None:
        work = kinds(cheapest, columns, targets.slo, block_tokens)[0].needs
        loads = peaks(rows, columns, work, duration_s, before_s)
    else:
        loads = [window_at(rows, columns, start_at, duration_s, before_s)]
    if not len(loads[0].columns):
        raise ConfigError(f"the trace has no request in the {duration_s:g} s from {start_at:g} s on")
    return Demand(hardware=hardware, targets=targets, loads=loads, whole=columns)


def session_demand(load: SessionLoad, hardware: Hardware, targets: Targets) -> Demand:
    """Plan for sessions that begin within `load.start_within_s`: for its second half, when most of them run."""
    return Demand(
        hardware=hardware,
        targets=targets,
        loads=[session_peak(load)],
        whole=all_turns(load),
    )

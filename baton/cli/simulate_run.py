"""Simulates what `baton simulate` was asked for, prints the figures and draws the pictures."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.bench.traces import read_trace
from baton.cli.yaml_file import read_yaml
from baton.simulation import Study, TraceWorkload, Workload
from core.config.cluster_config import load
from core.cost.step_profile import read_profile
from core.types import Slo
from sim.agent_sessions import SessionLoad, is_session_trace, read_sessions
from sim.catalogue.model_config import named_model
from sim.catalogued import Fleet
from sim.fleet_changes import read_failure
from sim.outcome_report import ServedRequest, by_tenant, figures

_SHOWN_TENANTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What the options of `baton simulate` say."""

    trace: Path
    gpu: str
    model: str
    adapter_bytes: float
    """What adapters take in each instance."""
    host_bytes: float
    """Host memory of each instance for KV."""
    num_prefill: int
    num_decode: int
    num_both: int
    seconds: float
    ttft_s: float
    tpot_s: float
    coarse: bool
    profile: Path | None
    config: Path | None
    failures: tuple[str, ...]
    """As `sim.fleet_changes.read_failure` reads them."""
    cold_start_s: float | None
    """None: pools do not follow their load."""
    seed: int


def run(scenario: Scenario, copies: int, output: Path | None, report: Path | None, sweep: list[int]) -> None:
    """Print the figures, and write them to `output` and pictures to `report`. Raises ConfigError."""
    study = _study(scenario)
    served, more = study.run(copies)
    tenants = by_tenant(served, study.slo)
    result = figures(served, study.slo) | more | ({"tenants": tenants} if len(tenants) > 1 else {})
    _print(result)
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")
    if report is not None:
        _report(study, served, sweep, report)


def _study(scenario: Scenario) -> Study:
    fleet = Fleet(
        gpu=scenario.gpu,
        model=scenario.model,
        num_prefill=scenario.num_prefill,
        num_decode=scenario.num_decode,
        num_both=scenario.num_both,
        profile=read_profile(scenario.profile) if scenario.profile else None,
        read=named_model(scenario.model, scenario.adapter_bytes),
        host_bytes=scenario.host_bytes,
    )
    return Study(
        workload=_workload(scenario.trace, scenario.seconds, scenario.seed),
        fleet=fleet,
        slo=Slo(name="simulated", ttft_s=scenario.ttft_s, tpot_s=scenario.tpot_s, hopeless="refuse"),
        seconds=scenario.seconds,
        seed=scenario.seed,
        coarse=scenario.coarse,
        config=load(read_yaml(scenario.config), {}, {}).only,
        failures=[read_failure(text) for text in scenario.failures],
        cold_start_s=scenario.cold_start_s,
    )


def _workload(trace: Path, seconds: float, seed: int) -> Workload:
    if is_session_trace(trace):
        return SessionLoad(sessions=read_sessions(trace), start_within_s=seconds)
    return TraceWorkload(read_trace(trace, seed), seconds)


def _report(study: Study, served: list[ServedRequest], sweep: list[int], folder: Path) -> None:
    from baton.simulation_pictures import draw_attainment, draw_goodput, draw_timeline  # noqa: PLC0415 (matplotlib takes seconds to import)

    draw_timeline(served, folder / "timeline.png")
    draw_attainment(served, study.slo, folder / "attainment.png")
    if sweep:
        draw_goodput(study.sweep(sweep), study.slo, folder / "goodput.png")
    Console().print(f"pictures in {folder}")


def _print(result: dict[str, Any]) -> None:
    table = Table("figure", "value")
    for name, value in result.items():
        if name != "tenants":
            table.add_row(name, _text(value))
    Console().print(table)
    if (tenants := result.get("tenants")) is None:
        return
    own = Table("tenant", "offered", "finished", "attainment", "TTFT p50, ms", "TTFT p99, ms")
    for tenant, found in list(tenants.items())[:_SHOWN_TENANTS]:
        own.add_row(
            tenant,
            f"{found['num_offered']}",
            f"{found['num_finished']}",
            f"{found['attainment']:.1%}",
            f"{found['ttft_p50_ms']:.0f}",
            f"{found['ttft_p99_ms']:.0f}",
        )
    Console().print(own)
    if len(tenants) > _SHOWN_TENANTS:
        Console().print(f"and {len(tenants) - _SHOWN_TENANTS} smaller tenants, in --json")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one:.4g}" for key, one in value.items() if isinstance(one, int | float))
    return f"{value:.4g}"

"""`baton doctor`: check every node and every link, and say what is wrong with it and what to do."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.cli.yaml_file import read_yaml
from cluster.preflight.findings import Finding, Verdict
from core.config.cluster_config import ClusterConfig, load
from core.config.pools import PoolName
from core.config.residency_groups import colocations_of, part_of
from core.errors import ConfigError

_STYLE = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red", Verdict.SKIP: "dim"}


def doctor(
    ray_address: Annotated[
        str,
        typer.Option(help="Check all nodes of this Ray cluster (`auto`, or host:port); default: this one."),
    ] = "",
    expect_gb_per_s: Annotated[
        float, typer.Option(min=0, help="What a link should carry; 0: as much as the others do.")
    ] = 0.0,
    mib: Annotated[int, typer.Option(min=1, max=4096, help="Size of the messages that are timed.")] = 64,
    backend: Annotated[str, typer.Option(help="nccl, gloo, or auto: nccl where there are GPUs.")] = "auto",
    config: Annotated[
        Path | None, typer.Option(help="The cluster's YAML file, for the sizes it asks for.")
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(help="Instances of which pool of --config are here; may be repeated. Default: both."),
    ] = None,
    instances: Annotated[
        int,
        typer.Option(
            min=0, help="How many of each --pool this pod has: is its memory limit enough? 0: don't ask."
        ),
    ] = 0,
    model: Annotated[str, typer.Option(help="The row or group of --config's table that is here.")] = "",
    rank: Annotated[
        int,
        typer.Option(
            min=0, help="Without Ray: this process is that one of --world, each on a node of its own."
        ),
    ] = 0,
    world: Annotated[int, typer.Option(min=1, help="How many of them there are.")] = 1,
    rendezvous: Annotated[
        str, typer.Option(help="host:port at which rank 0 of --world can be reached.")
    ] = "",
    wait_s: Annotated[float, typer.Option(min=1, help="How late the others of --world may come.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON on standard output.")] = False,
) -> None:
    """Check nodes and links before they serve. Exit status 1: something is not fit; 0: all is (perhaps with warnings)."""
    if world > 1 and (not rendezvous or rank >= world or ray_address):
        raise typer.BadParameter(
            "needs --rendezvous, a --rank below it, and no --ray-address", param_hint="--world"
        )
    if (pool or instances) and (config is None or world > 1 or ray_address):
        raise typer.BadParameter("of this node alone, and needs --config", param_hint="--pool, --instances")
    from baton.examination import backend_for, examine, examine_as_rank  # noqa: PLC0415 (seconds, which --help does not need)
    from cluster.preflight.fabric import Ask  # noqa: PLC0415 (seconds, which --help does not need)

    settings = _settings(config, instances, model)
    console = Console(stderr=True, highlight=False)
    with console.status("checking nodes and links ..."):
        ask = Ask(
            backend=backend_for(backend),
            mib=mib,
            expected_bytes_per_s=expect_gb_per_s * 1e9,
            transfer=settings.rows[0].transfer,
            security=settings.security,
        )
        if world > 1:
            findings = asyncio.run(examine_as_rank(settings, rank, world, rendezvous, ask, wait_s))
        else:
            pools: list[PoolName] = [_pool(name) for name in pool or ("prefill", "decode")] if config else []
            findings = asyncio.run(examine(settings, ray_address, ask, pools, instances))
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=1))
    else:
        Console(highlight=False).print(_table(findings))
    failed = sum(finding.verdict is Verdict.FAIL for finding in findings)
    console.print(f"[bold red]{failed} not fit[/]" if failed else "[green]fit to serve[/]")
    sys.exit(1 if failed else 0)


def _settings(config: Path | None, num_instances: int, model: str) -> ClusterConfig:
    """Return the configuration, with the rows that `model` names alone. Raises ConfigError, also where a pod's instances are
    counted and could be of several models."""
    settings = load(read_yaml(config), os.environ)
    if model:
        return part_of(settings, model)
    if num_instances and len(found := colocations_of(settings)) > 1:
        names = ", ".join(each.name for each in found)
        raise ConfigError(
            f"--instances counts those of one model, and models has {names}: choose with --model"
        )
    return settings


def _pool(name: str) -> PoolName:
    match name:
        case "prefill" | "decode":
            return name
        case _:
            raise typer.BadParameter(f"{name}: use prefill or decode", param_hint="--pool")


def _table(findings: list[Finding]) -> Table:
    table = Table("where", "check", "verdict", "measured", "expected", "what to do", box=None)
    for f in findings:
        table.add_row(f.where, f.check, f"[{_STYLE[f.verdict]}]{f.verdict}[/]", f.measured, f.expected, f.fix)
    return table

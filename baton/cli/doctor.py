"""`baton doctor`: check every node and every link, and say what is wrong with it and what to do."""

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import ray
import torch
import typer
from rich.console import Console
from rich.table import Table

from baton.cli.yaml_file import read_yaml
from cluster.deploy.rank_bundles import most_kv_bytes
from cluster.preflight.collective_check import LocalNode, check_as_rank, check_fabric
from cluster.preflight.findings import Finding, Verdict
from cluster.preflight.node_checks import check_host
from cluster.preflight.ray_nodes import check_room, living_nodes
from core.config import ClusterConfig, load

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
    settings = load(read_yaml(config), os.environ)
    console = Console(stderr=True, highlight=False)
    with console.status("checking nodes and links ..."):
        chosen = _backend(backend)
        expected = expect_gb_per_s * 1e9
        if world > 1:
            findings = check_host(f"rank {rank}", _all_kv_bytes(settings), settings.model.path)
            findings += asyncio.run(
                check_as_rank(
                    rank, world, rendezvous, chosen, mib=mib, wait_s=wait_s, expected_bytes_per_s=expected
                )
            )
        else:
            findings = asyncio.run(_examine(settings, ray_address, chosen, mib, expected))
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=1))
    else:
        Console(highlight=False).print(_table(findings))
    failed = sum(finding.verdict is Verdict.FAIL for finding in findings)
    console.print(f"[bold red]{failed} not fit[/]" if failed else "[green]fit to serve[/]")
    sys.exit(1 if failed else 0)


def _backend(wanted: str) -> str:
    if wanted not in ("auto", "nccl", "gloo"):
        raise typer.BadParameter(f"{wanted}: use nccl, gloo or auto", param_hint="--backend")
    if wanted == "auto":
        return "nccl" if torch.cuda.is_available() else "gloo"
    return wanted


async def _examine(
    config: ClusterConfig, ray_address: str, backend: str, mib: int, expected_bytes_per_s: float
) -> list[Finding]:
    if not ray_address:
        here = LocalNode()
        fabric = await check_fabric([here], backend, mib, expected_bytes_per_s)
        return [*check_host(here.name, _all_kv_bytes(config), config.model.path), *fabric]
    ray.init(address=ray_address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        nodes = living_nodes()
        room = check_room(config, [node.resources for node in nodes])
        hosts = await asyncio.gather(
            *(node.check_host(most_kv_bytes(config, node.resources), config.model.path) for node in nodes)
        )
        clocks = [await node.check_clock() for node in nodes]
        fabric = await check_fabric(nodes, backend, mib, expected_bytes_per_s)
        return [*(finding for findings in hosts for finding in findings), room, *clocks, *fabric]
    finally:
        ray.shutdown()


def _all_kv_bytes(config: ClusterConfig) -> int:
    """Of a machine that has every instance."""
    return config.engine.kv_bytes * config.decode_instances


def _table(findings: list[Finding]) -> Table:
    table = Table("where", "check", "verdict", "measured", "expected", "what to do", box=None)
    for f in findings:
        table.add_row(f.where, f.check, f"[{_STYLE[f.verdict]}]{f.verdict}[/]", f.measured, f.expected, f.fix)
    return table

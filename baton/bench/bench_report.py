"""Reports a run: a table on the terminal, JSON with the machine it ran on, and a picture."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.bench.client import Record
from baton.bench.measure import Summary, goodput

_LATE_MS = 20


def machine() -> dict[str, Any]:
    """Return the machine's properties on which the figures depend."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    versions: dict[str, str] = {"python": platform.python_version()}
    for name in ("torch", "ray", "transformers", "baton-serve"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform(), "versions": versions}


def print_table(console: Console, summaries: Sequence[Summary]) -> None:
    table = Table(title="latency in ms")
    for name in ("", "mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right" if name else "left")
    for summary in summaries:
        rate = f" at {summary.offered_rate:.4g}/s" if summary.offered_rate else ""
        for label, values in (
            ("TTFT", summary.ttft_ms),
            ("ITL", summary.itl_ms),
            ("TPOT", summary.tpot_ms),
            ("E2E", summary.e2e_ms),
        ):
            table.add_row(
                label + rate, *(f"{values[k]:.2f}" if values else "-" for k in ("mean", "p50", "p90", "p99"))
            )
        table.add_section()
    console.print(table)
    for summary in summaries:
        errors = f", errors {summary.errors}" if summary.errors else ""
        rate = f"offered {summary.offered_rate:.4g}/s: " if summary.offered_rate else ""
        console.print(
            f"{rate}{summary.num_ok} of {summary.num_offered} answered{errors}; {summary.requests_per_s:.2f} requests/s, "
            f"{summary.output_tokens_per_s:.1f} output tokens/s, {summary.total_tokens_per_s:.1f} tokens/s; "
            f"SLO (TTFT {summary.slo_ttft_ms:g} ms, TPOT {summary.slo_tpot_ms:g} ms) met by {summary.attainment:.1%}: "
            f"{summary.slo_requests_per_s:.2f} requests/s",
            highlight=False,
        )
        if summary.late_p99_ms > _LATE_MS:
            console.print(
                f"[yellow]{rate}this client sent requests up to {summary.late_p99_ms:.0f} ms late (p99): it is too slow for "
                "this load, and the figures are its own in part[/]"
            )
    if len(summaries) > 1:
        console.print(
            f"goodput: {goodput(summaries, 0.9):g}/s at 90 % attainment, {goodput(summaries, 0.99):g}/s at 99 %"
        )


def print_first_error(console: Console, runs: Sequence[Sequence[Record]]) -> None:
    """Print the message of one failed request, where there is any."""
    failed = next((record for records in runs for record in records if record.detail), None)
    if failed is not None:
        console.print(f"first error: {failed.error}: {failed.detail}", markup=False, highlight=False)


def write_json(path: Path, summaries: Sequence[Summary], parameters: dict[str, Any]) -> None:
    content = {
        "command": " ".join(["baton", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "parameters": parameters,
        "runs": [summary.as_json() for summary in summaries],
    }
    if len(summaries) > 1:
        content["goodput"] = {"90%": goodput(summaries, 0.9), "99%": goodput(summaries, 0.99)}
    path.write_text(json.dumps(content, indent=2) + "\n")

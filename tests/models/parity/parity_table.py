"""The table of transformers' causal language models that `python -m benchmarks.parallel.model_parity` makes, and the page that has it."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.models.parity.parity_case import Row

RESULT = Path(__file__).parents[3] / "benchmarks/results/model_parity.json"
PAGE = Path(__file__).parents[3] / "docs/models.md"
_BEGIN, _END = "<!-- model_parity.json -->\n", "<!-- end -->\n"


def table(rows: Sequence[Row]) -> str:
    """Return the table as the page has it."""
    same = sum(row.result == "same" for row in rows)
    lines = [
        f"{same} of {len(rows)} classes ({same / len(rows):.0%}) give the same 64 greedy tokens.",
        "",
        "| served by | tested on | classes |",
        "|---|---|---|",
    ]
    groups = (
        ("baton", 2, "Baton's own code", "prefill tp 1, decode tp 2"),
        ("baton", 1, "Baton's own code", "prefill tp 1, decode tp 1"),
        ("transformers", 2, "transformers' layers", "prefill tp 1, decode tp 2"),
        ("transformers", 1, "transformers' layers", "prefill tp 1, decode tp 1"),
    )
    for by, tp, name, tested in groups:
        own = [row for row in rows if (row.served_by, row.tp, row.result) == (by, tp, "same")]
        if own:
            lines.append(f"| {name} ({len(own)}) | {tested} | {_names(own)} |")
    others = [row for row in rows if row.result != "same"]
    if others:
        lines += ["", "| not served | result | reason |", "|---|---|---|"]
        lines += [f"| {row.architecture} | {row.result} | {_cell(row.reason)} |" for row in others]
    return "\n".join(lines) + "\n"


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(row.architecture for row in rows)


def _cell(reason: str) -> str:
    return reason.replace("|", "/").replace("<", "&lt;").replace("`", "")


def read_rows(path: Path = RESULT) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def with_table(page: str, rows: Sequence[Row]) -> str:
    """Return the page with the table of these rows."""
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + table(rows) + _END + rest.partition(_END)[2]

"""Tables of a run: each peer's rate by Baton's, and Baton's by what the machine can do at the most.

python -m benchmarks.cpu.table FILE
"""

import statistics
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from benchmarks.cpu.limits import roofline
from benchmarks.cpu.record import Record
from benchmarks.cpu.shapes import SHAPES

Row = dict[str, Any]
RATES = ("tokens_per_s", "tokens_per_cpu_s")


def baton_over_peers(rows: list[Row], rate: str) -> dict[tuple[str, int], dict[str, float]]:
    """{(cell, bits): {peer: Baton's rate by the peer's}}, for rows of one shape and number of threads."""
    own = {(row["cell"], row["bits"]): row[rate] for row in rows if row["peer"] == "baton" and rate in row}
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        key = (row["cell"], row["bits"])
        if rate in row and key in own and row["peer"] != "baton":
            found.setdefault(key, {})[row["peer"]] = own[key] / row[rate]
    return found


def by_best_peer(rows: list[Row], rate: str) -> dict[int, list[float]]:
    """{bits: Baton's rate by the best peer's, of each cell}, most bits first."""
    found: dict[int, list[float]] = {}
    for (_, bits), ratios in baton_over_peers(rows, rate).items():
        found.setdefault(bits, []).append(min(ratios.values()))
    return dict(sorted(found.items(), reverse=True))


def means(rows: list[Row], rate: str) -> dict[int, float]:
    """{bits: the geometric mean of all cells}"""
    return {bits: statistics.geometric_mean(ratios) for bits, ratios in by_best_peer(rows, rate).items()}


def show(record: Record, out: TextIO) -> None:
    for shape, threads, rows in _groups(record):
        limits = record.limits(threads)
        print(f"\n{shape}, threads: {threads}; {_limits(limits)}\n", file=out)
        peers = list(dict.fromkeys(row["peer"] for row in rows))
        print("| bits | | " + " | ".join(peers) + " | Baton by the most possible |", file=out)
        print("|---" * (len(peers) + 3) + "|", file=out)
        for (bits, cell), of_cell in groupby(rows, lambda row: (row["bits"], row["cell"])):
            by_peer = {row["peer"]: row for row in of_cell}
            texts = [_text(by_peer.get(peer), by_peer.get("baton")) for peer in peers]
            share = _share(by_peer.get("baton"), limits, shape, bits, cell)
            print(f"| {bits} | {cell} | {' | '.join(texts)} | {share} |", file=out)
        for rate in RATES:
            text = ", ".join(f"{bits} bits {mean:.2f}" for bits, mean in means(rows, rate).items())
            print(f"\n{rate} by the best peer's, geometric mean over cells: {text or '-'}", file=out)
    for row in record.content["left_out"]:
        where = f" in {row['bits']} bits" if "bits" in row else ""
        print(f"\nleft out: {row['peer']}{where}: {row['reason']}", file=out)


def _groups(record: Record) -> Iterator[tuple[str, int, list[Row]]]:
    """By shape and threads; rows of one precision and cell are together, in the order in which they were measured first."""
    keys = list(dict.fromkeys((row["shape"], row["threads"]) for row in record.cells()))
    for shape, threads in keys:
        rows = list(record.cells(shape=shape, threads=threads))
        order = list(dict.fromkeys(row["cell"] for row in rows))
        yield (
            shape,
            threads,
            sorted(rows, key=lambda row: (-row["bits"], order.index(row["cell"]))),
        )


def _text(row: Row | None, baton: Row | None) -> str:
    """The rate, and how many times as fast Baton is; or the memory at its peak, and Baton's by it."""
    if row is None:
        return "-"
    name = "tokens_per_s" if "tokens_per_s" in row else "peak_mb"
    value = f"{row[name]:,.0f}" if row[name] >= 100 else f"{row[name]:.1f}"
    if baton is None or baton is row:
        return value
    return f"{value} ({baton[name] / row[name]:.2f})"


def _share(row: Row | None, limits: dict[str, float], shape: str, bits: int, cell: str) -> str:
    if row is None or "tokens_per_s" not in row:
        return ""
    op, _, size = cell.partition(" ")
    return f"{row['tokens_per_s'] / roofline(limits, SHAPES[shape], bits, op, int(size)):.2f}"


def _limits(limits: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.0f}" for name, value in limits.items() if name != "threads")


def main() -> None:
    show(Record(Path(sys.argv[1]), "benchmarks.cpu.run", resume=True), sys.stdout)


if __name__ == "__main__":
    main()

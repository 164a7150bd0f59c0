"""What each process of `make serve` holds in memory, once it has answered.

    python -m benchmarks.serving.cluster_memory [--json FILE] [--smoke]

PSS counts a page that processes share once; RSS, which most tools show, once in each of them. `--smoke` takes `make local`."""

import contextlib
from pathlib import Path

import psutil

from benchmarks.report import parser, write
from benchmarks.serving.first_minutes import answered, made
from tests.ports import free_port

PREDICTION = (
    "106 MB less than the 1,322 before: what Ray's agent of dashboards held, which is not started any more"
)
_ROOT = Path(__file__).resolve().parents[2]


def measure(goal: str) -> list[dict[str, float | str]]:
    """Return the processes, the largest first, in megabytes."""
    port = free_port()
    with made(_ROOT, goal, f"PORT={port}") as process:
        answered(f"http://127.0.0.1:{port}", process)
        main = psutil.Process(process.pid)
        rows = [row for each in (main, *main.children(recursive=True)) if (row := _row(each))]
    return sorted(rows, key=lambda row: -float(row["pss_mb"]))


def _row(process: psutil.Process) -> dict[str, float | str] | None:
    with contextlib.suppress(psutil.Error):
        held = process.memory_full_info()
        return {"process": _name(process.cmdline()), "pss_mb": held.pss / 1e6, "rss_mb": held.rss / 1e6}
    return None


def _name(command: list[str]) -> str:
    """Return what a table calls it: Ray's processes have titles, and others the names of their programs."""
    words = " ".join(command).split()
    return " ".join(Path(word).name for word in words[:3] if not word.startswith("-"))


def main() -> None:
    args = parser(__doc__).parse_args()
    rows = measure("local" if args.smoke else "serve")
    total = {kind: sum(float(row[kind]) for row in rows) for kind in ("pss_mb", "rss_mb")}
    for row in [*rows, {"process": "in all", **total}]:
        print(f"{row['process']:60s} PSS {row['pss_mb']:7.1f}  RSS {row['rss_mb']:7.1f} MB")
    write(
        args.json,
        "benchmarks.serving.cluster_memory",
        {"prediction": PREDICTION, "unit": "MB", "rows": rows, "total": total},
    )


if __name__ == "__main__":
    main()

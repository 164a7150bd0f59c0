"""What the benchmarks' command lines have in common: a module's text is its help, and results name their machine."""

import argparse
import json
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from baton.bench.bench_report import machine

P = TypeVar("P")


def parser(text: str | None, must_write: bool = False) -> argparse.ArgumentParser:
    """A parser with `--json FILE`, which `write` takes (and which `must_write` requires), and `--smoke`."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", required=must_write)
    made.add_argument(
        "--smoke", action="store_true", help="sizes that take seconds: shows that it runs, measures nothing"
    )
    return made


def least_in_turns(
    steps: Mapping[str, P], measures: Mapping[str, Callable[[P], float]], num_rounds: int
) -> dict[str, dict[str, float]]:
    """{step: {way: milliseconds}}: the least that each way (step -> seconds) has taken, of `num_rounds` rounds and one more in
    which all ways take turns, since others share the machine."""
    found = {name: dict.fromkeys(measures, float("inf")) for name in steps}
    for _ in range(num_rounds + 1):
        for name, step in steps.items():
            for way, measure in measures.items():
                found[name][way] = min(found[name][way], 1e3 * measure(step))
    return found


def show_steps(
    times: Mapping[str, Mapping[str, float]], ratios: Mapping[str, Mapping[str, float]], unit: str = ""
) -> None:
    """A line for each step: each way's milliseconds, and its ratio, which `unit` follows."""
    for step, by_way in times.items():
        ways = "   ".join(f"{way} {ms:8.1f} ms ({ratios[step][way]:.2f}{unit})" for way, ms in by_way.items())
        print(f"{step:12} {ways}")


def write(path: Path | None, command: str, content: dict[str, Any]) -> None:
    """Write `content` to `path`, if there is one. `command` makes such results again; it names no path of this machine."""
    if path:
        made = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()}
        whole = {"command": f"python -m {command}", **made, "machine": machine(), **content}
        path.write_text(json.dumps(whole, indent=2) + "\n")


def commit() -> str:
    """Return the commit of this checkout, with a plus where files differ from it; empty where there is none."""
    words = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty=+",
        "--exclude=*",
        "--abbrev=12",
    ]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()

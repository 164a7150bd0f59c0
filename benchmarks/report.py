"""What the benchmarks' command lines have in common: a module's text is its help, and results name their machine."""

import argparse
import json
from pathlib import Path
from typing import Any

from baton.bench.bench_report import machine


def parser(text: str | None, must_write: bool = False) -> argparse.ArgumentParser:
    """A parser with `--json FILE`, which `write` takes (and which `must_write` requires), and `--smoke`."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", required=must_write)
    made.add_argument(
        "--smoke", action="store_true", help="sizes that take seconds: shows that it runs, measures nothing"
    )
    return made


def write(path: Path | None, command: str, content: dict[str, Any]) -> None:
    """Write `content` to `path`, if there is one. `command` makes such results again; it names no path of this machine."""
    if path:
        whole = {"command": f"python -m {command}", "machine": machine(), **content}
        path.write_text(json.dumps(whole, indent=2) + "\n")

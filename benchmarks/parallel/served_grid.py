"""Every family on every mesh of ranks behind the real server: are greedy answers over HTTP transformers' own?

    python -m benchmarks.parallel.served_grid [--json FILE] [--only FAMILY ...]

The servers are those of `tests/parallel/served_grid.py`, their ranks forked from one process that has loaded torch
(`forked_ranks.py`). Prediction: all of them."""

import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.report import parser, write
from tests.parallel.forked_ranks import start_forked
from tests.parallel.served_grid import Found, is_right, pairs, prepare, serve


def measure(families: list[str], num_pairs: int | None, path: Path | None, command: str) -> list[Found]:
    """The first `num_pairs` servers of each family, or all. `path`: where what is known is written after each, with the `command`
    that has made it."""
    results: list[Found] = []
    with tempfile.TemporaryDirectory() as name:
        for family in families:
            folder = Path(name) / family
            prompts, want = prepare(family, folder)
            for pair in [pair for pair in pairs() if pair.family == family][:num_pairs]:
                results.append(asyncio.run(serve(pair, folder, prompts, want)))
                print(json.dumps(asdict(results[-1])), flush=True)
                write(path, command, summary(results))
    return results


def summary(results: list[Found]) -> dict[str, Any]:
    return {
        "note": "seconds: two cores that much else was running on",
        "families on meshes": len({(o.family, mesh) for o in results for mesh in (o.prefill, o.decode)}),
        "of": len({(pair.family, mesh) for pair in pairs() for mesh in (pair.prefill, pair.decode)}),
        "servers": len(results),
        "wrong": sum(not is_right(found) for found in results),
        "results": [asdict(found) for found in results],
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="*", help="families")
    args = options.parse_args()
    with patch("engine.ranks.child_ranks.start_children", start_forked):
        families = args.only or sorted({pair.family for pair in pairs()})
        command = " ".join(
            ["benchmarks.parallel.served_grid", *(["--only", *args.only] if args.only else [])]
        )
        first = families[:1] if args.smoke else families
        results = measure(first, 1 if args.smoke else None, args.json, command)
    wrong = sum(not is_right(found) for found in results)
    print(f"{len(results)} servers, {wrong} of them wrong")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

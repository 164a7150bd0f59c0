"""The tests that need a GPU, and all of the Triton kernels', compiled: `python -m benchmarks.gpu.device_tests --json FILE`.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.device_tests --interpret-smoke` runs one file of them in the interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.session import Results, Row, Verdict, begin, parser
from benchmarks.gpu.told import TOLD
from kernels.triton.platform import INTERPRETED

ROOT = Path(__file__).parents[2]
KERNELS = "tests/kernels/triton"
RUNS = (
    {"one file of the Triton kernels'": [f"{KERNELS}/test_route.py"]}
    if INTERPRETED
    else {
        "what needs a GPU": [
            *("-n", "8", "-m", "gpu", "tests/contract/test_device.py", "tests/contract/test_conversions.py"),
            *("tests/engine/sizing/test_devices.py", "tests/kernels/test_attention_backends.py"),
        ],
        # Neighbours, which mostly need the same kernels, go to one process, so that no two compile them at once.
        "the Triton kernels'": ["-n", "15", "--dist", "worksteal", KERNELS],
    }
)
"""What pytest is given, run by run."""
PLUGINS = (
    "benchmarks.gpu.told",
    "xdist.plugin",
    "xdist.looponfail",
    "pytest_timeout",
    "pytest_asyncio.plugin",
)
"""All that pytest loads: what else is installed on such a machine may not know this pytest."""
LOOK_S = 2.0


def run(arguments: Sequence[str], tell: Callable[[str], None]) -> Row:
    """Return how many tests passed, and the names of those that did not. `tell` hears now and then how far they are."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "told"
        path.touch()
        command = [sys.executable, "-m", "pytest", "--timeout=120", *arguments]
        for plugin in PLUGINS:
            command += ["-p", plugin]
        # A warning of a library that is newer or older there than where all tests run is no failure of a kernel, and a file that
        # cannot be imported is one failure, not all.
        command += ["-W", "default", "--continue-on-collection-errors"]
        env = os.environ | {TOLD: str(path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        with subprocess.Popen(command, cwd=ROOT, env=env) as process:
            while process.poll() is None:
                try:
                    process.wait(LOOK_S)
                except subprocess.TimeoutExpired:
                    found = _outcomes(path)
                    tell(f"cut: {found['passed']} passed; failed: {', '.join(found['failed']) or 'none'}")
        return _outcomes(path) | {"exit_code": process.returncode}


def _outcomes(path: Path) -> Row:
    lines = path.read_text().split("\n")[:-1]  # the last one may not be whole yet
    told: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {
        "passed": sum(one["outcome"] == "passed" for one in told),
        "skipped": sum(one["outcome"] == "skipped" for one in told),
        "failed": {one["name"]: one["why"] for one in told if one["outcome"] == "failed"},
    }


def verdicts(rows: dict[str, Row]) -> list[Verdict]:
    found: list[Verdict] = []
    for name, row in rows.items():
        found.append(Verdict(f"{name} tests passed", float(row["passed"]), 1.0))
        found.append(Verdict(f"{name} tests failed", float(len(row["failed"])), 0.0, at_least=False))
    return found


def main() -> None:
    args = parser(__doc__).parse_args()
    results = Results(args.json, "benchmarks.gpu.device_tests", begin(args.interpret_smoke), verdicts)
    for name in results.missing(RUNS):
        results.make(name, partial(run, RUNS[name], partial(results.fail, name)))
    results.end()


if __name__ == "__main__":
    main()

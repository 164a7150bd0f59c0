"""The tests that need a GPU, and all of the Triton kernels', compiled: `python -m benchmarks.gpu.device_tests --json FILE`.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.device_tests --interpret-smoke` runs one file of them in the interpreter."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from benchmarks.gpu.session import Verdict, begin, parser, write
from kernels.triton.platform import INTERPRETED

ROOT = Path(__file__).parents[2]
KERNELS = "tests/kernels/triton"
RUNS = (
    [[f"{KERNELS}/test_route.py"]]
    if INTERPRETED
    else [["-m", "gpu", "tests/engine", "tests/kernels"], ["-n", "8", KERNELS]]
)
"""What pytest is given, run by run."""


def run(arguments: list[str], report: Path) -> tuple[int, list[str]]:
    """How many tests passed, and the names of those that did not."""
    command = [sys.executable, "-m", "pytest", "--timeout=120", f"--junitxml={report}", *arguments]
    subprocess.run(command, cwd=ROOT, check=False)
    cases = ElementTree.parse(report).getroot().iter("testcase")
    outcomes = {
        f"{case.get('classname')}::{case.get('name')}": {child.tag for child in case} for case in cases
    }
    failed = [name for name, tags in outcomes.items() if tags & {"failure", "error"}]
    return sum(not tags for tags in outcomes.values()), failed


def main() -> None:
    args = parser(__doc__).parse_args()
    device = begin(args.interpret_smoke)
    passed, failed = 0, list[str]()
    with TemporaryDirectory() as folder:
        for number, arguments in enumerate(RUNS):
            more, wrong = run(arguments, Path(folder) / "report.xml")
            passed, failed = passed + more, failed + wrong
            content = {"passed": passed, "failed": failed}
            verdicts = [
                Verdict("tests passed", float(passed), 1.0),
                Verdict("tests failed", float(len(failed)), 0.0, at_least=False),
            ]
            complete = number + 1 == len(RUNS)
            write(args.json, "benchmarks.gpu.device_tests", device, content, verdicts, complete=complete)
    print(f"{passed} passed, {len(failed)} failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

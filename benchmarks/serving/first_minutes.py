"""How long a newcomer waits: a fresh clone, `make setup`, `make setup` again, `make serve` up to the first answer, and mistakes.

python -m benchmarks.serving.first_minutes --json first_minutes.json

Each run is a clone of its own. `--smoke` takes this checkout, which is set up, and `make local`."""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.report import parser, write
from tests.ports import free_port

_ROOT = Path(__file__).resolve().parents[2]
_READY_S = 300.0
_ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "ARGS")
}
"""A `make` that has started this hands its own variables on."""
_BODY = {"model": "baton-embedded", "prompt": "import os\n", "max_tokens": 8, "temperature": 0}


def measure(root: Path, goal: str, *, is_new: bool) -> dict[str, float]:
    """Return the seconds of each wait in the checkout `root`, and the megabytes of the served cluster."""
    found = {"setup_s": _seconds("make", "setup", cwd=root)} if is_new else {}
    found["setup_again_s"] = _seconds("make", "setup", cwd=root)
    found |= _serve(root, goal)
    baton = str(root / ".venv" / "bin" / "baton")
    found["help_s"] = _seconds(baton, "serve", "--help", cwd=root)
    found["wrong_model_s"] = _seconds(baton, "serve", "--model", "/no/such/folder", cwd=root, fails=True)
    return found


def _serve(root: Path, goal: str) -> dict[str, float]:
    port = free_port()
    started = time.perf_counter()
    with made(root, goal, f"PORT={port}") as process:
        answered(f"http://127.0.0.1:{port}", process)
        answered_s = time.perf_counter() - started
        return {"answer_s": answered_s, "cluster_mb": _megabytes(process.pid)}


@contextlib.contextmanager
def made(root: Path, *arguments: str) -> Generator["subprocess.Popen[bytes]"]:
    """Yield a `make` in the checkout `root`, which is interrupted in the end."""
    process = subprocess.Popen(
        ["make", *arguments],
        cwd=root,
        env=_ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        left = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        psutil.wait_procs(left, 30)


def answered(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Return when a completion has come. Raises SystemExit where the server ends, or says nothing for too long."""
    deadline_at = time.monotonic() + _READY_S
    while time.monotonic() < deadline_at:
        if process.poll() is not None:
            raise SystemExit(f"`{' '.join(map(str, process.args))}` ended with status {process.returncode}")  # type: ignore[arg-type]
        with contextlib.suppress(httpx.HTTPError):
            if httpx.post(f"{url}/v1/completions", json=_BODY, timeout=60).status_code == 200:
                return
        time.sleep(0.05)
    raise SystemExit(f"no answer from {url} in {_READY_S:g} s")


def _megabytes(pid: int) -> float:
    """Return what its processes occupy. Pages that they share count once."""
    main = psutil.Process(pid)
    total = 0
    for process in (main, *main.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 1e6


def _seconds(*command: str, cwd: Path, fails: bool = False) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    if bool(done.returncode) != fails:
        raise SystemExit(f"`{' '.join(command)}` ended with status {done.returncode}: {done.stderr[-1000:]}")
    return time.perf_counter() - started


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=3)
    args = options.parse_args()
    runs: list[dict[str, float]] = []
    if args.smoke:
        runs.append(measure(_ROOT, "local", is_new=False))
    for number in range(0 if args.smoke else args.runs):
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder) / "baton"
            subprocess.run(["git", "clone", "--quiet", str(_ROOT), str(clone)], check=True)
            runs.append(measure(clone, "serve", is_new=True))
        print(f"run {number + 1}: " + ", ".join(f"{name} {value:.1f}" for name, value in runs[-1].items()))
    content: dict[str, Any] = {
        "rows": runs,
        "median": {name: statistics.median(run[name] for run in runs) for name in runs[0]},
    }
    write(args.json, "benchmarks.serving.first_minutes", content)
    sys.stdout.write(f"median: {content['median']}\n")


if __name__ == "__main__":
    main()

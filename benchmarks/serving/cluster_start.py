"""What a cluster's start takes of the processors, by process, with bytecode that is kept and without.

    python -m benchmarks.serving.cluster_start [--json FILE] [--rounds 3] [--smoke]

`imports`: a process that only imports, in seconds of a processor (user and system), the least of the rounds; both ways take
turns. `cluster`: all processes of `baton serve` from their beginning up to the first answer, and what they then occupy. `kept` is
after `python -m baton.bytecode`; `without`, Python finds no bytecode and may not write any, as in a new checkout of an image that
sets PYTHONDONTWRITEBYTECODE. Seconds of the clock are written beside the load of the machine, since others may use it."""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from benchmarks.report import parser, write
from tests.e2e.cluster_process import ServeProcess, serving

PREDICTION = "kept takes 0.4 of the processor time that imports take without; of an instance's imports Ray and torch are 0.8"
PROGRAMS = {
    "Ray": "import ray._private.workers.default_worker",
    "Ray Serve": "import ray._private.workers.default_worker, ray.serve",
    "torch": "import torch",
    "command line": "import baton.cli.serve, cluster.ingress.model_card, cluster.deploy.launch",
    "scheduler": "import ray._private.workers.default_worker, cluster.deploy.scheduler_deployment",
    "ingress": "import ray._private.workers.default_worker, cluster.deploy.ingress_process",
    "instance": "import ray._private.workers.default_worker, cluster.deploy.pool_instance",
}
"""What each process imports. The first three are parts of the others."""
WAYS: Final = "kept", "without"


def import_s(program: str) -> float:
    """Return the processor time of an interpreter that runs `program`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports(
    folders: dict[str, Path | None], names: Sequence[str], rounds: int
) -> dict[str, dict[str, float]]:
    """Return {process: {way: seconds}}."""
    found = {name: {str(way): float("inf") for way in WAYS} for name in names}
    for _ in range(rounds):
        for way, name in ((way, name) for way in WAYS for name in names):
            with bytecode_in(folders[way]):
                found[name][way] = round(min(found[name][way], import_s(PROGRAMS[name])), 2)
    return found


@contextlib.contextmanager
def bytecode_in(folder: Path | None) -> Generator[None]:
    """Have processes that are started meanwhile look for bytecode in `folder` alone, and write none. None: where it always is."""
    if folder is None:
        yield
        return
    changed = {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_cluster(folder: Path | None, log: Path) -> dict[str, float]:
    begun_at = time.perf_counter()
    with bytecode_in(folder), serving("--prefill", "1", "--decode", "1", log=log) as server:
        body = {"model": "baton-embedded", "prompt": "import os\n", "max_tokens": 1}
        httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60).raise_for_status()
        return {
            "processor_s": round(processor_s(server), 1),
            "clock_s": round(time.perf_counter() - begun_at, 1),
            "load_average": os.getloadavg()[0],
            "pss_mb": round(server.memory_bytes() / 1e6),
        }


def processor_s(server: ServeProcess) -> float:
    total = 0.0
    for process in [psutil.Process(server.process.pid), *server.descendants()]:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    rounds = 1 if args.smoke else args.rounds
    names, ways = (("Ray",), ("kept",)) if args.smoke else (tuple(PROGRAMS), WAYS)
    with tempfile.TemporaryDirectory() as name:
        folders: dict[str, Path | None] = {way: Path(name) / way for way in WAYS}
        if args.smoke:
            folders["kept"] = None
        else:
            kept = os.environ | {"PYTHONPYCACHEPREFIX": str(folders["kept"])}
            subprocess.run([sys.executable, "-m", "baton.bytecode"], check=True, env=kept)
        by_process = imports(folders, names, rounds)
        clusters = {way: start_cluster(folders[way], Path(name) / "log") for way in ways}
    kept_s, without_s = (sum(by_process[name][way] for name in names) for way in WAYS)
    content: dict[str, Any] = {
        "prediction": PREDICTION,
        "imports": by_process,
        "cluster": clusters,
        "kept / without": round(kept_s / without_s, 2),
    }
    sys.stdout.write(f"{content}\n")
    write(args.json, f"benchmarks.serving.cluster_start --rounds {rounds}", content)


if __name__ == "__main__":
    main()

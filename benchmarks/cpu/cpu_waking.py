"""How long a model on a CPU takes from asleep to its first token, by what it has kept; and what its process holds meanwhile.

    python -m benchmarks.cpu.cpu_waking [--json FILE] [--checkpoints build/cpu-checkpoints] [--shape 0.5b] [--rounds 5] [--smoke]

`host`: level 1, weights mapped. `cached`: level 2, with the files of weights in the system's memory. `disk`: level 2, without.
`nothing`: no process; the time is from the command. `baton serve --local` has one instance. `--smoke` takes a tiny model."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import parser, write
from tests.e2e.cluster_process import ServeProcess, serving

PREDICTION = (
    "0.5b, one core: host 0.2 s, cached 1.2 s, disk 2 s, nothing 10 s; asleep the KV pool's 256 MB less"
)
_KV_BYTES = 256 << 20


def measure(model: Path, cache: Path, log: Path, num_rounds: int) -> list[dict[str, Any]]:
    with serving(*_arguments(model, cache), log=log) as server:
        _first_token(server, model.name)  # its weights are packed and stored from here on
    began = time.perf_counter()
    with serving(*_arguments(model, cache), log=log) as server:
        _first_token(server, model.name)
        rows = [
            {"kept": "nothing", "first_token_s": [time.perf_counter() - began], "phases_s": [_phases(server)]}
        ]
        for kept, level in (("host", 1), ("cached", 2), ("disk", 2)):
            row: dict[str, Any] = {"kept": kept, "first_token_s": [], "phases_s": [], "predicted_s": []}
            for _ in range(num_rounds):
                _fill(server, model.name)
                row["awake_mb"] = round(server.memory_bytes() / 1e6, 1)
                _post(server, f"/sleep?level={level}")
                row["asleep_mb"] = round(server.memory_bytes() / 1e6, 1)
                row["predicted_s"].append(server.status()["sleepers"][0]["wake_s"])
                if kept == "disk":
                    _drop(model, cache)
                asked_at = time.perf_counter()
                _first_token(server, model.name)
                row["first_token_s"].append(time.perf_counter() - asked_at)
                row["phases_s"].append(_phases(server))
            rows.append(row)
        return rows


def _arguments(model: Path, cache: Path) -> list[str]:
    settings = {
        "model.packed_cache": cache,
        "engine.kv_bytes": _KV_BYTES,
        "engine.num_threads": 1,
        "schedule.residency.mode": "on_demand",
        "schedule.residency.idle_s": 3600,
    }
    pairs = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return ["--local", "--model", str(model), "--prefill", "0", "--decode", "1", *pairs]


def _first_token(server: ServeProcess, name: str) -> None:
    body = {"model": name, "prompt": "def f(x):", "max_tokens": 1, "temperature": 0}
    httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=300).raise_for_status()


def _fill(server: ServeProcess, name: str) -> None:
    """Have some of the pool written, as by a day's requests."""
    body = {"model": name, "prompt": "def f(x):\n" * 60, "max_tokens": 8, "temperature": 0}
    httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=300).raise_for_status()


def _post(server: ServeProcess, path: str) -> None:
    httpx.post(f"{server.base_url}{path}", timeout=300).raise_for_status()


def _phases(server: ServeProcess) -> dict[str, float]:
    (instance,) = server.status()["instances"]
    return {name: round(seconds, 4) for name, seconds in instance["start"]["phases"]}


def _drop(*folders: Path) -> None:
    """Have the system drop what it holds of these folders' files."""
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--checkpoints", type=Path, default=Path("build/cpu-checkpoints"))
    made.add_argument("--shape", default="0.5b")
    made.add_argument("--rounds", type=int, default=5)
    args = made.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, shape = (Path(temporary), "tiny") if args.smoke else (args.checkpoints.absolute(), args.shape)
        model, num_rounds = folder / shape / "plain", 1 if args.smoke else args.rounds
        if not model.exists():
            subprocess.run([sys.executable, "-m", "benchmarks.cpu.shapes", shape, str(model)], check=True)
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            rows = measure(model, Path(cache), Path(temporary) / "log", num_rounds)
    for row in rows:
        print(f"{row['kept']:8} {statistics.median(row['first_token_s']):.3f} s {row}", flush=True)
    content = {"prediction": PREDICTION, "kv_bytes": _KV_BYTES, "rows": rows}
    write(args.json, f"benchmarks.cpu.cpu_waking --shape {shape}", content)


if __name__ == "__main__":
    main()

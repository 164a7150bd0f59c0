"""What a prefill and a decode instance of `baton serve` hold together, and how long a start takes, with weights that they share.

    python -m benchmarks.cpu.cpu_sharing [--json FILE] [--checkpoints build/cpu-checkpoints] [--shape 0.5b] [--quantization none]
        [--smoke]

`none`: each instance packs weights of its own. `first`: both start at once and nothing is stored yet. `again`: a later start. PSS
counts a page that processes share once among them, RSS in each of them. `--smoke` takes a tiny model."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.report import parser, write
from tests.e2e.cluster_process import ServeProcess, serving

PREDICTION = "one copy of 0.99 GB less than before in 16 bits, and a later start 1 to 2 s sooner"
_KV_BYTES = 256 << 20
_POOLS = "PrefillPool", "DecodePool"


def measure(model: Path, packed_cache: str, quantization: str, log: Path) -> dict[str, Any]:
    began = time.perf_counter()
    with serving(*_arguments(model, packed_cache, quantization), log=log) as server:
        status = server.wait_idle(2)
        ready_s = time.perf_counter() - began
        _answered(server, model.name)
        held = [_held(process) for role in _POOLS for process in server.replicas(role)]
        phases = [
            {name: round(seconds, 3) for name, seconds in row["start"]["phases"]}
            for row in status["instances"]
        ]
        return {
            "ready_s": round(ready_s, 2),
            "pss_mb": round(sum(pss for pss, _ in held), 1),
            "rss_mb": round(sum(rss for _, rss in held), 1),
            "cluster_pss_mb": round(server.memory_bytes() / 1e6, 1),
            "phases_s": phases,
        }


def _arguments(model: Path, packed_cache: str, quantization: str) -> list[str]:
    settings = {
        "model.quantization": quantization,
        "model.packed_cache": packed_cache,
        "engine.kv_bytes": _KV_BYTES,
        "engine.num_threads": 1,
    }
    pairs = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return ["--model", str(model), "--prefill", "1", "--decode", "1", *pairs]


def _answered(server: ServeProcess, name: str) -> None:
    """Have both instances read all of their weights."""
    body = {"model": name, "prompt": "def f(x):\n" * 60, "max_tokens": 8, "temperature": 0}
    httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=120).raise_for_status()


def _held(process: psutil.Process) -> tuple[float, float]:
    found = process.memory_full_info()
    return found.pss / 1e6, found.rss / 1e6


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--checkpoints", type=Path, default=Path("build/cpu-checkpoints"))
    made.add_argument("--shape", default="0.5b")
    made.add_argument("--quantization", default="none")
    args = made.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, shape = (Path(temporary), "tiny") if args.smoke else (args.checkpoints.absolute(), args.shape)
        model = folder / shape / "plain"
        if not model.exists():
            subprocess.run([sys.executable, "-m", "benchmarks.cpu.shapes", shape, str(model)], check=True)
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            for way, setting in (("none", "none"), ("first", cache), ("again", cache)):
                row = measure(model, setting, args.quantization, Path(temporary) / "log")
                rows.append({"way": way, **row})
                print(f"{way:6} {rows[-1]}", flush=True)
    write(
        args.json,
        f"benchmarks.cpu.cpu_sharing --shape {shape} --quantization {args.quantization}",
        {"prediction": PREDICTION, "kv_bytes": _KV_BYTES, "rows": rows},
    )


if __name__ == "__main__":
    main()

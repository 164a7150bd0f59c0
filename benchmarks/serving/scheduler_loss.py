"""How long new requests wait when the only scheduler is killed, with its spare and without, and what the spare costs.

    python -m benchmarks.serving.scheduler_loss [--json FILE] [--rounds 10] [--smoke]

Each round kills the scheduler that places requests, sends a request in the same moment and waits for the answer. `with spare`:
the spare lives, as it does unless both are lost within seconds. `without`: both are killed, so Serve must notice, start a process
and load the code. A round begins when both are there again. The costs are those of each process while `streams` streams run."""

import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.report import parser, write
from tests.e2e.cluster_process import SILENCE_S, ServeProcess, serving

PREDICTION = (
    "with the spare a request waits 0.2 s, most of which is its own answer; without, 2 to 3 s on an idle machine; the spare "
    "takes 100 MB, and less of a processor than the scheduler: both read reports, and one places"
)
_STREAMS = 16
_SETTLE_S = 8.0
"""A process that misses a scheduler looks for it every 5 s at the latest."""
_BODY = {"model": "baton-embedded", "prompt": "import os\n", "max_tokens": 4, "temperature": 0}


def answered_s(server: ServeProcess) -> float:
    """Return the seconds up to the answer of one request, which must not fail."""
    begun = time.perf_counter()
    httpx.post(f"{server.base_url}/v1/completions", json=_BODY, timeout=60).raise_for_status()
    return time.perf_counter() - begun


def both(server: ServeProcess, settle_s: float) -> list[psutil.Process]:
    """Return the scheduler that places requests and its spare, which all know after `settle_s`. The older one has been placing
    since the other came."""
    deadline = time.monotonic() + SILENCE_S
    while len(found := server.replicas("Scheduler")) < 2:
        if time.monotonic() > deadline:
            raise SystemExit("no second scheduler has come")
        time.sleep(0.1)
    time.sleep(settle_s)
    server.wait_idle(2)
    return found


def losses(server: ServeProcess, rounds: int, num_killed: int, settle_s: float) -> dict[str, Any]:
    """Return how long requests took that came when the first `num_killed` schedulers were killed."""
    took_s: list[float] = []
    for _ in range(rounds):
        for victim in both(server, settle_s)[:num_killed]:
            victim.kill()
        took_s.append(round(answered_s(server), 3))
    return {"median_s": statistics.median(took_s), "longest_s": max(took_s), "all_s": took_s}


def costs(server: ServeProcess, seconds: float, settle_s: float) -> dict[str, Any]:
    """Return what each scheduler process takes while streams run."""
    processes = both(server, settle_s)
    body = _BODY | {"max_tokens": 200}
    ends_at = time.monotonic() + seconds

    def stream() -> int:
        count = 0
        while time.monotonic() < ends_at:
            httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60).raise_for_status()
            count += 1
        return count

    begun, before = time.monotonic(), [sum(process.cpu_times()[:2]) for process in processes]
    with ThreadPoolExecutor(_STREAMS) as pool:
        served = sum(one.result() for one in [pool.submit(stream) for _ in range(_STREAMS)])
    took_s = time.monotonic() - begun
    shares = [
        round((sum(process.cpu_times()[:2]) - earlier) / took_s, 4)
        for process, earlier in zip(processes, before, strict=True)
    ]
    sizes = [round(process.memory_full_info().pss / 1e6) for process in processes]
    names = ("scheduler", "spare")
    return {
        "streams": _STREAMS,
        "requests": served,
        "processors": dict(zip(names, shares, strict=True)),
        "pss_mb": dict(zip(names, sizes, strict=True)),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10)
    args = options.parse_args()
    rounds, settle_s = (1, 0.5) if args.smoke else (args.rounds, _SETTLE_S)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("--prefill", "1", "--decode", "1", log=Path(folder) / "log") as server,
    ):
        calm = [round(answered_s(server), 3) for _ in range(rounds)]
        loads = [os.getloadavg()[0]]
        both(server, settle_s)[0].kill()  # from now on the older one is the one that places
        content = {
            "prediction": PREDICTION,
            "undisturbed_s": statistics.median(calm),
            "with spare": losses(server, rounds, 1, settle_s),
            "without": losses(server, rounds, 2, settle_s),
            "costs": costs(server, 2.0 if args.smoke else 20.0, settle_s),
        }
        loads.append(os.getloadavg()[0])
    content["load_average"] = {"before": loads[0], "after": loads[1]}
    sys.stdout.write(f"{content}\n")
    write(args.json, f"benchmarks.serving.scheduler_loss --rounds {rounds}", content)


if __name__ == "__main__":
    main()

"""What a load balancer adds to streams, and what clients see when one of two ingresses is drained or killed.

    python -m benchmarks.serving.load_balancer --json benchmarks/results/load_balancer.json

Two ingresses emit tokens at a fixed pace, so that every gap that is not the pace comes from the way: HTTP, balancer, client.
Prediction, written first: the median is the pace with and without one, p99 within 15 ms of the direct one."""

import asyncio
import contextlib
import json
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.bench.pictures import plt
from benchmarks.report import parser, write
from tests.deploy.balancers import BALANCERS, Ingress, balancer
from tests.deploy.streams import Load, Stream, burst

PAUSE_S, SETTLE_S, NUM_STREAMS, NUM_TOKENS, ROUNDS = 0.05, 5.0, 64, 60, 3


def main() -> None:
    args = parser(__doc__, must_write=True).parse_args()
    out: Path = args.json
    num_streams, num_tokens, rounds = (4, 5, 1) if args.smoke else (NUM_STREAMS, NUM_TOKENS, ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        kinds = [*BALANCERS][:1] if args.smoke else [*BALANCERS]
        settle_s = 0.5 if args.smoke else SETTLE_S
        gaps_ms, faults = measure(Path(folder), kinds, num_streams, num_tokens, rounds, settle_s)
    result = {
        "balancers": {kind: version_of(kind) for kind in BALANCERS},
        "streams": num_streams,
        "tokens": num_tokens,
        "pace_ms": PAUSE_S * 1e3,
        "gaps_ms": {way: quantiles(values) for way, values in gaps_ms.items()},
        "faults": faults,
    }
    write(out, "benchmarks.serving.load_balancer --json FILE", result)
    picture(gaps_ms, num_streams, out.with_suffix(".png"))
    print(json.dumps({"gaps_ms": result["gaps_ms"], "faults": faults}, indent=1))


def measure(
    folder: Path, kinds: Sequence[str], num_streams: int, num_tokens: int, rounds: int, settle_s: float
) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
    """Gaps by way, in ms, from rounds that take turns; and what became of streams under each fault, for `settle_s`."""
    ingresses = [Ingress(PAUSE_S, 3.0, folder / f"{i}.log") for i in range(2)]
    gaps_ms: dict[str, list[float]] = {"direct": [], **{kind: [] for kind in kinds}}
    faults: dict[str, dict[str, Any]] = {}
    try:
        for ingress in ingresses:
            ingress.wait_ready()
        with contextlib.ExitStack() as stack:
            urls = {"direct": f"http://127.0.0.1:{ingresses[0].port}"}
            for kind in kinds:
                (folder / kind).mkdir()
                ports = [ingress.port for ingress in ingresses]
                urls[kind] = stack.enter_context(balancer(kind, ports, folder / kind))
            for _ in range(rounds):
                for way, url in urls.items():
                    streams = asyncio.run(burst(url, num_streams, num_tokens))
                    assert all(stream.done for stream in streams), way
                    gaps_ms[way] += [gap * 1e3 for stream in streams for gap in stream.gaps_s]
            for kind in kinds:
                faults[f"{kind}: drained"] = asyncio.run(
                    under_fault(urls[kind], ingresses[0], settle_s, kill=False)
                )
                faults[f"{kind}: killed"] = asyncio.run(
                    under_fault(urls[kind], ingresses[1], settle_s, kill=True)
                )
    finally:
        for ingress in ingresses:
            ingress.end()
    return gaps_ms, faults


async def under_fault(url: str, victim: Ingress, settle_s: float, *, kill: bool) -> dict[str, Any]:
    async with Load(url, 32, 20) as load:
        if kill:
            victim.end()
        else:
            victim.process.terminate()
            await asyncio.to_thread(victim.process.wait, 60)
        await asyncio.sleep(settle_s)
    victim.start()
    await asyncio.to_thread(victim.wait_ready)
    await asyncio.sleep(settle_s)
    return account(load.streams)


def account(streams: list[Stream]) -> dict[str, Any]:
    refused = [stream for stream in streams if stream.outcome == "refused"]
    return {
        "streams": len(streams),
        **Counter(stream.outcome for stream in streams),
        "refused_not_retriable": sum(not stream.retriable for stream in refused),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=1000)
    return {
        name: round(cuts[i - 1], 2) for name, i in (("p1", 10), ("p50", 500), ("p99", 990), ("p999", 999))
    }


def version_of(kind: str) -> str:
    done = subprocess.run([kind, "-v"], capture_output=True, text=True, check=True)
    return (done.stdout or done.stderr).splitlines()[0]


def picture(gaps_ms: dict[str, list[float]], num_streams: int, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.2))
    bins = [i * 2.0 for i in range(76)]
    for way, values in gaps_ms.items():
        axes.hist(values, bins=bins, histtype="step", label=way, density=True)
    axes.set(xlabel="gap between two tokens at the client, ms", ylabel="density", yscale="log")
    axes.set_title(f"{num_streams} streams, a token every {PAUSE_S * 1e3:g} ms", fontsize=10)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

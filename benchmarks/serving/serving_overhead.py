"""What HTTP, Ray Serve, the frontend and the scheduler add to the engine's own latency, at 16 streams.

    python -m benchmarks.serving.serving_overhead [--json FILE]

Three ways to run the same 16 closed-loop streams of the embedded model, in turn, several rounds: the engine called directly in
this process; `baton serve --local` (HTTP, one process); `baton serve` with one decode instance and no prefill pool (HTTP,
Ray Serve, separate processes). All compute on one thread. The differences of the medians are the overheads.
Prediction: Ray adds 8 ms to TTFT and 1 ms to ITL. Targets: 15 ms and 2 ms."""

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import httpx

from baton.bench.bench_workload import BenchRequest, synthetic
from baton.bench.client import Client, Record, closed_loop
from baton.bench.measure import gaps_s, percentiles, ttft_s
from benchmarks.report import parser, write
from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.types import Request, SamplingParams
from tests.ports import free_port

STREAMS, REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 16, 48, 64, 64


def jobs(round_number: int, num_requests: int, output_tokens: int) -> list[BenchRequest]:
    return synthetic(num_requests, INPUT_TOKENS, output_tokens, 0.25, vocab_size=4000, seed=round_number)


async def direct(work: Sequence[BenchRequest]) -> list[Record]:
    """No HTTP, no Ray: the frontend's generator in this process."""
    config = load(None, {}, {"prefill_instances": 0})
    records: list[Record] = []
    async with LocalCluster.running(config) as cluster:
        todo = iter(work)

        async def worker() -> None:
            for job in todo:
                params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens)
                request = Request(
                    id=cluster.frontend.new_request_id(),
                    prompt=tuple(job.prompt),
                    sampling=params,
                    reply_to=cluster.frontend.address,
                )
                record = Record(sent_at=time.perf_counter())
                async for _ in cluster.frontend.generate(request):
                    record.tokens_at.append(time.perf_counter())
                records.append(record)

        await asyncio.gather(*(worker() for _ in range(STREAMS)))
    return records


@contextlib.contextmanager
def server(*args: str) -> Generator[str]:
    port = free_port()
    command = [sys.executable, "-m", "baton.cli", "serve", "--port", str(port), *args]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                    break
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


async def over_http(url: str, work: Sequence[BenchRequest]) -> list[Record]:
    client = Client(url, "baton-embedded", "", 120, {"temperature": 0, "ignore_eos": True}, chat=False)
    try:
        return await closed_loop(client, work, STREAMS, lambda _: None)
    finally:
        await client.close()


def figures(records: Sequence[Record]) -> dict[str, float]:
    good = [record for record in records if not record.error]
    assert len(good) == len(records), [record.error for record in records if record.error]
    ttft, itl = (
        percentiles([ttft_s(r) * 1e3 for r in good]),
        percentiles([g * 1e3 for r in good for g in gaps_s(r)]),
    )
    return {
        "ttft_p50_ms": ttft["p50"],
        "ttft_p99_ms": ttft["p99"],
        "itl_p50_ms": itl["p50"],
        "itl_p99_ms": itl["p99"],
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    num_rounds, *sizes = (1, STREAMS, 4) if args.smoke else (args.rounds, REQUESTS, OUTPUT_TOKENS)
    rounds: dict[str, list[dict[str, float]]] = {"engine": [], "local": [], "ray": []}
    with server("--local", "--prefill", "0") as local, server("--prefill", "0", "--decode", "1") as ray:
        for number in range(num_rounds + 1):  # the first warms up
            work = jobs(number, *sizes)
            results = {
                "engine": figures(asyncio.run(direct(work))),
                "local": figures(asyncio.run(over_http(local, work))),
                "ray": figures(asyncio.run(over_http(ray, work))),
            }
            for name, result in results.items():
                if number:
                    rounds[name].append(result)
                print(number, name, {key: round(value, 2) for key, value in result.items()}, flush=True)
    report(rounds, args.json)


def report(rounds: dict[str, list[dict[str, float]]], path: Path | None) -> None:
    medians = {
        name: {key: statistics.median(r[key] for r in runs) for key in runs[0]}
        for name, runs in rounds.items()
    }
    added: dict[str, Any] = {
        name: {key: medians[name][key] - medians["engine"][key] for key in medians["engine"]}
        for name in ("local", "ray")
    }
    for name, values in medians.items():
        print(f"{name:8s} " + "  ".join(f"{key} {value:8.2f}" for key, value in values.items()))
    for name, values in added.items():
        print(f"{name:8s} adds " + "  ".join(f"{key} {value:+.2f}" for key, value in values.items()))
    content = {"streams": STREAMS, "medians": medians, "added_to_engine": added, "rounds": rounds}
    write(path, "benchmarks.serving.serving_overhead", content)


if __name__ == "__main__":
    main()

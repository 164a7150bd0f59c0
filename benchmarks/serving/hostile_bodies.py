"""TTFT of a tenant beside another tenant that sends hostile bodies, relative to TTFT alone.

    python -m benchmarks.serving.hostile_bodies [--json FILE] [--requests 400] [--rounds 3]

`baton serve` over Ray, with one instance and one ingress. One client asks for one token at a time. Meanwhile eight connections of
another tenant send bodies that cost an ingress as much as its limits allow, and that it rejects. Each round measures every kind
of body right after an undisturbed part, so that both see the same machine. The wanted ratio is at most 1.5 at the 99th
percentile."""

import contextlib
import http.client
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report import parser, write
from benchmarks.serving.serving_overhead import server

PREDICTION = (
    "between 1.2 and 2 times at p99: each wait for Python's lock takes up to 0.2 ms, and a request "
    "waits for it some ten times"
)
MODEL, CONNECTIONS, REQUESTS, ROUNDS = "baton-embedded", 8, 400, 3
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
CONFIG: dict[str, Any] = {
    "prefill_instances": 0,
    "decode_instances": 1,
    "tenants": {"calm": {"keys": ["calm"]}, "hostile": {"keys": ["hostile"]}},
}
HELLO = [{"role": "user", "content": "hello"}]


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": HELLO, **more}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "16,000 messages": chat(messages=HELLO * 16_000),
    "32,000 parts": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 32_000}]),
    "100,000 prompts": ("/v1/completions", {"prompt": ["x"] * 100_000}),
    "600,000 integers": ("/v1/completions", {"prompt": [1] * 600_000}),
    "600,000 fractions": chat(bad_words=[1.5] * 600_000),
    "a text of 3 MiB": ("/v1/completions", {"prompt": "hello world, " * 250_000}),
    "a chat of 1 MiB": chat(messages=[{"role": "user", "content": "hello world, " * 80_000}]),
    "500 tools": chat(
        tools=[
            {
                "type": "function",
                "function": {
                    "name": f"f{number}",
                    "parameters": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20)}},
                },
            }
            for number in range(500)
        ],
        tool_choice="required",
    ),
    "costly grammars": chat(structured_outputs={"regex": "(a?NUMBER){9000}b"}),
}  # fmt: skip


def hostile(port: int, kind: str) -> None:
    """Send bodies of a kind for ever, one after the other."""
    path, body = KINDS[kind]
    text = json.dumps({"model": MODEL, "max_tokens": 1, **body})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for number in count():
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, text.replace("NUMBER", str(number)), headers("hostile"))
            answer = connection.getresponse()
            answer.read()
            if answer.status < 400:
                os._exit(1)
            continue
        connection.close()


def headers(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}", "Content-Type": "application/json"}


def calm(port: int, num_requests: int) -> list[float]:
    """Return the time of each of so many requests for one token, in ms."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times: list[float] = []
    for number in range(num_requests):
        body = {"model": MODEL, "prompt": f"{number}: {PROMPT}", "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), headers("calm"))
        answer = connection.getresponse()
        said = answer.read()
        assert answer.status == 200, said
        times.append(1e3 * (time.perf_counter() - began))
    connection.close()
    return times


@contextlib.contextmanager
def beside(port: int, kind: str) -> Generator[None]:
    """Send hostile bodies meanwhile."""
    process = multiprocessing.get_context("spawn").Process(target=many_hostile, args=(port, kind))
    process.start()
    time.sleep(2)
    try:
        yield
        assert process.is_alive(), f"{kind}: an answer cost more than an ingress"
    finally:
        process.kill()
        process.join()
        time.sleep(1)


def many_hostile(port: int, kind: str) -> None:
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        for done in [threads.submit(hostile, port, kind) for _ in range(CONNECTIONS)]:
            done.result()


def p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


def measure(port: int, kinds: list[str], num_requests: int, rounds: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    calm(port, 2 * num_requests)  # a server that has just started is slower
    for number in range(rounds):
        for kind in kinds:
            alone = calm(port, num_requests)
            with beside(port, kind):
                disturbed = calm(port, num_requests)
            row = {"round": number, "kind": kind}
            figures: tuple[tuple[str, Callable[[list[float]], float]], ...] = (
                ("p50", statistics.median),
                ("p99", p99),
            )
            for name, figure in figures:
                row |= {f"alone_{name}_ms": figure(alone), f"{name}_ms": figure(disturbed)}
                row[f"{name}_ratio"] = figure(disturbed) / figure(alone)
            found.append(row)
            print(
                f"{number} {kind:20} p50 {row['alone_p50_ms']:6.1f} -> {row['p50_ms']:6.1f} ms   "
                f"p99 {row['alone_p99_ms']:6.1f} -> {row['p99_ms']:6.1f} ms = {row['p99_ratio']:.2f}",
                flush=True,
            )
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=REQUESTS)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--kind", action="append", choices=KINDS)
    args = options.parse_args()
    kinds: list[str] = args.kind or [*KINDS][: 2 if args.smoke else None]
    num_requests, rounds = (10, 1) if args.smoke else (args.requests, args.rounds)
    where = ["--local"] if args.smoke else []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        with server("--config", str(config), *where) as url:
            rows = measure(int(url.rpartition(":")[2]), kinds, num_requests, rounds)
    medians = {kind: statistics.median(r["p99_ratio"] for r in rows if r["kind"] == kind) for kind in kinds}
    print("\n".join(f"{kind:20} p99 / p99 alone {ratio:5.2f}" for kind, ratio in medians.items()))
    content = {"prediction": PREDICTION, "p99_ratio": medians, "worst": max(medians.values()), "rows": rows}
    write(args.json, "benchmarks.serving.hostile_bodies", content)


if __name__ == "__main__":
    main()

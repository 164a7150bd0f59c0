"""TTFT of a tenant beside another tenant that sends hostile bodies, relative to TTFT alone.

    python -m benchmarks.serving.hostile_bodies [--json FILE] [--requests 400] [--rounds 2]

`baton serve` over Ray, with one instance and one ingress. One client asks for one token at a time, of prompts of 240 tokens: of
new ones, which are computed, and then of one that is in the prefix cache. Meanwhile eight connections of
another tenant send bodies that cost an ingress as much as its limits allow, and that it rejects. Each round measures every kind
of body right after an undisturbed part, so that both see the same machine. The wanted ratio is at most 1.5 at the 99th
percentile.

The hostile client computes on the same machine. `elsewhere` is therefore the time beside as many of the same bodies a second
that go to a process which only reads them."""

import contextlib
import http.client
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
MODEL, CONNECTIONS, REQUESTS, ROUNDS = "baton-embedded", 8, 400, 2
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
CONFIG: dict[str, Any] = {
    "prefill_instances": 0,
    "decode_instances": 1,
    "tenants": {"calm": {"keys": ["calm"]}, "hostile": {"keys": ["hostile"]}},
}
NUMBERS = count()
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
    "costly grammars": chat(
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "NUMBER",
                "schema": {"title": "NUMBER", "anyOf": [{"properties": {f"k{n}": {"type": "integer"}}} for n in range(2500)]},
            },
        },
    ),
}  # fmt: skip


class Reader(BaseHTTPRequestHandler):
    """Reads bodies, and refuses them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        left = int(self.headers["Content-Length"])
        while left:
            left -= len(self.rfile.read(min(left, 1 << 16)))
        self.send_response(400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def hostile(port: int, kind: str, per_s: float, answers: Any, ready: Any) -> None:
    """Send bodies of one kind until killed, at most `per_s` a second, and count the answers."""
    path, body = KINDS[kind]
    text = json.dumps({"model": MODEL, "max_tokens": 1, **body})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    ready.wait()
    began = time.perf_counter()
    for number in count():
        time.sleep(max(0.0, began + number / per_s - time.perf_counter()))
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, text.replace("NUMBER", str(number)), headers("hostile"))
            answer = connection.getresponse()
            answer.read()
            if answer.status < 400:
                os._exit(1)
            with answers.get_lock():
                answers.value += 1
            continue
        connection.close()


def headers(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}", "Content-Type": "application/json"}


def calm(port: int, num_requests: int, *, new: bool) -> list[float]:
    """Ask for one token `num_requests` times, and return how long each took, in ms. `new`: each prompt is another one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times: list[float] = []
    for _ in range(num_requests):
        prompt = f"{next(NUMBERS)}: {PROMPT}" if new else PROMPT
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), headers("calm"))
        answer = connection.getresponse()
        said = answer.read()
        assert answer.status == 200, said
        times.append(1e3 * (time.perf_counter() - began))
    connection.close()
    return times


@contextlib.contextmanager
def reader() -> Generator[int]:
    """Return the port of a process that only reads bodies."""
    spawn = multiprocessing.get_context("spawn")
    port = spawn.Value("i", 0)
    process = spawn.Process(target=read_bodies, args=(port,))
    process.start()
    try:
        while not port.value and process.is_alive():
            time.sleep(0.01)
        yield port.value
    finally:
        process.kill()
        process.join()


def read_bodies(port: Any) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Reader) as server_of:
        port.value = server_of.server_port
        server_of.serve_forever()


@contextlib.contextmanager
def beside(port: int, kind: str, per_s: float = float("inf")) -> Generator[Any]:
    """Send hostile bodies meanwhile. Their answers are counted."""
    spawn = multiprocessing.get_context("spawn")
    answers, ready = spawn.Value("q", 0), spawn.Barrier(CONNECTIONS + 1)
    process = spawn.Process(target=many_hostile, args=(port, kind, per_s, answers, ready))
    process.start()
    try:
        ready.wait(60)
        time.sleep(1)
        yield answers
        assert process.is_alive(), f"{kind}: an answer cost more than an ingress"
    finally:
        process.kill()
        process.join()
        time.sleep(1)


def many_hostile(port: int, kind: str, per_s: float, answers: Any, ready: Any) -> None:
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        args = port, kind, per_s / CONNECTIONS, answers, ready
        for done in [threads.submit(hostile, *args) for _ in range(CONNECTIONS)]:
            done.result()


def p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


def measure(port: int, elsewhere: int, kind: str, num_requests: int, *, new: bool) -> dict[str, Any]:
    """`elsewhere` is the port of what only reads bodies."""
    times = {"alone": calm(port, num_requests, new=new)}
    with beside(port, kind) as answers:
        before, began = answers.value, time.perf_counter()
        times["beside"] = calm(port, num_requests, new=new)
        per_s = (answers.value - before) / (time.perf_counter() - began)
    with beside(elsewhere, kind, max(per_s, 0.1)):
        times["elsewhere"] = calm(port, num_requests, new=new)
    row: dict[str, Any] = {"kind": kind, "prompts": "new" if new else "cached", "bodies_per_s": per_s}
    for name, each in times.items():
        row |= {f"{name}_p50_ms": statistics.median(each), f"{name}_p99_ms": p99(each)}
    row["p99_ratio"] = row["beside_p99_ms"] / row["alone_p99_ms"]
    row["p99_ratio_elsewhere"] = row["elsewhere_p99_ms"] / row["alone_p99_ms"]
    print(
        f"{row['prompts']:6} {kind:18} {per_s:5.1f} bodies/s   p99 alone {row['alone_p99_ms']:5.1f} ms   beside "
        f"{row['beside_p99_ms']:5.1f} = {row['p99_ratio']:.2f}   elsewhere "
        f"{row['elsewhere_p99_ms']:5.1f} = {row['p99_ratio_elsewhere']:.2f}",
        flush=True,
    )
    return row


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
        with reader() as elsewhere, server("--config", str(config), *where) as url:
            port = int(url.rpartition(":")[2])
            calm(port, num_requests, new=True)  # a server that has just started is slower
            rows = [
                measure(port, elsewhere, kind, num_requests, new=new) | {"round": number}
                for number in range(rounds)
                for new in (True, False)
                for kind in kinds
            ]

    def medians(name: str, prompts: str) -> dict[str, float]:
        mine = [row for row in rows if row["prompts"] == prompts]
        return {kind: statistics.median(row[name] for row in mine if row["kind"] == kind) for kind in kinds}

    ratios = {
        f"{name} ({prompts} prompts)": medians(name, prompts)
        for prompts in ("new", "cached")
        for name in ("p99_ratio", "p99_ratio_elsewhere")
    }
    for name, each in ratios.items():
        print(f"{name}: " + ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in each.items()))
    worst = {prompts: max(medians("p99_ratio", prompts).values()) for prompts in ("new", "cached")}
    content = {"prediction": PREDICTION, "worst": worst, **ratios, "rows": rows}
    write(args.json, "benchmarks.serving.hostile_bodies", content)


if __name__ == "__main__":
    main()

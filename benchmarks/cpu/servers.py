"""Baton's server beside its peers' on a CPU, at 16 streams of 128 tokens in and 64 out.

    python -m benchmarks.cpu.servers [--json FILE] [--environments build/cpu-peers] [--checkpoints build/cpu-checkpoints]
        [--shape 0.5b] [--threads 2] [--bits 16,8,4] [--servers baton-local,baton-ray,vllm] [--rounds 2] [--smoke]

Each server runs alone, on as many processors as there are threads, and the servers take turns. A round is 32 requests to
`/v1/completions`, 16 at a time, streamed; the first of each start is not counted. The best round counts, and FILE is written
after each. `baton-ray` is one instance behind Ray Serve, in processes of its own. OpenVINO, llama.cpp and CTranslate2 are left
out, since no server of theirs is to be had from the registries that the environments are made from, and transformers, whose
server takes no prompts of tokens. The checkpoints are those of `benchmarks.cpu.run`, which makes what is missing with
`--rounds 0`."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import psutil

from baton.bench.bench_workload import BenchRequest, synthetic
from baton.bench.client import Client, closed_loop
from baton.bench.measure import gaps_s, percentiles, ttft_s
from benchmarks.cpu.install import python_of
from benchmarks.cpu.peers.baton import QUANTIZATION
from benchmarks.cpu.peers.transformers import fast_dtype
from benchmarks.cpu.shapes import SHAPES, make_checkpoint
from benchmarks.report import parser, write
from tests.ports import free_port

PREDICTION = (
    "Baton in one process makes 1.3 times as many tokens a second as vLLM in 16 bits and 1.5 times in 8; over Ray 0.95 times as "
    "many as in one process; its first token takes as long as vLLM's"
)
STREAMS, REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 16, 32, 128, 64
SERVERS = ("baton-local", "baton-ray", "vllm")
NAME = "measured"
_START_S = 900.0
Figures = dict[str, float]
Rows = list[dict[str, Any]]


class NoServer(Exception):
    """It could not be started; the text says why."""


def command_of(server: str, folder: Path, bits: int, threads: int, environments: Path) -> list[str]:
    """Raises NoServer."""
    if server != "vllm":
        way = ["--local"] if server == "baton-local" else []
        settings = [
            f"model.quantization={QUANTIZATION[bits]}",
            f"engine.num_threads={threads}",
            f"model.name={NAME}",
        ]
        sets = [word for setting in settings for word in ("--set", setting)]
        return [
            sys.executable,
            "-m",
            "baton.cli",
            "serve",
            *way,
            "--model",
            str(folder),
            "--prefill",
            "0",
            *sets,
        ]
    python = python_of(environments, server)
    if python is None:
        raise NoServer("not installed")
    dtype = str(fast_dtype()).removeprefix("torch.")
    own = folder if bits == 16 else folder.parent / f"vllm-{bits}"
    options = ("--model", str(own), "--served-model-name", NAME, "--dtype", dtype, "--max-model-len", "4096")
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", *options]


@contextlib.contextmanager
def started(
    command: list[str], threads: int, health: str, log: Path
) -> Generator[tuple[str, psutil.Process]]:
    """Yield its URL and its first process. Raises NoServer."""
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    pinned = ["taskset", "-c", f"{cores[0]}-{cores[-1]}", *command, "--port", str(port)]
    with log.open("wb") as said:
        process = subprocess.Popen(pinned, stdout=said, stderr=said, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url + health, log)
        yield url, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    lines = log.read_text(errors="replace").strip().splitlines()
    raise NoServer(lines[-1] if lines else "it does not start")


async def streams(url: str, work: list[BenchRequest], root: psutil.Process) -> Figures:
    """Tokens a second over the whole round, on the wall and of all the server's processors; milliseconds."""
    client = Client(url, NAME, "", 600, {"temperature": 0, "ignore_eos": True}, chat=False)
    before, start = _cpu_s(root), time.perf_counter()
    try:
        records = await closed_loop(client, work, STREAMS, lambda _: None)
    finally:
        await client.close()
    wall_s, cpu_s = time.perf_counter() - start, _cpu_s(root) - before
    if failed := [record.error for record in records if record.error]:
        raise NoServer(f"{len(failed)} requests failed: {failed[0]}")
    tokens = sum(record.output_tokens for record in records)
    ttft = percentiles([1e3 * ttft_s(record) for record in records])
    itl = percentiles([1e3 * gap for record in records for gap in gaps_s(record)])
    return {
        "tokens_per_s": tokens / wall_s,
        "tokens_per_cpu_s": tokens / max(cpu_s, 1e-9),
        "ttft_p50_ms": ttft["p50"],
        "ttft_p99_ms": ttft["p99"],
        "itl_p50_ms": itl["p50"],
        "itl_p99_ms": itl["p99"],
    }


def _family(root: psutil.Process) -> list[psutil.Process]:
    return [root, *root.children(recursive=True)]


def _cpu_s(root: psutil.Process) -> float:
    total = 0.0
    for process in _family(root):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _memory_mb(root: psutil.Process) -> float:
    """What all its processes have to themselves, and their share of what they share."""
    total = 0
    for process in _family(root):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total / 1e6


def measure(server: str, args: Any, folder: Path, bits: int, number: int) -> Figures:
    """One start, one round that warms up, and one that counts. Raises NoServer."""
    count, input_tokens, output_tokens = (2, 8, 4) if args.smoke else (REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS)
    command = command_of(server, folder, bits, args.threads, args.environments)
    health = "/health" if server == "vllm" else "/ready"
    vocabulary = 4000
    with started(command, args.threads, health, folder.parent / f"{server}.log") as (url, root):
        warm, work = (
            synthetic(many, input_tokens, output_tokens, 0.0, vocab_size=vocabulary, seed=2 * number + part)
            for part, many in enumerate((min(count, STREAMS), count))
        )
        asyncio.run(streams(url, warm, root))
        found = asyncio.run(streams(url, work, root))
        return found | {"memory_mb": _memory_mb(root)}


def add(rows: Rows, key: dict[str, Any], now: Figures) -> None:
    """The best of all rounds stays, at the end of `rows`."""
    before = next((row for row in rows if key.items() <= row.items()), None)
    if before is not None:
        rows.remove(before)
        now = {name: (max if "tokens" in name else min)(value, before[name]) for name, value in now.items()}
    rows.append(key | now)


def run(args: Any, checkpoints: Path, save: Callable[[Rows, Rows], None]) -> Rows:
    """Rows of figures. `save` takes them after each start, and those of what was left out."""
    folder = checkpoints / ("tiny" if args.smoke else args.shape) / "plain"
    if not folder.exists():
        make_checkpoint(SHAPES[folder.parent.name], folder)
    bits_wanted = [16] if args.smoke else [int(each) for each in args.bits.split(",")]
    servers = ["baton-local"] if args.smoke else args.servers.split(",")
    rows: Rows = []
    left_out: Rows = []
    for number in range(1 if args.smoke else args.rounds):
        for bits, server in itertools.product(bits_wanted, servers):
            key = {"bits": bits, "server": server}
            if any(key.items() <= row.items() for row in left_out):
                continue
            try:
                add(rows, key, measure(server, args, folder, bits, number))
                said = rows[-1]
            except NoServer as reason:
                left_out.append(said := key | {"reason": str(reason)})
            print(said, flush=True)
            save(rows, left_out)
    return rows


def show(rows: Rows) -> None:
    print(
        "\n| bits | server | tokens/s | Baton's by it | tokens/CPU-s | TTFT p50, p99 ms | ITL p50, p99 ms | MB |"
    )
    print("|---" * 8 + "|")
    own = {row["bits"]: row["tokens_per_s"] for row in rows if row["server"] == "baton-local"}
    for row in rows:
        ratio = f"{own[row['bits']] / row['tokens_per_s']:.2f}" if row["bits"] in own else ""
        print(
            f"| {row['bits']} | {row['server']} | {row['tokens_per_s']:.1f} | {ratio} | {row['tokens_per_cpu_s']:.1f} "
            f"| {row['ttft_p50_ms']:,.0f}, {row['ttft_p99_ms']:,.0f} | {row['itl_p50_ms']:.0f}, {row['itl_p99_ms']:.0f} "
            f"| {row['memory_mb']:,.0f} |"
        )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--environments", type=Path, default=Path("build/cpu-peers"))
    options.add_argument("--checkpoints", type=Path, default=Path("build/cpu-checkpoints"))
    options.add_argument("--shape", choices=[*SHAPES], default="0.5b")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--bits", default="16,8,4")
    options.add_argument("--servers", default=",".join(SERVERS))
    options.add_argument("--rounds", type=int, default=2)
    args = options.parse_args()

    def save(rows: Rows, left_out: Rows) -> None:
        found = {"servers": rows, "left_out": left_out}
        setting = {"prediction": PREDICTION, "shape": args.shape, "threads": args.threads}
        write(args.json, f"benchmarks.cpu.servers --threads {args.threads}", setting | found)

    with tempfile.TemporaryDirectory() as temporary:
        rows = run(args, Path(temporary) if args.smoke else args.checkpoints, save)
    show(sorted(rows, key=lambda row: -row["bits"]))


if __name__ == "__main__":
    main()

"""A cluster of real processes under load, one of which is killed, stopped or restarted every few seconds.

    python -m benchmarks.serving.soak --minutes 10 --json benchmarks/results/soak.json

The device is the chaos tests' witness: the next token is a hash of every KV byte of the sequence, so each token checks the whole
cache. Expected: no failed request, no wrong token, and at the end no block, grant, segment or request held anywhere."""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.report import parser, write
from tests.chaos.witness import SHARD
from tests.chaos.world import Stream, World

_EVENTS = (
    "kill prefill0", "kill prefill1", "kill decode0", "kill decode1", "kill scheduler",
    "stop prefill0", "stop prefill1", "stop decode0", "stop decode1", "stop scheduler",
    "restart prefill0", "restart decode0", "drain decode1",
)  # fmt: skip
_STOP_S = 1.6
_NUM_SHARED = 40
"""Prefixes that half of the prompts begin with: more than the small pools of --tiers hold."""
_STREAM_S = 120.0


class Soak:
    def __init__(self, world: World, num_streams: int, every_s: float, seed: int) -> None:
        self.world, self.num_streams, self.every_s = world, num_streams, every_s
        self.rng = random.Random(seed)
        self.shared = [world.fresh_prompt(40) for _ in range(_NUM_SHARED)]
        self.events: Counter[str] = Counter()
        self.num_requests = self.num_tokens = 0
        self.failed: list[str] = []
        self.wrong: list[str] = []
        self.longest_gaps_s: list[float] = []

    async def run(self, duration_s: float, progress: Progress) -> None:
        bar = progress.add_task("soak", total=duration_s)
        until = time.monotonic() + duration_s
        clients = [asyncio.create_task(self._client(i, until)) for i in range(self.num_streams)]
        while (now := time.monotonic()) < until:
            progress.update(bar, completed=duration_s - (until - now), description=self.describe())
            await asyncio.sleep(self.every_s)
            await self._disturb(self.rng.choice(_EVENTS))
        await asyncio.gather(*clients)
        await self.world.settled()

    def describe(self) -> str:
        faults = sum(self.events.values())
        return f"{self.num_requests} requests, {len(self.failed)} failed, {len(self.wrong)} wrong, {faults} faults"

    async def _client(self, number: int, until: float) -> None:
        while time.monotonic() < until:
            prompt = self.world.fresh_prompt(self.rng.randrange(8, 60))
            if self.rng.random() < 0.5:
                prompt = self.rng.choice(self.shared) + prompt[:20]
            name = self.world.generate(f"frontend{number % 2}", prompt, self.rng.randrange(10, 60))
            stream = self.world.streams[name]
            try:
                async with asyncio.timeout(_STREAM_S):
                    await stream.done.wait()
            except TimeoutError:
                stream.error = f"no end within {_STREAM_S:g} s"
            self._judge(stream)
            del self.world.streams[name]

    def _judge(self, stream: Stream) -> None:
        self.num_requests += 1
        self.num_tokens += len(stream.tokens)
        if stream.error:
            self.failed.append(stream.error)
        elif tuple(stream.tokens) != stream.expected:
            self.wrong.append(f"{len(stream.prompt)} + {stream.max_tokens} tokens")
        if stream.gaps_s:
            self.longest_gaps_s.append(max(stream.gaps_s))

    async def _disturb(self, event: str) -> None:
        kind, _, name = event.partition(" ")
        self.events[kind] += 1
        match kind:
            case "kill":
                await self.world.kill(name)
                await self.world.start(name)
            case "restart":
                await self.world.start(name, await self.world.kill(name))
            case "stop":
                self.world.freeze(name)
                await asyncio.sleep(_STOP_S)
                self.world.thaw(name)
            case _:
                self.world.nodes[name].do(do="drain")
                await self.world.nodes[name].wait_for("drained", 60.0)
                await self.world.kill(name)
                await self.world.start(name)


def report(soak: Soak, seconds: float, held: dict[str, Any], leaked: list[str]) -> dict[str, Any]:
    gaps = sorted(soak.longest_gaps_s)
    return {
        "seconds": round(seconds),
        "streams": soak.num_streams,
        "faults": dict(soak.events),
        "requests": soak.num_requests,
        "tokens": soak.num_tokens,
        "failed_requests": len(soak.failed),
        "wrong_tokens": len(soak.wrong),
        "held_at_the_end": held,
        "segments_of_dead_processes": len(leaked),
        "longest_pause_of_a_request_s": {
            "p50": round(statistics.median(gaps), 3),
            "p99": round(gaps[int(len(gaps) * 0.99)], 3),
            "max": round(gaps[-1], 3),
        },
        "failures": soak.failed[:20] + soak.wrong[:20],
    }


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        overrides: dict[str, Any] = {
            "engine.num_blocks": 500 if args.tiers else 1200,
            "engine.max_batch_tokens": 64,
            "transfer.transport": args.transport,
        }
        if args.tiers:
            overrides |= {
                "engine.host_cache_bytes": 100 * SHARD.pool_bytes(1),
                "engine.disk_cache_bytes": 16 << 20,
                "engine.disk_cache_path": f"{folder}/disk",
            }
        async with World(Path(folder), overrides) as world:
            run = Soak(world, args.streams, args.every, args.seed)
            columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
            started = time.monotonic()
            with Progress(*columns) as progress:
                await run.run(args.minutes * 60, progress)
            seconds = time.monotonic() - started
            held = {name: (await node.status())["held"] for name, node in world.nodes.items()}
            return report(run, seconds, held, world.segments_left())


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--streams", type=int, default=32)
    options.add_argument("--every", type=float, default=3.0, help="seconds between two faults")
    options.add_argument("--transport", default="auto", choices=["auto", "shm", "tcp"])
    options.add_argument("--tiers", action="store_true", help="small pools over host memory and disk")
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    if args.smoke:
        args.minutes, args.streams, args.every = 0.05, 4, 1.0
    result = asyncio.run(soak(args))
    print(json.dumps(result, indent=1))
    flags = f" --minutes {args.minutes:g} --seed {args.seed} --transport {args.transport}"
    write(args.json, f"benchmarks.serving.soak{flags}{' --tiers' if args.tiers else ''}", result)
    # A busy machine refuses requests, which is no mistake that a smoke run looks for.
    failed = result["failed_requests"] and not args.smoke
    sys.exit(1 if failed or result["wrong_tokens"] else 0)


if __name__ == "__main__":
    main()

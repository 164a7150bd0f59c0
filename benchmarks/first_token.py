"""One cold start of one rank, up to its first token: `python -m benchmarks.first_token FOLDER STARTED_AT [--through-floats]`.

It prints seconds by phase, and bytes, as JSON. STARTED_AT is `time.perf_counter` of whoever has started the process: all
processes of a host have one. With --through-floats matrices of 16 bits become floats of 32 bits before they are packed."""

import asyncio
import json
import mmap
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from core.clock import WallClock
from core.config import EngineConfig, ModelConfig
from core.types import Request, SamplingParams, TokenOut
from decode.headroom_policy import HeadroomPolicy
from engine.execution.build_group import build_group
from engine.execution.pool_size import size_pool
from engine.loop import Engine
from engine.planning.dp_scheduler import make_planner
from kernels.cpu.library import native
from kernels.ops import Ops
from kernels.torch.prepacked import prepacked_ops

PROMPT = tuple(range(1, 129))


class Phases:
    def __init__(self, started_at: float) -> None:
        self.seconds: dict[str, float] = {}
        self.processor_s: dict[str, float] = {}
        self._since, self._used_s = started_at, 0.0

    def end(self, name: str) -> None:
        now, used_s = time.perf_counter(), time.process_time()
        self.seconds[name], self.processor_s[name] = now - self._since, used_s - self._used_s
        self._since, self._used_s = now, used_s

    def split(self, name: str, part: str, seconds: float, processor_s: float) -> None:
        """So much of the phase `name` was another one."""
        for each, own in ((self.seconds, seconds), (self.processor_s, processor_s)):
            each[name] -= own
            each[part] = own


class Packing:
    """Knows how long matrices are packed, while operations are made by it."""

    def __init__(self, through_floats: bool) -> None:
        self.seconds = self.processor_s = 0.0
        self._through_floats = through_floats

    def ops(self, weights: Any) -> Ops:
        ops = prepacked_ops(weights)
        keeps = ops.keeps - {"half"} if self._through_floats else ops.keeps
        return replace(ops, pack=partial(self._timed, ops.pack), keeps=keeps)

    def _timed(self, pack: Callable[..., Any], *args: Any) -> Any:
        started, used_s = time.perf_counter(), time.process_time()
        packed = pack(*args)
        self.seconds += time.perf_counter() - started
        self.processor_s += time.process_time() - used_s
        return packed


class First:
    """Hears of the first token."""

    def __init__(self) -> None:
        self.there = asyncio.Event()

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        del tokens
        self.there.set()

    def on_stuck(self, keys: list[str]) -> None: ...
    def on_taken_back(self, paused: list[str], lost: list[str]) -> None: ...

    def on_error(self, error: BaseException) -> None:
        raise error


async def first_token(engine: Engine) -> None:
    first = First()
    running = asyncio.create_task(engine.run(first))
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    engine.add(Request(id="r", prompt=PROMPT, sampling=sampling, reply_to="b"))
    await first.there.wait()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await engine.close()


def start(folder: Path, phases: Phases, through_floats: bool) -> None:
    native()
    phases.end("native kernels")
    config, model = EngineConfig(num_threads=1, kv_bytes=64 << 20, device="cpu"), ModelConfig()
    size = size_pool(folder, model, config)
    memory = memoryview(mmap.mmap(-1, size.num_bytes))
    phases.end("sizes")
    packing = Packing(through_floats)
    with patch("kernels.select.prepacked_ops", packing.ops):
        group = build_group(folder, model, config, size, memory, None)
    phases.end("reading")
    phases.split("reading", "packing", packing.seconds, packing.processor_s)
    planner = make_planner(config, size.num_blocks, size.max_context_tokens, HeadroomPolicy(), 1)
    asyncio.run(first_token(Engine(planner, group, WallClock())))
    phases.end("first token")


def resident(name: str) -> int:
    """Bytes of this process, by a line of its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    folder, started_at, *rest = sys.argv[1:]
    phases = Phases(float(started_at))
    phases.end("process and imports")
    start(Path(folder), phases, rest == ["--through-floats"])
    content = {
        "seconds": phases.seconds,
        "processor_s": phases.processor_s,
        "most_resident_bytes": resident("VmHWM"),
        "own_bytes": resident("RssAnon"),
    }
    print(json.dumps(content))


if __name__ == "__main__":
    main()

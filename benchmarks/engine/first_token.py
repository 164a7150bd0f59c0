"""One cold start of one rank, up to its first token: `python -m benchmarks.engine.first_token FOLDER STARTED_AT
[--through-floats]`.

It prints seconds by phase, and bytes, as JSON. The phases are those that an instance times itself, and the first token.
STARTED_AT is `time.perf_counter` of whoever has started the process: all processes of a host have one. With --through-floats
matrices of 16 bits become floats of 32 bits before they are packed."""

import asyncio
import json
import mmap
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from core.clock import WallClock
from core.config.cluster_config import EngineConfig, ModelConfig
from core.plan import FailedSeq
from core.start_timer import StartTimer
from core.types import Request, SamplingParams, TokenOut
from decode.headroom_policy import HeadroomPolicy
from engine.execution.build_group import build_group
from engine.loop import Engine
from engine.planning.dp_scheduler import make_planner
from engine.sizing.pool_size import size_pool
from kernels.cpu.library import native
from kernels.cpu.prepacked import WeightFormat, prepacked_ops
from kernels.ops import Ops

PROMPT = tuple(range(1, 129))


class Phases(StartTimer):
    """Knows what each phase takes of the processor, too: others weigh less on that."""

    def __init__(self, started_at: float) -> None:
        super().__init__("imports", since=started_at)
        self.processor = StartTimer("imports", time.process_time, 0.0)

    def begin(self, phase: str) -> None:
        super().begin(phase)
        self.processor.begin(phase)


def through_floats(weights: WeightFormat) -> Ops:
    """Operations that make floats of 32 bits of matrices of 16 before they pack them."""
    ops = prepacked_ops(weights)
    return replace(ops, keeps=ops.keeps - {"half"})


class First:
    """Hears of the first token."""

    def __init__(self) -> None:
        self.there = asyncio.Event()

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        del tokens
        self.there.set()

    def on_stuck(self, keys: list[str]) -> None: ...
    def on_taken_back(self, paused: list[str], lost: list[str]) -> None: ...
    def on_failed(self, failed: Sequence[FailedSeq]) -> None: ...

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


def start(folder: Path, phases: Phases) -> None:
    phases.begin("kernels")
    native()
    phases.begin("sizes")
    config, model = EngineConfig(num_threads=1, kv_bytes=64 << 20, device="cpu"), ModelConfig()
    size = size_pool(folder, model, config)
    memory = memoryview(mmap.mmap(-1, size.num_bytes))
    group = build_group(folder, model, config, size, memory, None, timer=phases)
    planner = make_planner(config, size.num_blocks, size.max_context_tokens, HeadroomPolicy(), 1)
    phases.begin("first token")
    asyncio.run(first_token(Engine(planner, group, WallClock())))


def resident(name: str) -> int:
    """Bytes of this process, by a line of its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    folder, started_at, *rest = sys.argv[1:]
    phases = Phases(float(started_at))
    with patch("kernels.select.prepacked_ops", through_floats) if rest else nullcontext():
        start(Path(folder), phases)
    content = {
        "seconds": dict(phases.times().phases),
        "processor_s": dict(phases.processor.times().phases),
        "most_resident_bytes": resident("VmHWM"),
        "own_bytes": resident("RssAnon"),
    }
    print(json.dumps(content))


if __name__ == "__main__":
    main()

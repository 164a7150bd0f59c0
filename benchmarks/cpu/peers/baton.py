"""Baton in one process: scheduler, instance and frontend, as `baton.LLM` runs them."""

import asyncio
import os
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.cpu.peers import SLACK, Loaded, Stamp, now
from cluster.local import LocalCluster
from core.config.cluster_config import load as load_config
from core.types import Request, SamplingParams, Slo
from kernels.cpu.library import fastest_of_bfloat16, fastest_of_bytes

QUANTIZATION = {16: "none", 8: "int8", 4: "int4"}
FORMATS = {16: "16-bit matrices", 8: "int8", 4: "int4"}


def load(checkpoint: Path, target: Path, bits: int, threads: int) -> Loaded:
    engine = Engine(checkpoint, QUANTIZATION[bits], threads)
    isa = fastest_of_bfloat16() if bits == 16 else fastest_of_bytes()
    name = "PyTorch's" if isa is None else isa.name.lower()
    return Loaded(engine, FORMATS[bits], version("baton-serve"), name)


class Engine:
    def __init__(self, checkpoint: Path, quantization: str, threads: int) -> None:
        config = load_config(
            {
                "prefill_instances": 0,
                "model": {
                    "path": str(checkpoint),
                    "quantization": quantization,
                    "packed_cache": os.environ.get("BATON_PACKED_CACHE", "auto"),
                },
                "engine": {"num_threads": threads, "device": "cpu"},
                # This process is stopped while others take their turns.
                "mail": {"peer_timeout_s": 1e6},
                "serve": {"request_timeout_s": 1e6},
            },
            {},
        )
        self._loop, self._stack = asyncio.new_event_loop(), AsyncExitStack()
        cluster: LocalCluster = self._run(self._stack.enter_async_context(LocalCluster.running(config)))
        self._frontend = cluster.frontend

    def prefill(self, prompt: list[int]) -> tuple[Stamp, Stamp]:
        return self._run(self._prefill(prompt))

    def decode(self, prompts: list[list[int]], steps: int) -> list[Stamp]:
        return self._run(self._decode(prompts, steps))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    async def _prefill(self, prompt: list[int]) -> tuple[Stamp, Stamp]:
        start = now()
        source = self._frontend.generate(self._request(prompt, 1))
        await anext(source)
        end = now()
        await source.aclose()
        return start, end

    async def _decode(self, prompts: list[list[int]], steps: int) -> list[Stamp]:
        """The sequence that gets its first token last says when each step is over."""
        stamps: list[Stamp] = []
        waiting = len(prompts)
        over = asyncio.Event()

        async def follow(prompt: list[int]) -> None:
            nonlocal waiting
            source = self._frontend.generate(self._request(prompt, steps + SLACK))
            await anext(source)
            waiting -= 1
            if is_last := not waiting:
                stamps.append(now())
            async for _ in source:
                if is_last:
                    stamps.append(now())
                if len(stamps) > steps:
                    over.set()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(follow(prompt)) for prompt in prompts]
            await over.wait()
            for task in tasks:
                task.cancel()
        return stamps[: steps + 1]

    def _request(self, prompt: list[int], count: int) -> Request:
        return Request(
            id=self._frontend.new_request_id(),
            prompt=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=count),
            reply_to=self._frontend.address,
            slo=Slo(name="batch", ttft_s=3600.0, tpot_s=10.0, priority=-1),
        )

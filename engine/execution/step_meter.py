"""Measures steps of the real ranks: any mix of prompt pieces and decodes at any context, without computing what comes before.

A step reads whatever KV the pool has, since its duration does not depend on the values."""

import asyncio
import itertools
import mmap
import random
from dataclasses import dataclass
from pathlib import Path

from core.config.cluster_config import ClusterConfig
from core.errors import ConfigError
from core.kv import num_blocks_for
from core.plan import NewSeq, SeqWork, StepPlan
from core.types import SamplingParams
from engine.execution.build_group import build_group
from engine.sizing.pool_size import PoolSize, RankMemory, size_pool


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """`count` tokens after `start` others of one sequence."""

    start: int
    count: int
    adapter: str = ""
    """As in `Request`."""


class StepMeter:
    """One instance's ranks, without scheduler or cluster. Raises ConfigError as the engine's construction does."""

    def __init__(self, config: ClusterConfig, folder: Path, found: RankMemory | None = None) -> None:
        """`found` is as for `size_pool`, where others are to be on this host beside the instance."""
        self.size: PoolSize = size_pool(
            folder, config.model, config.engine, found=found, slots=config.adapters
        )
        self._block_size = config.engine.block_size
        buffer = memoryview(mmap.mmap(-1, self.size.num_bytes))
        self._group = build_group(folder, config.model, config.engine, self.size, buffer, None)
        self._steps = itertools.count()
        self._rng = random.Random(0)

    def measure(self, pieces: list[PromptPiece]) -> float:
        """Return the seconds of one step. Raises ConfigError when the pool or the context is too small for it."""
        needed = sum(num_blocks_for(piece.start + piece.count, self._block_size) for piece in pieces)
        longest = max(piece.start + piece.count for piece in pieces)
        if needed > self.size.num_blocks or longest >= self.size.max_context_tokens:
            raise ConfigError(
                f"a step over {needed} blocks with {longest} tokens of one sequence does not fit"
            )
        return asyncio.run(self._execute(self._plan(pieces)))

    def close(self) -> None:
        asyncio.run(self._group.close())

    async def _execute(self, plan: StepPlan) -> float:
        return (await self._group.execute(plan)).duration_s

    def _plan(self, pieces: list[PromptPiece]) -> StepPlan:
        step, first = next(self._steps), 0
        new: list[NewSeq] = []
        work: list[SeqWork] = []
        sampling = SamplingParams(temperature=0.0)
        for number, piece in enumerate(pieces):
            end = piece.start + piece.count
            blocks = num_blocks_for(end, self._block_size)
            tokens = tuple(self._rng.randrange(1, 1000) for _ in range(end))
            new.append(NewSeq(f"s{step}-{number}", tokens, end, sampling))
            ids = tuple(range(first, first + blocks))
            work.append(
                SeqWork(
                    key=new[-1].key,
                    start=piece.start,
                    count=piece.count,
                    block_ids=ids,
                    samples=True,
                    adapter=piece.adapter,
                )
            )
            first += blocks
        drop = tuple(f"s{step - 1}-{number}" for number in range(256)) if step else ()
        return StepPlan(step=step, new=tuple(new), copies=(), work=tuple(work), drop=drop)

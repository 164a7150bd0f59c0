"""Whether a session's KV is in the pool again when its next turn comes, and what that turn waits for otherwise.

    python -m benchmarks.cache.session_prefetch [--json FILE] [--turns N]

Sessions in closed loop: a gap after each answer the next turn, with 64 more tokens. KV is shaped like Llama-3.1-8B's (128 KiB a
token), and the pool holds the KV of a third of the sessions, so that each has lost its own before its next turn. The production
engine, planner, tiers and gate; the device is modelled by sleeping and reads nothing. Gaps are alike (a deviation of 5 %), as
of a tool that runs, or spread as people's (log-normal, sigma 1). `never`: clients say that nothing is to be read back before a
turn, which then reads it itself. `learned`: they name their session and nothing else. `room`: the pool has room for all.

Prediction, written first: of alike gaps, 85 % of the turns find all of their KV in the pool when it is learned, none when it is
not; the median time to the first token is that of `room` within 15 %, without it twice that from host memory and three times that
from a disk. Of people's gaps a tenth of the turns find it, and nothing gets slower."""

import asyncio
import mmap
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from math import inf
from typing import Any

from rich.progress import Progress

from benchmarks.engine.undisturbed import Undisturbed
from benchmarks.report import parser, write
from core.clock import WallClock
from core.config.cluster_config import EngineConfig
from core.kv import KVLayout, KVShard, RankPool
from core.plan import Sampled, StepPlan, StepResult
from core.types import CacheHints, Request, SamplingParams, TokenOut
from decode.headroom_policy import HeadroomPolicy
from engine.execution.inline_group import InlineGroup
from engine.loop import Engine
from engine.planning.step_scheduler import StepScheduler
from engine.tiers.build_tiers import build_tiers
from engine.tiers.restoring import Restoring

LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
SHARD = KVShard.whole(LAYOUT)
NUM_SESSIONS, PREFIX, NUM_NEW = 12, 768, 64
GAP_S, STEP_S = 6.0, 0.02
NUM_UNCOUNTED = 4
"""The first turns of each session: by then its gaps are known."""
BLOCK_BYTES = SHARD.pool_bytes(1)


@dataclass(frozen=True)
class Case:
    gaps: str
    tier: str
    mode: str
    mean_gap_s: float = GAP_S
    num_sessions: int = NUM_SESSIONS

    def gap_s(self, rng: random.Random) -> float:
        if self.gaps == "alike":
            return max(0.0, rng.gauss(self.mean_gap_s, 0.05 * self.mean_gap_s))
        return rng.lognormvariate(0.0, 1.0) * self.mean_gap_s / 1.65

    def hints(self, name: str) -> CacheHints:
        return CacheHints(session=name, prefetch_s=inf if self.mode == "never" else None)


class _Answers(Undisturbed):
    """Hears when each request's token has been sampled. `engine.loop` calls it."""

    def __init__(self) -> None:
        self.at: dict[str, asyncio.Future[TokenOut]] = {}

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        for token in tokens:
            self.at[token.request_id].set_result(token)

    def on_error(self, error: BaseException) -> None:
        for each in self.at.values():
            if not each.done():
                each.set_exception(error)


def _step(plan: StepPlan) -> StepResult:
    time.sleep(STEP_S)
    return StepResult(
        step=plan.step, sampled=tuple(Sampled(work.key, 1) for work in plan.work if work.samples)
    )


def _num_blocks(num_turns: int) -> int:
    """The blocks of a session at its end."""
    return (PREFIX + (NUM_NEW + 1) * num_turns) // LAYOUT.block_size + 2


@dataclass(frozen=True)
class _Instance:
    scheduler: StepScheduler
    engine: Engine
    tiers: Restoring

    def has_all(self, request: Request) -> bool:
        """Whether nothing has to be read or computed of what the session had before, but for its last block."""
        num_before = (len(request.prompt) - NUM_NEW - 1) // LAYOUT.block_size
        return self.scheduler.prefixes.cached_prefix(request).num_kept >= num_before - 1


def _instance(case: Case, num_turns: int, folder: str) -> _Instance:
    each = _num_blocks(num_turns)
    num_blocks = each * (case.num_sessions + 1 if case.mode == "room" else case.num_sessions // 3)
    below = each * (case.num_sessions + 1) * BLOCK_BYTES
    config = EngineConfig(
        block_size=LAYOUT.block_size,
        max_batch_tokens=PREFIX,
        host_cache_bytes=below if case.tier == "host" else 8 * BLOCK_BYTES,
        disk_cache_bytes=below if case.tier == "disk" else 0,
        disk_cache_path=folder if case.tier == "disk" else "",
    )
    pool = memoryview(mmap.mmap(-1, SHARD.pool_bytes(num_blocks)))
    store = build_tiers(config, pool, [RankPool(shard=SHARD, num_blocks=num_blocks)], "benchmark")
    assert store is not None
    scheduler = StepScheduler(config, num_blocks, 1 << 16, HeadroomPolicy())
    tiers = Restoring(scheduler.prefixes, store, LAYOUT.block_size)
    group = InlineGroup(_step)
    return _Instance(scheduler, Engine(scheduler, group, WallClock(), tiers=tiers), tiers)


async def _session(
    number: int, instance: _Instance, answers: _Answers, case: Case, num_turns: int
) -> list[tuple[float, bool]]:
    """(time to the first token, whether its KV was in the pool when it came) of each turn that counts."""
    rng, name = random.Random(number), f"s{number}"
    tokens = [number * 1_000_000 + index for index in range(PREFIX)]
    found: list[tuple[float, bool]] = []
    await asyncio.sleep(case.mean_gap_s * number / case.num_sessions)
    for turn in range(num_turns):
        request_id = f"{name}.{turn}"
        answers.at[request_id] = asyncio.get_running_loop().create_future()
        request = Request(
            id=request_id,
            prompt=tuple(tokens),
            sampling=SamplingParams(max_tokens=1),
            reply_to="f",
            hints=case.hints(name),
        )
        in_pool = instance.has_all(request)
        began_at = time.perf_counter()
        instance.engine.add(request)
        await answers.at[request_id]
        if turn >= NUM_UNCOUNTED:
            found.append((time.perf_counter() - began_at, in_pool))
        tokens += [1, *(rng.randrange(1 << 30) for _ in range(NUM_NEW))]
        await asyncio.sleep(case.gap_s(rng))
    return found


async def run_case(case: Case, num_turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        instance, answers = _instance(case, num_turns, folder), _Answers()
        running = asyncio.create_task(instance.engine.run(answers))
        sessions = [
            _session(number, instance, answers, case, num_turns) for number in range(case.num_sessions)
        ]
        turns = [turn for session in await asyncio.gather(*sessions) for turn in session]
        counts = instance.engine.work_counts()
        await instance.tiers.settled()
        await instance.engine.close()
        await running
    times_ms = sorted(1e3 * took_s for took_s, _ in turns)
    return {
        "gaps": case.gaps,
        "tier": case.tier,
        "mode": case.mode,
        "turns": len(turns),
        "in_pool": round(statistics.mean(in_pool for _, in_pool in turns), 3),
        "ttft_p50_ms": round(statistics.median(times_ms), 1),
        "ttft_p90_ms": round(times_ms[int(len(times_ms) * 0.9)], 1),
        "read_back": counts.sessions.prefetched,
        "computed_tokens": counts.computed_tokens,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--turns", type=int, default=12)
    args = options.parse_args()
    cases = [
        Case(gaps, tier, mode, 0.3, 3) if args.smoke else Case(gaps, tier, mode)
        for gaps in ("alike", "people's")
        for tier in ("host", "disk")
        for mode in ("never", "learned", "room")
    ]
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        for case in progress.track(cases[:3] if args.smoke else cases, description="cases"):
            rows.append(asyncio.run(run_case(case, NUM_UNCOUNTED + 1 if args.smoke else args.turns)))
            progress.console.print(rows[-1])
    write(args.json, "benchmarks.cache.session_prefetch", {"rows": rows})


if __name__ == "__main__":
    main()

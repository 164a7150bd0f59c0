"""How much of a prefix's way from host memory into the pool hides behind the step that reads it.

    python -m benchmarks.cache.tier_restore [--json FILE] [--rounds N]

KV is shaped like Llama-3.1-8B's (128 KiB a token); the prefix lies in the host tier, 512 more tokens are computed in one step.
The production engine, tiers and gate; the device is modelled by sleeping and reads nothing: a step takes about `ratio` times as
long as the prefix's copy, a layer's KV is ready after 12 % of the layer. In turns: the copy alone, TTFT with the copy before the
step, TTFT with the copy under it; `hidden` is the saved share of the copy."""

import asyncio
import mmap
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.engine.undisturbed import Undisturbed
from benchmarks.report import parser, write
from core.clock import WallClock
from core.config.cluster_config import EngineConfig
from core.kv import KVLayout, KVShard, RankPool
from core.plan import Sampled, StepPlan, StepResult
from core.types import Request, SamplingParams, TokenOut
from decode.headroom_policy import HeadroomPolicy
from engine.execution.inline_group import InlineGroup
from engine.loop import Engine
from engine.planning.step_scheduler import StepScheduler
from engine.tiers.block_digests import prefix_digests, root_digest
from engine.tiers.build_tiers import build_tiers
from engine.tiers.layer_gate import GatedSink, LayerGate
from engine.tiers.restoring import Restoring
from engine.tiers.tier_store import TierStore

PREDICTION = (
    "TTFT falls from copy + step to the longer of the two and the first layer's copy: 90 % of the copy is hidden at ratio 2, "
    "80 % at ratio 1"
)
LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
SHARD = KVShard.whole(LAYOUT)
NUM_NEW = 512
RATIOS = [1.0, 2.0]
KV_READY = 0.12
PREFIXES = [512, 1024, 2048]
NUM_BLOCKS = (PREFIXES[-1] + NUM_NEW) // LAYOUT.block_size + 8
CONFIG = EngineConfig(
    block_size=LAYOUT.block_size,
    max_batch_tokens=NUM_NEW,
    host_cache_bytes=SHARD.pool_bytes((PREFIXES[-1] + NUM_NEW) // LAYOUT.block_size),
)


class Nobody:
    def step_started(self, plan: StepPlan) -> None:
        return None


class _FirstToken(Undisturbed):
    """Hears when the first token has been drawn."""

    def __init__(self) -> None:
        self.at: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        if not self.at.done():
            self.at.set_result(time.perf_counter())

    def on_error(self, error: BaseException) -> None:
        self.at.set_exception(error)


async def ttft_s(store: TierStore, prompt: tuple[int, ...], layered: bool, step_s: float) -> float:
    """The time to the first token of a prompt whose prefix nobody but the store has."""
    gate, layer_s = LayerGate() if layered else None, step_s / LAYOUT.num_layers
    sink = GatedSink(gate, Nobody()) if gate else Nobody()

    def step(plan: StepPlan) -> StepResult:
        assert plan.num_tokens <= NUM_NEW, "the prefix was not found"
        layer_done = sink.step_started(plan)
        for layer in range(LAYOUT.num_layers):
            time.sleep(layer_s * KV_READY)
            if layer_done is not None:
                layer_done(0, layer)
            time.sleep(layer_s * (1 - KV_READY))
        return StepResult(
            step=plan.step, sampled=tuple(Sampled(work.key, 1) for work in plan.work if work.samples)
        )

    scheduler = StepScheduler(CONFIG, NUM_BLOCKS, 1 << 16, HeadroomPolicy())
    tiers = Restoring(scheduler, store, LAYOUT.block_size, gate)
    engine = Engine(
        scheduler,
        InlineGroup(step),
        WallClock(),
        tiers=tiers,
    )
    events = _FirstToken()
    running = asyncio.create_task(engine.run(events))
    started = time.perf_counter()
    engine.add(Request(id="r", prompt=prompt, sampling=SamplingParams(max_tokens=1), reply_to="f"))
    took = await events.at - started
    await tiers.settled()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return took


def filled_store(tokens: tuple[int, ...]) -> TierStore:
    pool = memoryview(mmap.mmap(-1, SHARD.pool_bytes(NUM_BLOCKS)))
    pool[:] = bytes(len(pool))  # its pages are there
    store = build_tiers(CONFIG, pool, [RankPool(shard=SHARD, num_blocks=NUM_BLOCKS)], "benchmark")
    assert store is not None
    for number, digest in enumerate(prefix_digests(root_digest(store.root, ""), tokens, LAYOUT.block_size)):
        store.accept(digest, bytes([number % 256]) * SHARD.pool_bytes(1))
    return store


async def one_round(store: TierStore, prompt: tuple[int, ...], step_s: float) -> tuple[float, float, float]:
    """Seconds of the copy alone, and of TTFT with it before and under the step."""
    copy_s = await ttft_s(store, prompt, False, 0.0)
    return copy_s, await ttft_s(store, prompt, False, step_s), await ttft_s(store, prompt, True, step_s)


async def measure(prefixes: Sequence[int], ratios: Sequence[float], rounds: int) -> list[dict[str, Any]]:
    tokens = tuple(range(PREFIXES[-1]))
    store, rows = filled_store(tokens), list[dict[str, Any]]()
    for size in prefixes:
        prompt = (*tokens[:size], *range(1_000_000, 1_000_000 + NUM_NEW))
        guess_s = min([await ttft_s(store, prompt, False, 0.0) for _ in range(3)])
        for ratio in ratios:
            step_s = ratio * guess_s
            runs = [await one_round(store, prompt, step_s) for _ in range(rounds)]
            copy_s, before_s, under_s = (statistics.median(column) for column in zip(*runs, strict=True))
            row = {
                "prefix_tokens": size,
                "ratio": step_s / copy_s,
                "copy_ms": copy_s * 1e3,
                "ttft_copied_before_ms": before_s * 1e3,
                "ttft_copied_under_ms": under_s * 1e3,
                "hidden": (before_s - under_s) / copy_s,
            }
            rows.append(row)
            print({key: round(value, 3) for key, value in row.items()}, flush=True)
    await store.close()
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10)
    args = options.parse_args()
    sizes = ([512], [1.0], 1) if args.smoke else (PREFIXES, RATIOS, args.rounds)
    rows = asyncio.run(measure(*sizes))
    write(args.json, "benchmarks.cache.tier_restore", {"prediction": PREDICTION, "rows": rows})


if __name__ == "__main__":
    main()

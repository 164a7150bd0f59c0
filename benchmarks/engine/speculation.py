"""What draft tokens gain: tokens a second with each source by those without, and how often draft tokens are right.

    python -m benchmarks.engine.speculation [--json FILE] [--threads 1] [--rounds 2] [--only SOURCE ...] [--smoke]

The embedded model goes on with pieces of the source files that were held out of its training, 192 tokens each, for 128 tokens,
greedily or at temperature 0.8. Each source has an engine of its own, with one rank in this process and steps planned ahead where
the engine does so; all take turns, and other files come each round. `draft` is the embedded model's draft model, and `control` a
second engine without draft tokens: its ratio says what the measure is off by. One step computes all prompts. Otherwise engines
would spread prompts each in its own way, and decode batches of different sizes. The time is that from the last sequence's first
token to the end, the pace is the tokens sampled in it, and each ratio is of one round; medians are told. The processor's time in
it is this process's own, of all its threads, on which others that use the machine weigh less. A
sequence that ends early leaves its place empty, with draft tokens and without."""

import asyncio
import json
import mmap
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from benchmarks.report import parser, write
from core.clock import WallClock
from core.config.cluster_config import EngineConfig, ModelConfig
from core.plan import FailedSeq
from core.types import Request, SamplingParams, TokenOut
from decode.headroom_policy import HeadroomPolicy
from engine.execution.build_group import build_group
from engine.loop import Engine
from engine.planning.dp_scheduler import make_planner
from engine.sizing.pool_size import size_pool
from models.files.hub import resolve
from models.text.tokenizer import load_tokenizer
from tools.train_embedded import read_corpus

PREDICTION = (
    "with the best source 1.5 times at batch 1 and 1.2 times at batch 8, greedily; at least 0.98 times at batch 32. With "
    "the draft model, whose step takes 0.4 times the target's and which is right in half of all places, 1.1 times at batch 1 and "
    "1.05 at batch 8, greedily, and 1.0 at temperature 0.8"
)
SOURCES = {
    "none": "none",
    "control": "none",
    "ngram": "ngram",
    "draft": "draft:embedded-draft",
}
DRAFTING = [*SOURCES][2:]
PROMPT, NUM_TOKENS, SMOKE_TOKENS = 192, 128, 16
LARGEST_BATCH = 32


@dataclass(slots=True)
class Run:
    """One batch on one engine."""

    left: int
    waiting: int
    """Sequences without a first token."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = 0.0
    ended: float = 0.0
    processor_s: float = 0.0
    """What the process has used in between; before the end, its time at the beginning."""
    sampled: int = 0
    """Tokens since each sequence has its first one."""
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


class Bench:
    """An engine with one source of draft tokens."""

    def __init__(self, source: Any, threads: int) -> None:
        folder = resolve("embedded")
        config = EngineConfig(
            num_threads=threads,
            max_batch_tokens=LARGEST_BATCH * PROMPT,
            kv_bytes=128 << 20,
            device="cpu",
            prefix_cache=False,
            speculate=source,
        )
        model = ModelConfig()
        size = size_pool(folder, model, config)
        memory = memoryview(mmap.mmap(-1, size.num_bytes))
        group = build_group(folder, model, config, size, memory, None)
        planner = make_planner(config, size.num_blocks, size.max_context_tokens, HeadroomPolicy(), 1)
        self.engine = Engine(planner, group, WallClock())
        self.running = asyncio.create_task(self.engine.run(self))
        self.run = Run(0, 0)

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        run = self.run
        now = time.perf_counter()
        for token in tokens:
            said = run.tokens.setdefault(token.request_id, [])
            said.append(token.token)
            if run.waiting == 0:
                run.sampled += 1
            elif len(said) == 1:
                run.waiting -= 1
                run.began, run.processor_s = now, time.process_time()
            if token.finish is not None:
                run.left -= 1
        if run.left == 0:
            run.ended, run.processor_s = now, time.process_time() - run.processor_s
            run.done.set()

    def on_stuck(self, keys: list[str]) -> None: ...
    def on_taken_back(self, paused: list[str], lost: list[str]) -> None: ...
    def on_failed(self, failed: Sequence[FailedSeq]) -> None: ...

    def on_error(self, error: BaseException) -> None:
        raise error

    async def answer(self, requests: list[Request]) -> Run:
        self.run = Run(len(requests), len(requests))
        for request in requests:
            self.engine.add(request)
        await self.run.done.wait()
        return self.run

    async def close(self) -> None:
        self.running.cancel()  # a step that was planned ahead may still run
        with suppress(asyncio.CancelledError):
            await self.running
        await self.engine.close()


@cache
def held_out() -> list[int]:
    codec = load_tokenizer(resolve("embedded"))
    return [token for text in read_corpus()[1] for token in codec.encode(text, add_special_tokens=False)]


def batch_of(size: int, temperature: float, num_tokens: int, rng: random.Random) -> list[Request]:
    text = held_out()
    sampling = SamplingParams(
        temperature=temperature, top_p=0.95, max_tokens=num_tokens, seed=rng.randrange(1 << 30)
    )
    starts = [rng.randrange(len(text) - PROMPT) for _ in range(size)]
    return [
        Request(id=str(at), prompt=tuple(text[start : start + PROMPT]), sampling=sampling, reply_to="b")
        for at, start in enumerate(starts)
    ]


async def compare(
    benches: dict[str, Bench],
    size: int,
    temperature: float,
    *,
    rounds: int,
    num_batches: int,
    num_tokens: int,
) -> dict[str, Any]:
    """Every source answers the same batches in turn. The first round warms up and teaches the step-time model."""
    paces: dict[str, list[float]] = {source: [] for source in benches}
    by_processor: dict[str, list[float]] = {source: [] for source in benches}
    proposed: dict[str, list[int]] = {}
    equal, num_sampled = 0, rounds * num_batches * size * (num_tokens - 1)
    rng = random.Random(f"{size} {temperature}")
    for number in range(rounds + 1):
        batches = [batch_of(size, temperature, num_tokens, rng) for _ in range(num_batches)]
        said: dict[str, list[dict[str, list[int]]]] = {}
        for source in sorted(benches, key=lambda _: rng.random()):
            before = benches[source].engine.work_counts()
            runs = [await benches[source].answer(batch) for batch in batches]
            said[source] = [run.tokens for run in runs]
            after = benches[source].engine.work_counts()
            if number:
                sampled = sum(run.sampled for run in runs)
                paces[source].append(sampled / sum(run.ended - run.began for run in runs))
                by_processor[source].append(sampled / sum(run.processor_s for run in runs))
                counts = proposed.setdefault(source, [0, 0])
                counts[0] += after.draft_tokens - before.draft_tokens
                counts[1] += after.accepted_tokens - before.accepted_tokens
        equal += all(tokens == said["none"] for tokens in said.values())
    return {
        source: {
            "speed": _ratio(paces[source], paces["none"]),
            "speed_by_processor_time": _ratio(by_processor[source], by_processor["none"]),
            "tokens_per_s": round(statistics.median(paces[source]), 1),
            "guessed_per_token": round(proposed[source][0] / num_sampled, 3),
            "right": round(proposed[source][1] / max(1, proposed[source][0]), 3),
        }
        for source in benches
    } | {"rounds_with_equal_tokens": equal, "rounds": rounds + 1}


def _ratio(paces: list[float], plain: list[float]) -> float:
    """Return the median over the rounds."""
    return round(statistics.median(pace / base for pace, base in zip(paces, plain, strict=True)), 3)


async def measure(threads: int, rounds: int, only: list[str], smoke: bool) -> dict[str, Any]:
    benches = {name: Bench(SOURCES[name], threads) for name in ("none", "control", *only)}
    results: dict[str, Any] = {}
    num_tokens = SMOKE_TOKENS if smoke else NUM_TOKENS
    for temperature in (0.0, 0.8):
        for size, num_batches in ((1, 1), (2, 1)) if smoke else ((1, 4), (8, 1), (LARGEST_BATCH, 1)):
            name = f"batch {size}, temperature {temperature:g}"
            results[name] = await compare(
                benches, size, temperature, rounds=rounds, num_batches=num_batches, num_tokens=num_tokens
            )
            print(name, json.dumps(results[name]))
    for bench in benches.values():
        await bench.close()
    return results


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--only", nargs="+", choices=DRAFTING, default=DRAFTING, help="sources")
    args = options.parse_args()
    rounds = 1 if args.smoke else args.rounds
    results = asyncio.run(measure(args.threads, rounds, args.only, args.smoke))
    chosen = "" if args.only == DRAFTING else f" --only {' '.join(args.only)}"
    write(
        args.json,
        f"benchmarks.engine.speculation --threads {args.threads} --rounds {args.rounds}{chosen}",
        {"prediction": PREDICTION, "threads": args.threads, "results": results},
    )


if __name__ == "__main__":
    main()

"""Prefix-cache hits by cache size and by what clients say, against the offline optimum (Belady), on a trace with prefix ids.

    python -m benchmarks.cache.prefix_cache TRACE [--json FILE]

The production prefix cache (`radix_cache`) serves the trace's prompts one after another, a whole block of the trace for a
block of the cache. Hits are shares of those of an endless cache. `told` is what clients can say with
prompt_cache_retention="none": here the trace's future says it of those requests from which nothing goes on, all of them or a
random half.
Prediction: nobody telling, hits lie far below Belady's, since a conversation's past says little about its future; all
telling, 95 % of the gap is closed at 4 M tokens."""

import heapq
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from baton.bench.traces import TraceRow, read_trace
from benchmarks.report import parser, write
from engine.cache.block_pool import BlockPool
from engine.cache.radix_cache import RadixCache

MILLIONS = (2, 4, 6, 8)
Prompts = Sequence[tuple[int, ...]]


def endless_hits(prompts: Prompts) -> list[int]:
    """Return the hits of each prompt in a cache without end."""
    seen: set[int] = set()
    hits: list[int] = []
    for prompt in prompts:
        hits.append(next((i for i, block in enumerate(prompt) if block not in seen), len(prompt)))
        seen.update(prompt)
    return hits


def belady_hits(prompts: Prompts, num_blocks: int) -> int:
    """The block goes first whose next use is farthest off."""
    later: dict[int, list[int]] = defaultdict(list)
    for index in range(len(prompts) - 1, -1, -1):
        for block in prompts[index]:
            later[block].append(index)
    kept: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for prompt in prompts:
        hits += next((i for i, block in enumerate(prompt) if block not in kept), len(prompt))
        for block in prompt:
            later[block].pop()
            kept[block] = later[block][-1] if later[block] else len(prompts)
            heapq.heappush(farthest, (-kept[block], block))
        while len(kept) > num_blocks:
            when, block = heapq.heappop(farthest)
            if kept.get(block) == -when:
                del kept[block]
    return hits


class SmallCache:
    """The production cache, with `num_blocks` between prompts; a running prompt's own come on top, as in Belady's."""

    def __init__(self, prompts: Prompts, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._room = num_blocks + max(map(len, prompts))
        self._pool = BlockPool(self._room)
        self.cache = RadixCache(self._pool, 1)

    def begin(self, prompt: tuple[int, ...]) -> tuple[int, list[int]]:
        """Return a prompt's hits, and its blocks, all of which are cached now."""
        found = self.cache.match((*prompt, -1), "", partial=False).blocks
        self._pool.share(found)
        missing = len(prompt) - len(found)
        surplus = self._room - self._pool.num_free + missing - self._num_blocks
        self.cache.evict(max(0, min(surplus, self.cache.num_evictable)))
        blocks = [*found, *self._pool.take(missing)]
        self.cache.insert(prompt, len(prompt), blocks, "", len(found))
        return len(found), blocks

    def end(self, blocks: list[int], wanted: bool) -> None:
        self.cache.release(self._pool.drop([*reversed(blocks)]), wanted=wanted)


def cache_hits(prompts: Prompts, num_blocks: int, wanted: Sequence[bool]) -> int:
    small, hits = SmallCache(prompts, num_blocks), 0
    for prompt, go_on in zip(prompts, wanted, strict=True):
        found, blocks = small.begin(prompt)
        hits += found
        small.end(blocks, go_on)
    small.cache.check_integrity()
    return hits


def goes_on(prompts: Prompts) -> list[bool]:
    """Whether a later prompt has the last block of this one."""
    last: dict[int, int] = {}
    for index, prompt in enumerate(prompts):
        for block in prompt:
            last[block] = index
    return [last[prompt[-1]] > index for index, prompt in enumerate(prompts)]


def prompts_of(rows: Sequence[TraceRow]) -> list[tuple[int, ...]]:
    """Whole blocks only: a cache keeps no others."""
    whole = [row.prefix_ids[: row.input_tokens // row.prefix_block_tokens] for row in rows if row.prefix_ids]
    return [prompt for prompt in whole if prompt]


def run(prompts: Prompts, block_tokens: int, seed: int) -> list[dict[str, Any]]:
    endless, rng = sum(endless_hits(prompts)), random.Random(seed)
    always, told = [True] * len(prompts), goes_on(prompts)
    half = [go_on or rng.random() < 0.5 for go_on in told]
    rows: list[dict[str, Any]] = []
    for millions in track(MILLIONS, "cache sizes"):
        size = millions * 1_000_000 // block_tokens
        start_at = time.process_time()
        lru = cache_hits(prompts, size, always)
        took_s = time.process_time() - start_at
        hits = {
            "lru": lru,
            "half told": cache_hits(prompts, size, half),
            "all told": cache_hits(prompts, size, told),
            "belady": belady_hits(prompts, size),
        }
        gap = max(1, hits["belady"] - lru)
        blocks = sum(map(len, prompts))
        rows.append(
            {
                "million_tokens": millions,
                "hits": {name: round(count / endless, 4) for name, count in hits.items()},
                "gap_closed": {name: round((count - lru) / gap, 3) for name, count in hits.items()},
                "us_per_block": round(took_s / blocks * 1e6, 1),
            }
        )
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("trace", type=Path)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    trace = read_trace(args.trace, args.seed)
    if args.smoke:
        trace = trace[:200]
    results = run(prompts_of(trace), trace[0].prefix_block_tokens, args.seed)
    for row in results:
        print(
            f"{row['million_tokens']} M tokens: " + "  ".join(f"{k} {v:.3f}" for k, v in row["hits"].items())
        )
    write(
        args.json,
        f"benchmarks.cache.prefix_cache {args.trace.name} --seed {args.seed}",
        {"unit": "share of an endless cache's hits", "results": results},
    )


if __name__ == "__main__":
    main()

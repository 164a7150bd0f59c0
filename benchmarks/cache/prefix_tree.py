"""What the prefix cache takes for one long prompt that is new, found again, given back and evicted: what a step waits for.

    python -m benchmarks.cache.prefix_tree [--tokens N] [--json FILE]

A prompt's tokens are numbers of their own each time, as in a new request: lists compare the same object faster than an equal one.
Predicted for 100,000 tokens: found in 2 ms (tokens are compared at 20 ns each), evicted in 1 ms, kept in 12 ms (the hashes)."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.report import parser, write
from engine.cache.block_pool import BlockPool
from engine.cache.radix_cache import RadixCache

BLOCK = 16
ROUNDS = 9


def measure(num_tokens: int) -> dict[str, float]:
    """Medians in ms."""
    num_blocks = num_tokens // BLOCK
    pool = BlockPool(num_blocks)
    cache = RadixCache(pool, BLOCK)
    rng, took = random.Random(0), dict[str, list[float]]()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        took.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
        return result

    def release(blocks: tuple[int, ...]) -> None:
        cache.release(pool.drop([*reversed(blocks)]))

    for _ in range(ROUNDS):
        text = " ".join(str(rng.randrange(100_000)) for _ in range(num_tokens + 1))
        prompt, again = ([int(token) for token in text.split()] for _ in range(2))
        taken = tuple(pool.take(num_blocks))
        timed("keep", lambda prompt=prompt, taken=taken: cache.insert(prompt, num_blocks, taken, ""))
        timed("give back", lambda taken=taken: release(taken))
        match = timed("find", lambda again=again: cache.match(again, "", partial=True))
        pool.share(match.blocks)
        release(match.blocks)
        timed("evict", lambda: cache.evict(num_blocks))
    return {name: round(statistics.median(times), 2) for name, times in took.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=100_000)
    args = options.parse_args()
    num_tokens: int = 1000 if args.smoke else args.tokens
    result = measure(num_tokens)
    print("  ".join(f"{name} {ms} ms" for name, ms in result.items()))
    write(
        args.json, "benchmarks.cache.prefix_tree", {"tokens": num_tokens, "block_tokens": BLOCK, "ms": result}
    )


if __name__ == "__main__":
    main()

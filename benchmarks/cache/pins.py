"""What a tenant gains whose clients pin their conversations, and what the others lose, who say nothing.

    python -m benchmarks.cache.pins TRACE [--json FILE]

As `benchmarks.cache.prefix_cache`: the production prefix cache and its bounds serve the trace's prompts one after another, a
whole block of the trace for a block of the cache. A conversation is told by its second block (the first is everybody's). A
tenth or a half of them, at random, are one tenant's, and the rest another's, of the same weight; `engine.pinned_share` is half.
The first tenant's clients pin: *all*, each prompt for an hour; *known*, those that go on (here the trace's future says so), and
they say of the others that nobody will. Hits are shares of those that the same prompts find in an endless cache.

Prediction, written first for *all*: at 4 M tokens a tenth of the conversations that pin find 95 % of what there is, in place of
50 %, and the others lose 3 points; where half pin they gain 15 points and the others lose 15. Seen with a tenant's part counted
among those alone that pin: 95.4 and -21.3, 0.5 and -1.2. So parts are counted among all that were served lately. Prediction for
that: a tenth gains 20 points, the others lose 8; *known* gain 40, and the others gain 2."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from baton.bench.traces import TraceRow, read_trace
from benchmarks.cache.prefix_cache import MILLIONS, Prompts, SmallCache, endless_hits, goes_on, prompts_of
from benchmarks.report import parser, write
from engine.planning.pinning import Pinning

SHARES = (0.1, 0.5)
WAYS = ("all", "known")
_TTL_S = 3600.0
_SHARE = 0.5


def found(
    prompts: Prompts,
    times: Sequence[float],
    num_blocks: int,
    theirs: Sequence[bool],
    pins: Sequence[bool],
    wanted: Sequence[bool],
) -> list[int]:
    """The hits of each prompt. `theirs` are one tenant's. Those of `pins` pin what they leave, and what is not `wanted` goes
    first."""
    small = SmallCache(prompts, num_blocks)
    pinning = Pinning(small.cache, int(_SHARE * num_blocks))
    hits: list[int] = []
    for prompt, now, own, pin, stays in zip(prompts, times, theirs, pins, wanted, strict=True):
        pinning.pass_by(now)
        count, blocks = small.begin(prompt)
        hits.append(count)
        pinning.served("first" if own else "second", 1.0)
        if not stays:
            pinning.unpin(prompt[1:2])
        elif pin:
            pinning.pin(prompt[1:2], now + _TTL_S, blocks, tenant="first", weight=1.0)
        small.end(blocks, stays)
    small.cache.check_integrity()
    return hits


def run(rows: Sequence[TraceRow], block_tokens: int, seed: int) -> list[dict[str, Any]]:
    kept = [row for row in rows if row.prefix_ids and row.input_tokens >= row.prefix_block_tokens]
    prompts, times = prompts_of(kept), [row.arrival_at for row in kept]
    conversations = sorted({prompt[1:2] for prompt in prompts})
    rng, most = random.Random(seed), endless_hits(prompts)
    order = rng.sample(conversations, len(conversations))
    go_on, nobody, always = goes_on(prompts), [False] * len(prompts), [True] * len(prompts)
    out: list[dict[str, Any]] = []
    for millions in track(MILLIONS, "cache sizes"):
        size = millions * 1_000_000 // block_tokens
        plain = found(prompts, times, size, nobody, nobody, always)
        for share in SHARES:
            chosen = set(order[: max(1, round(share * len(order)))])
            theirs = [prompt[1:2] in chosen for prompt in prompts]
            known = [not own or goes for own, goes in zip(theirs, go_on, strict=True)]
            for way in WAYS:
                wanted = always if way == "all" else known
                hits = found(prompts, times, size, theirs, theirs, wanted)
                shares = _shares(most, plain, hits, theirs)
                out.append({"million_tokens": millions, "first": share, "pins": way, **shares})
    return out


def _shares(
    most: Sequence[int], plain: Sequence[int], hits: Sequence[int], theirs: Sequence[bool]
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, own in (("first", True), ("second", False)):
        group = [index for index, one in enumerate(theirs) if one is own]
        total = max(1, sum(most[index] for index in group))
        each = {"before": plain, "after": hits}
        rows[f"{name} tenant"] = {
            when: round(sum(found[index] for index in group) / total, 4) for when, found in each.items()
        }
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("trace", type=Path)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    trace = read_trace(args.trace, args.seed)
    if args.smoke:
        trace = trace[:200]
    results = run(trace, next(row.prefix_block_tokens for row in trace if row.prefix_ids), args.seed)
    for row in results:
        print(row)
    write(args.json, f"benchmarks.cache.pins {args.trace.name} --seed {args.seed}", {"results": results})


if __name__ == "__main__":
    main()

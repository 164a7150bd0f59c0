"""What planning and committing a decode step costs the engine's Python, by the length of the contexts in the batch.

    python -m benchmarks.engine.step_planning [--json FILE]

No model runs: every planned sample is answered at once. Prediction, written first: a step touches each sequence once and a full
block every 16th time, so the time per sequence does not depend on its length (at most the copy of a block table: 8 bytes for
each block of the context, every 16th step)."""

import random
import statistics
import time

from rich.progress import track

from benchmarks.report import parser, write
from core.config.cluster_config import EngineConfig
from core.plan import Sampled, StepPlan, StepResult
from core.types import Request, SamplingParams
from decode.headroom_policy import HeadroomPolicy
from engine.planning.step_scheduler import StepScheduler

BATCH = 32
BLOCK_TOKENS = 16
STEPS = 64
ROUNDS = 5
BATCH_TOKENS = 8192


def started(context: int) -> StepScheduler:
    """A batch whose prompts are computed."""
    num_output = STEPS * (ROUNDS + 1) + BATCH * (context // BATCH_TOKENS + 2)  # the first decode meanwhile
    config = EngineConfig(block_size=BLOCK_TOKENS, max_batch_tokens=BATCH_TOKENS, max_num_seqs=BATCH)
    num_blocks = BATCH * ((context + num_output) // BLOCK_TOKENS + 2)
    scheduler = StepScheduler(config, num_blocks, context + num_output, HeadroomPolicy())
    rng = random.Random(context)
    for number in range(BATCH):
        prompt = tuple(rng.randrange(1 << 17) for _ in range(context))
        scheduler.sequences.add(
            Request(
                id=f"r{number}",
                prompt=prompt,
                sampling=SamplingParams(max_tokens=num_output),
                reply_to="client",
            )
        )
    while scheduler.load().num_decoding < BATCH:
        step(scheduler)
    return scheduler


def step(scheduler: StepScheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    sampled = tuple(Sampled(w.key, 5) for w in plan.work if w.samples)
    scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled), 0.0)
    return plan


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--contexts", default="1000,8000,32000,128000")
    args = options.parse_args()
    contexts = [100, 200] if args.smoke else [int(size) for size in args.contexts.split(",")]
    batches = {context: started(context) for context in track(contexts, "prompts")}
    times_ms: dict[int, list[float]] = {context: [] for context in contexts}
    for _ in range(ROUNDS):
        for context, scheduler in batches.items():
            begun = time.perf_counter()
            for _ in range(STEPS):
                step(scheduler)
            times_ms[context].append((time.perf_counter() - begun) / STEPS * 1e3)
    results = [
        {"context_tokens": context, "batch": BATCH, "step_ms": round(statistics.median(times), 3)}
        for context, times in times_ms.items()
    ]
    for row in results:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    write(args.json, "benchmarks.engine.step_planning", {"results": results})


if __name__ == "__main__":
    main()

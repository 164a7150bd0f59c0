"""Where the time of the offline run on an H100 goes, on paper: `python -m benchmarks.simulator.offline --json FILE` (a minute).

The production schedulers serve the requests of `benchmarks.gpu.serving` over steps that take what the card was measured to take
(`gpu_decode_step.json`, `gpu_prefill_step.json`, `gpu_kernels.json`), interpolated between measured sizes. `bound` is what no
schedule exceeds on such steps: all rows are computed at the best measured rate, and nothing but contexts is read.

Wanted: an explanation of the measured rate within 5 %, and sizes of steps that reach SGLang's."""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.serving import BATCH, offline_load
from benchmarks.gpu.shapes import LARGE
from benchmarks.report import parser, write
from core.cost.steps import chunk_pairs
from sim.simulated_cluster import simulate
from sim.simulated_run import Arrival, SimConfig
from sim.virtual_loop import run_virtual

RESULTS = Path(__file__).parents[1] / "results"
SGLANG = 16_215.0
"""Output tokens per second that SGLang has published for such a card."""
BLOCK_TOKENS = 16
KV_BYTES = 54e9
"""The card's memory less weights and what is kept free."""
FEW = 256
"""With up to so many sequences a decode step is bound by reading the weights."""
SIZES = ((512, 8192), (256, 8192), (512, 2048), (1024, 8192), (1024, 2048), (1024, 1024))
"""The largest steps that are tried: (sequences, tokens). The run on the card had the first."""
Load = Sequence[tuple[tuple[int, ...], int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """`sim.catalogue.cost.ModelledStep`: what the rows of a step take, by interpolation, and its contexts and pairs besides."""

    rows_s: tuple[tuple[int, float], ...]
    """(rows, seconds), in order of rows."""
    context_s: float
    pair_s: float
    taken: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    """(tokens, sequences, seconds) of each step so far."""

    unread_decay = 0.0

    def step_s(self, num_tokens: int, context_tokens: int, num_pairs: float, num_seqs: int) -> float:
        pairs = max(0.0, num_pairs - context_tokens)
        found = self.of_rows(num_tokens) + self.context_s * context_tokens + self.pair_s * pairs
        self.taken.append((num_tokens, num_seqs, found))
        return found

    def of_rows(self, num_rows: int) -> float:
        after = bisect_left(self.rows_s, (num_rows, 0.0))
        if after == 0:
            return self.rows_s[0][1]
        if after == len(self.rows_s):
            most, seconds = self.rows_s[-1]
            return seconds * num_rows / most
        (low, low_s), (high, high_s) = self.rows_s[after - 1 : after + 1]
        return low_s + (high_s - low_s) * (num_rows - low) / (high - low)


def measured_steps() -> MeasuredSteps:
    """Read them. What contexts and pairs take is what the attention kernels took by themselves."""
    kernels = _rows("gpu_kernels")
    context_s = _kernel_s(kernels, "decode attention, bfloat16, batch 128 x 8192") / (128 * 8192)
    pair_s = _kernel_s(kernels, "prefill attention, 8192 of 8192") / chunk_pairs(0, 8192)
    rows_s: dict[int, float] = {}
    for row in (*_rows("gpu_decode_step").values(), *_rows("gpu_prefill_step").values()):
        if row.get("model") == LARGE.name and "replayed_ms" in row:
            rows_s[row["batch"]] = row["replayed_ms"] / 1e3 - context_s * row["batch"] * row["context"]
        elif row.get("model") == LARGE.name and "tokens" in row:
            rows_s[row["tokens"]] = row["step_ms"] / 1e3 - pair_s * chunk_pairs(0, row["tokens"])
    return MeasuredSteps(rows_s=tuple(sorted(rows_s.items())), context_s=context_s, pair_s=pair_s)


def _rows(name: str) -> dict[str, dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def _kernel_s(rows: dict[str, dict[str, Any]], name: str) -> float:
    """Return what a kernel takes in all layers."""
    return LARGE.layers * rows[name]["time_us"] * 1e-6


def served(load: Load, num_seqs: int, num_tokens: int) -> dict[str, Any]:
    """Serve the load. A step holds at most `num_seqs` sequences and `num_tokens` tokens."""
    steps = measured_steps()
    config = SimConfig(
        num_prefill=0,
        num_blocks=int(KV_BYTES / (LARGE.layers * 2 * 2 * LARGE.kv_heads * LARGE.head_dim * BLOCK_TOKENS)),
        num_layers=1,
        step=steps,
        slo=BATCH,
        overrides={
            "prefill_instances": 0,
            "engine.block_size": BLOCK_TOKENS,
            "engine.max_batch_tokens": num_tokens,
            "engine.max_num_seqs": num_seqs,
            "schedule.max_queued_requests": len(load),
        },
    )
    arrivals = [Arrival(0.0, prompt, most, number) for number, (prompt, most) in enumerate(load)]
    outcome = run_virtual(simulate(config, arrivals))
    wall_s, parts_s = max(outcome.last_token_at), dict.fromkeys(("prompts", "many", "few"), 0.0)
    for tokens, seqs, step_s in steps.taken:
        parts_s["prompts" if tokens > seqs else "many" if seqs > FEW else "few"] += step_s
    return {
        "max_num_seqs": num_seqs,
        "max_batch_tokens": num_tokens,
        "output_tokens_per_s": sum(map(len, outcome.tokens)) / wall_s,
        "wall_s": wall_s,
        "steps": len(steps.taken),
        "with_prompts_s": parts_s["prompts"],
        f"more_than_{FEW}_sequences_s": parts_s["many"],
        f"at_most_{FEW}_sequences_s": parts_s["few"],
    }


def bound(load: Load) -> dict[str, float]:
    """Return what no schedule exceeds."""
    steps = measured_steps()
    rows_s = min(seconds / rows for rows, seconds in steps.rows_s)
    contexts = sum(num * len(prompt) + num * (num - 1) / 2 for prompt, num in load)
    rows = sum(len(prompt) + num for prompt, num in load)
    computes_s, reads_s = rows * rows_s, contexts * steps.context_s
    num_output = sum(num for _, num in load)
    return {
        "computes_s": computes_s,
        "reads_contexts_s": reads_s,
        "output_tokens_per_s": num_output / (computes_s + reads_s),
        "longest_output_alone_s": max(num for _, num in load) * steps.of_rows(1),
    }


def main() -> None:
    args = parser(__doc__).parse_args()
    load = offline_load(LARGE)[: 8 if args.smoke else None]
    measured = _rows("gpu_serving")["offline"]["output_tokens_per_s"]
    found = [served(load, *sizes) for sizes in SIZES[: 1 if args.smoke else None]]
    most = bound(load)
    content = {
        "measured_tokens_per_s": measured,
        "sglang_tokens_per_s": SGLANG,
        "rows": found,
        "bound": most,
    }
    for row in found:
        print(", ".join(f"{name} {value:,.2f}" for name, value in row.items()))
    print(f"no schedule: {most['output_tokens_per_s']:,.0f} tokens/s; measured: {measured:,.0f}")
    write(args.json, "benchmarks.simulator.offline", content)


if __name__ == "__main__":
    main()

"""What `engine.deterministic` costs on a CPU: a forward pass with the ordinary operations and with the batch-invariant ones.

    python -m benchmarks.engine.deterministic [--json FILE] [--rounds N]

The shape of Qwen2.5-0.5B with 6 of its layers and random weights, one thread. Both are timed by turns; the figure is the ratio
of the medians. Prediction: 1.3 for prompts, where tiles of 64 rows lose little; 4 for one sequence in float32, whose row is
multiplied as 16 (the routine for a single row adds up in another order); 2 for 32 of them, which attend one by one."""

import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks.report import parser, write
from kernels.ops import AttentionMeta
from kernels.select import select_ops
from models.formats.dummy_weights import DummyWeights
from models.model import Model
from models.spec.model_spec import ModelSpec, RopeSpec

CPU = torch.device("cpu")
BLOCK_SIZE, CONTEXT = 16, 1024
STEPS = {
    "prompt of 512": [(512, 512)],
    "chunk of 256 behind 768": [(256, 1024)],
    "decode, 1 sequence": [(1, 1000)],
    "decode, 8": [(1, 1000)] * 8,
    "decode, 32": [(1, 1000)] * 32,
}
"""Sequences of (query tokens, context tokens)."""
SPEC = ModelSpec(
    architecture="Qwen2ForCausalLM", vocab_size=32768, hidden_size=896, intermediate_size=4864, num_layers=6, num_heads=14,
    num_kv_heads=2, head_dim=64, norm_eps=1e-6, max_context_tokens=4096, rope=RopeSpec("default", 1e6), tied=True,
    dtype="bfloat16", windows=(0,) * 6, qkv_bias=True,
)  # fmt: skip


class Bench:
    def __init__(self, spec: ModelSpec, dtype: torch.dtype, deterministic: bool) -> None:
        torch.manual_seed(0)
        ops = select_ops(CPU, deterministic=deterministic)
        self.model = Model(spec, ops, DummyWeights(dtype, CPU), CPU)
        blocks = 32 * CONTEXT // BLOCK_SIZE
        shape = (blocks, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        self.kv = [torch.randn(shape).to(dtype) for _ in range(spec.num_layers)]

    @torch.inference_mode()
    def step(self, lens: list[tuple[int, int]]) -> float:
        """Seconds of one forward pass with the logits of each sequence."""
        per_seq = CONTEXT // BLOCK_SIZE
        tables = [
            np.arange(i * per_seq, i * per_seq + -(-context // BLOCK_SIZE))
            for i, (_, context) in enumerate(lens)
        ]
        spans = [np.arange(context - query, context) for query, context in lens]
        slots = [
            table[span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE
            for table, span in zip(tables, spans, strict=True)
        ]
        queries, contexts = zip(*lens, strict=True)
        meta = AttentionMeta.build(queries, contexts, tables, np.concatenate(slots), CPU)
        positions = torch.from_numpy(np.concatenate(spans))
        last = torch.tensor(meta.query_starts[1:]) - 1
        started = time.perf_counter()
        hidden = self.model.forward(torch.zeros_like(positions), positions, self.kv, meta)
        self.model.logits(hidden[last])
        return time.perf_counter() - started


def measure(spec: ModelSpec, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    benches = {"ordinary": Bench(spec, dtype, False), "deterministic": Bench(spec, dtype, True)}
    found: dict[str, dict[str, float]] = {}
    for name, lens in STEPS.items():
        times: dict[str, list[float]] = {which: [] for which in benches}
        for number in range(rounds + 1):
            for which, bench in benches.items():
                elapsed = bench.step(lens)
                if number:  # the first one tries which tiles agree
                    times[which].append(elapsed * 1e3)
        medians = {f"{which}_ms": statistics.median(values) for which, values in times.items()}
        found[name] = {**medians, "ratio": medians["deterministic_ms"] / medians["ordinary_ms"]}
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    args = options.parse_args()
    spec, rounds = SPEC, args.rounds
    if args.smoke:
        spec, rounds = replace(SPEC, num_layers=1, windows=(0,), vocab_size=1024, intermediate_size=256), 1
    torch.set_num_threads(1)
    results = {
        str(dtype).removeprefix("torch."): measure(spec, dtype, rounds)
        for dtype in (torch.float32, torch.bfloat16)
    }
    for dtype, steps in results.items():
        for name, row in steps.items():
            print(f"{dtype:9s} {name:24s} " + "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
    write(args.json, "benchmarks.engine.deterministic", {"results": results})


if __name__ == "__main__":
    main()

"""What copies of hot experts and their moves bring, and what they cost: four real ranks over gloo on one machine.

    python -m benchmarks.parallel.expert_balance [--json FILE]

A DeepSeek-V3 of 4 layers (3 with 32 experts of 512 x 256, 4 of them chosen; 151 MB of experts in float32), whose router prefers
some experts by its choice bias. 12 steps of 256 rows on ep 4; then each rank places the experts anew by what was counted, with 8
slots for copies; 12 steps more. Counted at the ranks: pairs of row and expert that each computes. `exchange`: all of a layer's
all-to-alls, waiting for slower ranks included. Loading: the same checkpoint by real ranks of other meshes, the largest of each.

Moving: between the two placements, there and back, all at once or a part before each step, by how many experts (1.6 MB each) a
rank may get in one; limits by turns, medians. Deciding, in one process: a layer of 256 experts and 32 copies on 32 ranks, with
loads that fall off as 1 / rank.

Predictions: the busiest rank computes 1.6 times the mean before and less than 1.05 times after; hidden states change by
float32's rounding only. On four ranks that share two cores a step gets hardly shorter: what is waited for is the cores. A rank of
ep 4 or dp 4 reads 30 % of what one rank does. Of the 0.8 s that all experts take at once a part of one expert for each rank takes
a tenth, of which most is the same whatever is moved; all parts together take twice as long. A layer is decided in 20 ms."""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from benchmarks.parallel.parallel_ranks import loading
from benchmarks.parallel.rank_processes import on_ranks
from benchmarks.report import parser, write
from engine.ranks.model_part import ModelPart, load_part
from kernels.ops import AttentionMeta
from parallel.balance import Placement, first_placement, rebalance
from parallel.comm import Comm
from parallel.mesh import Mesh
from parallel.moves import next_moves

RANKS, SPARE, STEPS, ROWS, BLOCK = 4, 8, 12, 256, 16
ALL, ROUNDS = 1 << 20, 6
LIMITS = (ALL, 8, 4, 2, 1)
"""Experts that a rank gets before one step."""
CPU = torch.device("cpu")
MESHES = (Mesh(), Mesh(ep=2), Mesh(ep=4), Mesh(dp=4), Mesh(tp=2, dp=2))


class Watched:
    """A Comm that counts what its all-to-alls bring and how long they take."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.all_reduce, self.all_gather = comm.all_reduce, comm.all_gather
        self.send, self.recv, self.close = comm.send, comm.recv, comm.close
        self._comm = comm
        self.num_pairs, self.seconds, self.num_layers = 0, 0.0, 0

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        started = time.perf_counter()
        got = self._comm.all_to_all(x, sent, received)
        self.seconds += time.perf_counter() - started
        if x.ndim == 2 and x.dtype == torch.int64:  # each row's slots here; -1 are others'
            self.num_pairs += int((got >= 0).sum())
            self.num_layers += 1
        return got


def forward(part: ModelPart, tokens: Tensor) -> Tensor:
    layout = part.model.spec.kv_layout(BLOCK, "float32")
    num_blocks = -(-len(tokens) // BLOCK)
    kv = [torch.zeros(num_blocks, layout.num_planes, layout.num_kv_heads, BLOCK, layout.head_dim)] * 4
    span = np.arange(len(tokens))
    meta = AttentionMeta.build([len(tokens)], [len(tokens)], [np.arange(num_blocks)], span, CPU)
    return part.model.forward(tokens, torch.from_numpy(span), kv, meta)


@torch.inference_mode()
def measure(folder: Path, num_steps: int, num_rounds: int, rank: int, path: str) -> dict[str, Any]:
    store = dist.FileStore(path)  # pyright: ignore[reportPrivateImportUsage]
    part = load_part(folder, "float32", CPU, Mesh(ep=RANKS), rank=rank, store=store, num_spare=SPARE)
    spread = part.spread
    assert spread is not None
    watched = spread._all = Watched(spread._all)  # pyright: ignore[reportPrivateUsage]
    batches = torch.randint(0, 1024, (num_steps, ROWS), generator=torch.Generator().manual_seed(1))
    part.model.expert_load.zero_()

    def steps() -> tuple[dict[str, float], list[Tensor]]:
        watched.num_pairs = watched.num_layers = 0
        watched.seconds = 0.0
        took: list[float] = []
        out: list[Tensor] = []
        for batch in batches:
            started = time.perf_counter()
            out.append(forward(part, batch))
            took.append(time.perf_counter() - started)
        exchange_ms = 1e3 * watched.seconds / watched.num_layers
        return {
            "pairs": watched.num_pairs,
            "step ms": 1e3 * statistics.median(took),
            "exchange ms": exchange_ms,
        }, out

    before, hidden = steps()
    counts = part.model.expert_load.tolist()
    first = {layer: spread.placement(layer) for layer in part.model.experts}
    even = {layer: rebalance(first[layer], counts[layer], RANKS) for layer in first}
    num_bytes = part.relocate({layer: next_moves(first[layer], even[layer], RANKS, ALL) for layer in first})
    after, others = steps()
    change = max(float((a - b).abs().max()) for a, b in zip(hidden, others, strict=True))
    walks = {most: list[list[float]]() for most in LIMITS}
    for _ in range(num_rounds):
        for most, found in walks.items():
            found += [walk(part, target, most) for target in (first, even)]
    part.comms.close()
    return {"before": before, "after": after, "bytes": num_bytes, "change": change, "walks": walks}


def walk(part: ModelPart, target: dict[int, Placement], most: int) -> list[float]:
    """To `target`, layer by layer (or all layers at once): the seconds of each part."""
    spread, took = part.spread, list[float]()
    assert spread is not None
    together = [list(target)] if most == ALL else [[layer] for layer in target]
    for layers in together:
        while any(spread.placement(layer) != target[layer] for layer in layers):
            moves = {i: next_moves(spread.placement(i), target[i], RANKS, most) for i in layers}
            started = time.perf_counter()
            part.relocate(moves)
            took.append(time.perf_counter() - started)
    return took


def walked(answers: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By limit: of the slowest rank."""
    found: dict[str, dict[str, float]] = {}
    for most in LIMITS:
        walks = [
            [max(parts) for parts in zip(*each, strict=True)]
            for each in zip(*(a["walks"][most] for a in answers), strict=True)
        ]
        found["all at once" if most == ALL else f"{most} for each rank"] = {
            "parts": statistics.median(len(parts) for parts in walks),
            "longest part ms": 1e3 * statistics.median(max(parts) for parts in walks),
            "median part ms": 1e3 * statistics.median(part for parts in walks for part in parts),
            "all parts ms": 1e3 * statistics.median(sum(parts) for parts in walks),
        }
    return found


def deciding() -> dict[str, float]:
    """Median of 9, in ms."""
    first, rng = first_placement(256, 32, 32), random.Random(1)
    decided: list[float] = []
    planned: list[float] = []
    for _ in range(9):
        loads = [1e6 / (1 + place) for place in rng.sample(range(256), 256)]
        started = time.perf_counter()
        target = rebalance(first, loads, 32)
        decided.append(time.perf_counter() - started)
        started = time.perf_counter()
        next_moves(first, target, 32, 1)
        planned.append(time.perf_counter() - started)
    return {
        "a layer's placement, ms": 1e3 * statistics.median(decided),
        "its next moves, ms": 1e3 * statistics.median(planned),
    }


def summary(answers: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for when in ("before", "after"):
        pairs = [answer[when]["pairs"] for answer in answers]
        found[f"busiest rank by the mean, {when}"] = max(pairs) * len(pairs) / sum(pairs)
        for name in ("step ms", "exchange ms"):
            found[f"{name}, {when}"] = statistics.median(answer[when][name] for answer in answers)
    found["MB moved, all ranks"] = sum(answer["bytes"] for answer in answers) / 1e6
    found["largest change of a hidden element"] = max(answer["change"] for answer in answers)
    return found


def checkpoint(folder: Path) -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.4 / (1 + torch.randperm(32)).float().sqrt())
    model.save_pretrained(folder)


def main() -> None:
    args = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint(folder)
        steps, rounds, meshes = (2, 1, MESHES[:2]) if args.smoke else (STEPS, ROUNDS, MESHES)
        answers = on_ranks(partial(measure, folder, steps, rounds), RANKS)
        results = {
            "balancing, ep 4": summary(answers),
            "moving, ep 4": walked(answers),
            "deciding": deciding(),
            "loading, worst rank": loading(folder, meshes),
        }
    print(json.dumps(results, indent=1))
    write(
        args.json,
        "benchmarks.parallel.expert_balance",
        {"note": "two cores, shared with other work: compare within a table", "results": results},
    )


if __name__ == "__main__":
    main()

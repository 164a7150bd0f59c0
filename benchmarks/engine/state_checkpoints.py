"""What checkpoints of recurrent states cost, and what a prompt gains that goes on from one.

    python -m benchmarks.engine.state_checkpoints [--json FILE] [--rounds N]

The production scheduler and runner on a CPU, with made-up weights of two small hybrids. Prompts share a prefix and differ in
their last 32 tokens. In turns: without a prefix cache; the first prompt, which leaves a checkpoint at its end; the second one,
which finds keys and values alone and leaves a checkpoint where the two differ; the third one, which goes on from there. Times are
to the first token, the least of all rounds.

Then what it takes to copy a state out of the pool to host memory, and back, beside computing the tokens that lie between two
checkpoints of a sequence that generates, which is what is lost without one."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import parser, write
from core.config.cluster_config import EngineConfig
from core.kv import KVShard, RankPool
from core.plan import BlockCopy
from core.types import Request, SamplingParams
from decode.headroom_policy import HeadroomPolicy
from engine.execution.pools.kv_pool import KVPool
from engine.execution.runner import Runner
from engine.planning.checkpointing import blocks_apart
from engine.planning.step_scheduler import StepScheduler
from engine.tiers.block_pieces import BlockPieces
from models.causal_model import CausalModel
from models.registry import LoadOptions, load_model

PREDICTION = (
    "With 1,024 shared tokens the prompt that finds a checkpoint takes 0.10 of the time to its first token, with 256 it takes "
    "0.30; making a checkpoint adds 5 % and 15 %, most of it a step of few tokens more; copying a state takes 1 % of a step of "
    "512 tokens. Saving a state to host memory and restoring it take 2 % each of computing the tokens between two checkpoints"
)
NUM_OWN = 32
PREFIXES = [256, 1024]
_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Mamba-2 (layers of Granite-4.0-H-350M)": {
        **_COMMON,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_local_experts": 0,
        "layer_types": ["attention" if layer == 5 else "mamba" for layer in range(8)],
        "mamba_n_heads": 48,
        "mamba_d_state": 128,
        "mamba_d_head": 32,
    },
    "gated delta net (Qwen3-Next, narrow)": {
        **_COMMON,
        "architectures": ["Qwen3NextForCausalLM"],
        "head_dim": 64,
        "intermediate_size": 2048,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}


class OneAfterAnother:
    """An instance that serves one request at a time."""

    def __init__(self, model: CausalModel, num_tokens: int, prefix_cache: bool) -> None:
        config = EngineConfig(prefix_cache=prefix_cache)
        self.layout = layout = model.spec.kv_layout(config.block_size, "float32")
        num_blocks = 8 * layout.state_blocks + 4 * num_tokens // config.block_size
        shard = KVShard.whole(layout)
        buffer = memoryview(bytearray(shard.pool_bytes(num_blocks)))
        self.pool = KVPool(shard, num_blocks, buffer)
        self._pieces = BlockPieces(buffer, [RankPool(shard=shard, num_blocks=num_blocks)])
        states = layout.state_blocks
        self._runner = Runner(model, self.pool, config.block_size, num_state_blocks=states)
        self.scheduler = StepScheduler(config, num_blocks, 1 << 16, HeadroomPolicy(), num_state_blocks=states)

    def ttft_s(self, name: str, prompt: tuple[int, ...]) -> float:
        started = time.perf_counter()
        self.scheduler.sequences.add(
            Request(id=name, prompt=prompt, sampling=SamplingParams(max_tokens=1), reply_to="")
        )
        while (plan := self.scheduler.plan(0.0)) is not None:
            self.scheduler.commit(plan, self._runner.step(plan), 0.0)
        return time.perf_counter() - started

    def copy_s(self) -> float:
        """Copy one state from block to block."""
        states, size = self.layout.state_blocks, self.layout.block_size
        started = time.perf_counter()
        self.pool.copy_blocks([BlockCopy(block, states + block, size) for block in range(states)])
        return time.perf_counter() - started

    def below_s(self) -> tuple[float, float]:
        """Copy one state to host memory, and back."""
        contents: list[bytes] = []
        started = time.perf_counter()
        for block in range(self.layout.state_blocks):
            self._pieces.save(block, contents.append)
        saved = time.perf_counter()
        for block, content in enumerate(contents):
            self._pieces.scatter(block, memoryview(content))
        return saved - started, time.perf_counter() - saved


def between(model: CausalModel, rounds: int) -> dict[str, float]:
    """Seconds to compute what lies between two checkpoints, and to save and restore a state."""
    num_blocks = model.spec.kv_layout(EngineConfig().block_size, "float32").state_blocks
    size = EngineConfig().block_size * blocks_apart(num_blocks)
    found: dict[str, float] = {"apart_tokens": size}
    for _ in range(rounds + 1):
        cold = OneAfterAnother(model, size, prefix_cache=False)
        save_s, restore_s = cold.below_s()
        taken = {"save": save_s, "restore": restore_s, "compute_apart": cold.ttft_s("c", (7,) * size)}
        found |= {key: min(value, found.get(key, value)) for key, value in taken.items()}
    return found


def a_round(model: CausalModel, size: int, seed: int) -> dict[str, float]:
    """Seconds of each kind of prompt with `size` shared tokens."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 4000, (4, size + NUM_OWN), generator=draw)
    ids[:, :size] = ids[0, :size]
    prompts = [tuple(row) for row in ids.tolist()]
    cold, warm = (OneAfterAnother(model, size + NUM_OWN, cache) for cache in (False, True))
    found = {"without": cold.ttft_s("c", prompts[3]), "copy": min(warm.copy_s() for _ in range(5))}
    for name, prompt in zip(("first", "second", "third"), prompts, strict=False):
        found[name] = warm.ttft_s(name, prompt)
    hit = warm.scheduler.load().prefix_tokens[1]
    assert hit == size, f"{hit} tokens were found"
    return found


def measure(shape: str, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        model = load_model(
            Path(folder), "float32", torch.device("cpu"), options=LoadOptions(load_format="dummy")
        )
    layout = model.spec.kv_layout(16, "float32")
    rows: list[dict[str, Any]] = []
    apart = between(model, rounds)
    for size in sizes:
        runs = [a_round(model, size, seed) for seed in range(rounds + 1)][1:]
        least = {key: min(run[key] for run in runs) for key in runs[0]}
        row = {
            "shape": shape,
            "shared_tokens": size,
            "checkpoint_mib": layout.state_tokens * layout.token_bytes / 2**20,
            "checkpoint_as_tokens": layout.state_tokens,
            "copy_ms": 1e3 * least["copy"],
            "save_ms": 1e3 * apart["save"],
            "restore_ms": 1e3 * apart["restore"],
            "apart_tokens": apart["apart_tokens"],
            "compute_apart_ms": 1e3 * apart["compute_apart"],
            "without_cache_ms": 1e3 * least["without"],
            "copy_by_without": least["copy"] / least["without"],
            **{f"{key}_by_without": least[key] / least["without"] for key in ("first", "second", "third")},
        }
        rows.append(row)
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    torch.set_num_threads(1)  # two that share busy cores are many times slower than one
    sizes, rounds = ([128], 1) if args.smoke else (PREFIXES, args.rounds)
    rows = [row for shape in SHAPES for row in measure(shape, sizes, rounds)]
    write(args.json, "benchmarks.engine.state_checkpoints", {"prediction": PREDICTION, "rows": rows})


if __name__ == "__main__":
    main()

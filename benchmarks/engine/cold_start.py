"""How long a rank of a model of 1B takes from the start of its process to its first token, by phase, and what it takes of memory.

    python -m benchmarks.engine.cold_start [--json FILE] [--rounds 3] [--smoke]

A checkpoint of Llama-3.2-1B's shape in bfloat16, with random weights; a prompt of 128 tokens; one thread. Each start is a process
of its own (`first_token.py`). `as stored` packs matrices from the 16 bits in which they are stored; `through floats` makes floats
of 32 bits of them first, as it was before. The file is in the page cache. Both take turns; medians of the rounds."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.report import parser, write

PREDICTION = (
    "as stored takes 0.6 of the time of reading and packing that through floats does; most memory is "
    "resident at the end of loading either way: the file's pages, the panels and the embedding in 32 bits. The largest phase is "
    "packing before, and reading afterwards"
)
WAYS = {"as stored": (), "through floats": ("--through-floats",)}


def shape_of_model(smoke: bool) -> dict[str, Any]:
    """Llama-3.2-1B's config.json; a small one in smoke mode."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 1024 if smoke else 128_256,
        "hidden_size": 64 if smoke else 2048,
        "intermediate_size": 128 if smoke else 8192,
        "num_hidden_layers": 2 if smoke else 16,
        "num_attention_heads": 4 if smoke else 32,
        "num_key_value_heads": 2 if smoke else 8,
        "head_dim": 16 if smoke else 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def make_checkpoint(folder: Path, smoke: bool) -> None:
    """Rows repeat each other, since to draw a billion numbers takes longer than to load them."""
    config = shape_of_model(smoke)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config["head_dim"] * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    some = 0.02 * torch.randn(64, max(hidden, inner), generator=torch.Generator().manual_seed(0))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return some[:, :columns].bfloat16().repeat(rows // 64 + 1, 1)[:rows].contiguous()

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {
            f"{prefix}{name}_layernorm.weight": torch.ones(hidden) for name in ("input", "post_attention")
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def one_start(folder: Path, way: str) -> dict[str, Any]:
    begun_at = str(time.perf_counter())
    words = [sys.executable, "-m", "benchmarks.engine.first_token", str(folder), begun_at, *WAYS[way]]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return json.loads(done.stdout.splitlines()[-1])


def starts(folder: Path, rounds: int) -> dict[str, dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            found[way].append(one_start(folder, way))
    return {way: _medians(runs) for way, runs in found.items()}


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    def phases(kind: str) -> dict[str, float]:
        return {
            phase: round(statistics.median(run[kind][phase] for run in runs), 3) for phase in runs[0][kind]
        }

    return {
        "seconds": phases("seconds"),
        "in_all_s": round(statistics.median(sum(run["seconds"].values()) for run in runs), 3),
        "processor_s": phases("processor_s"),
        "most_resident_mb": round(statistics.median(run["most_resident_bytes"] for run in runs) / 1e6),
        "own_mb": round(statistics.median(run["own_bytes"] for run in runs) / 1e6),
    }


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """As stored by through floats, of reading and packing: on the wall, and of the processor, on which others weigh less."""
    found: dict[str, float] = {}
    for kind in ("seconds", "processor_s"):
        kept, floats = (results[way][kind]["reading"] + results[way][kind]["packing"] for way in WAYS)
        found[kind] = round(kept / floats, 3)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder, args.smoke)
        results = starts(folder, 1 if args.smoke else args.rounds)
    content = {
        "prediction": PREDICTION,
        "threads": 1,
        "results": results,
        "as_stored_by_through_floats": ratios(results),
    }
    print(json.dumps(content, indent=1))
    write(args.json, f"benchmarks.engine.cold_start --rounds {args.rounds}", content)


if __name__ == "__main__":
    main()

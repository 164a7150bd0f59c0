"""What a rank holds of a quantised checkpoint, kept as it is stored or made bfloat16, and what keeping it would cost a CPU.

    python -m benchmarks.engine.quantised_weights [--json FILE] [--rounds N]

A model of Llama's shape (hidden 1024, 4 layers) with random bits, on one rank and as the first of two. Bytes are those of all
tensors that the loaded model holds. PyTorch's operations have no product with packed
weights, so that `Ops.linear` makes them floats in every step:
the time of a step of 8 sequences so, over that with floats made at loading; medians of steps in turns, one thread."""

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import parser, write
from engine.sizing.model_dims import dims_of, rules_of
from kernels.packed import Kind
from kernels.torch.reference import reference_ops
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint
from models.model import Model
from parallel.mesh import Mesh
from parallel.rules import Sharding
from tests.models.checkpoints import FAMILIES, Paged, make
from tests.models.stored import compressed, mxfp4_checkpoint, packed_parts, quantise_all, scaled

PREDICTION = (
    "matrices take 0.5 of bfloat16 in 8 bits, 0.26 in four with groups of 128 and 0.27 in MXFP4, the whole model a little more "
    "for its embedding; on a CPU a decode step that makes floats each time takes 5 to 30 times as long, so that floats are made "
    "at loading"
)
SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "num_hidden_layers": 4, "vocab_size": 2048,
}  # fmt: skip
ALL: frozenset[Kind] = frozenset(("float8", "int8", "four_bit", "mxfp4"))
GROUP, BATCH = 128, 8


def eight_bit(folder: Path, kind: str, strategy: str) -> None:
    def quantise(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scales = scaled(weight, kind, strategy, (128, 128))
        return {"weight": values, "weight_scale": scales}

    block = {"block_structure": (128, 128)} if strategy == "block" else {}
    how = compressed(num_bits=8, type=kind, strategy=strategy, **block)
    how["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": kind}
    quantise_all(folder, "llama", quantise, SIZES, quantization_config=how)


def four_bit(folder: Path, kind: str) -> None:
    how = {"quant_method": kind, "bits": 4, "group_size": GROUP}
    quantise_all(folder, "llama", lambda w: packed_parts(kind, w, GROUP), SIZES, quantization_config=how)


def mxfp4(folder: Path) -> None:
    mxfp4_checkpoint(folder, hidden_size=1024, intermediate_size=1024, num_local_experts=8)


def plain(folder: Path) -> None:
    config = FAMILIES["llama"](random.Random(0), 0)
    for name, size in SIZES.items():
        setattr(config, name, size)
    make(folder, config, seed=0)


FORMATS: dict[str, Callable[[Path], None]] = {
    "bfloat16": plain,
    "FP8, one scale": lambda folder: eight_bit(folder, "float", "tensor"),
    "FP8, a scale for each channel": lambda folder: eight_bit(folder, "float", "channel"),
    "FP8, blocks of 128 x 128": lambda folder: eight_bit(folder, "float", "block"),
    "INT8, a scale for each channel": lambda folder: eight_bit(folder, "int", "channel"),
    "AWQ, groups of 128": lambda folder: four_bit(folder, "awq"),
    "GPTQ, groups of 128": lambda folder: four_bit(folder, "gptq"),
    "MXFP4 experts (gpt-oss)": mxfp4,
}


def load(folder: Path, keeps: frozenset[Kind], tp: int = 1, dtype: torch.dtype = torch.bfloat16) -> Model:
    """The first of `tp` ranks."""
    spec, cpu = read_spec(folder), torch.device("cpu")
    sharding = Sharding(dims_of(spec), Mesh(tp=tp), 0, rules_of(spec))
    checkpoint = Checkpoint(folder, dtype, cpu, sharding, spec.quantisation, keeps)
    model = Model(spec, reference_ops(), checkpoint, cpu)
    checkpoint.close()
    return model


def held_bytes(folder: Path, keeps: frozenset[Kind], tp: int) -> int:
    before = _live_bytes()
    model = load(folder, keeps, tp)
    held = _live_bytes() - before
    del model
    return held


def _live_bytes() -> int:
    gc.collect()
    with torch.inference_mode():
        # isinstance would ask torch's deprecated objects for their class, which warns
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def step_s(model: Model) -> float:
    """Seconds of a step of BATCH sequences, one token each."""
    paged = Paged(model, BATCH, random.Random(0))
    started = time.perf_counter()
    paged.step([(seq, 0, [5]) for seq in range(BATCH)])
    return time.perf_counter() - started


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tp in (1, 2):
        kept, floats = held_bytes(folder, ALL, tp), held_bytes(folder, frozenset(), tp)
        found |= {f"kept_bytes_tp{tp}": kept, f"floats_bytes_tp{tp}": floats}
    models = [load(folder, keeps, dtype=torch.float32) for keeps in (ALL, frozenset())]
    times = [[step_s(model) for model in models] for _ in range(rounds)]
    kept_s, floats_s = (statistics.median(column) for column in zip(*times, strict=True))
    return found | {"cpu_step_kept_s": kept_s, "cpu_step_floats_s": floats_s}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    args = options.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(
        f"predicted: {PREDICTION}\n{'':32} {'MB kept':>8} {'floats':>8} {'ratio':>6}  tp=2: kept, ratio   CPU step"
    )
    names, rounds = ([*FORMATS], args.rounds) if not args.smoke else (["INT8, a scale for each channel"], 1)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            FORMATS[name](Path(folder))
            row: dict[str, Any] = {"format": name, **measure(Path(folder), rounds)}
        rows.append(row)
        one, two = (row[f"kept_bytes_tp{tp}"] / row[f"floats_bytes_tp{tp}"] for tp in (1, 2))
        print(
            f"{name:32} {row['kept_bytes_tp1'] / 1e6:8.1f} {row['floats_bytes_tp1'] / 1e6:8.1f} {one:6.2f}  "
            f"{row['kept_bytes_tp2'] / 1e6:8.1f} {two:6.2f}   x {row['cpu_step_kept_s'] / row['cpu_step_floats_s']:.1f}",
            flush=True,
        )
    content = {"prediction": PREDICTION, "sizes": SIZES, "formats": rows}
    write(args.json, "benchmarks.engine.quantised_weights", content)


if __name__ == "__main__":
    main()

"""A decode step launched kernel by kernel and replayed from a CUDA graph, of the same sequences, interleaved:
`python -m benchmarks.gpu.decode_step --json FILE` (one GPU, two minutes). Weights are random; what is measured is a whole step
of a rank, with the filling of its inputs, greedy sampling, and the copy of new KV to host memory.

Predicted, before anything was run on a GPU: some ten launches a layer at about 10 µs each from Python bound a launched step of
the small model at 2 to 4 ms whatever its batch, and a replayed one reads its weights in 0.4 ms: 4 times as fast at 1 to 32
sequences, 2 times at 128. The large model's weights alone take 4 ms: 1.0 to 1.3.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.decode_step --interpret-smoke` runs it once, tiny, without a GPU: its times mean
nothing."""

import json
import mmap
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.session import begin, parser, write
from core.kv import KVShard
from core.plan import NewSeq, SeqWork, StepPlan
from core.types import SamplingParams
from engine.execution.decode_graphs import DecodeGraphs
from engine.execution.graph_capture import CudaCapture, again
from engine.execution.mirrored_pool import MirroredPool
from engine.execution.runner import Runner
from kernels.triton.ops import triton_ops
from kernels.triton.platform import INTERPRETED
from models.dummy_weights import DummyWeights
from models.families import read_spec
from models.model import Model

BLOCK_SIZE = 16
_ROUNDS = 2 if INTERPRETED else 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    batches: tuple[int, ...]


SIZES = (
    Size(
        name="0.5B",
        layers=24,
        hidden=896,
        inner=4864,
        heads=14,
        kv_heads=2,
        vocab=151936,
        context=1024,
        batches=(1, 8, 32, 128),
    ),
    Size(
        name="8B",
        layers=32,
        hidden=4096,
        inner=14336,
        heads=32,
        kv_heads=8,
        vocab=128256,
        context=1024,
        batches=(1, 8, 32, 128),
    ),
)
SMOKE = (
    Size(
        name="tiny", layers=2, hidden=32, inner=48, heads=2, kv_heads=1, vocab=61, context=40, batches=(1, 3)
    ),
)


def model_of(size: Size, device: torch.device) -> Model:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": size.hidden, "vocab_size": size.vocab,
        "intermediate_size": size.inner, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        spec = read_spec(Path(folder))
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    return Model(spec, triton_ops(device), DummyWeights(dtype, device), device)


def plan_of(step: int, batch: int, context: int, known: bool) -> StepPlan:
    """The last token of `batch` contexts of `context` tokens, in blocks of their own."""
    blocks = -(-context // BLOCK_SIZE)
    sampling = SamplingParams(temperature=0.0, max_tokens=4096)
    new = () if known else tuple(NewSeq(str(i), (2,) * context, context, sampling) for i in range(batch))
    work = tuple(
        SeqWork(
            key=str(i),
            start=context - 1,
            count=1,
            block_ids=tuple(range(i * blocks, (i + 1) * blocks)),
            samples=True,
        )
        for i in range(batch)
    )
    return StepPlan(step=step, new=new, copies=(), work=work, drop=())


@torch.inference_mode()
def measure(size: Size, device: torch.device) -> list[dict[str, object]]:
    model = model_of(size, device)
    num_blocks = max(size.batches) * -(-size.context // BLOCK_SIZE)
    shard = KVShard.whole(model.spec.kv_layout(BLOCK_SIZE, "float32" if INTERPRETED else "bfloat16"))
    pool = MirroredPool(shard, num_blocks, memoryview(mmap.mmap(-1, shard.pool_bytes(num_blocks))), device)
    capture = again if INTERPRETED else CudaCapture(device)
    most_blocks = -(-model.spec.max_context_tokens // BLOCK_SIZE)
    graphs = DecodeGraphs(model, pool, BLOCK_SIZE, most_blocks, size.batches, capture)
    runners = {
        "launched": Runner(model, pool, BLOCK_SIZE),
        "replayed": Runner(model, pool, BLOCK_SIZE, graphs=graphs),
    }
    rows: list[dict[str, object]] = []
    for batch in size.batches:
        times: dict[str, list[float]] = {name: [] for name in runners}
        said: dict[str, list[int]] = {}
        for step in range(_ROUNDS + 1):
            for name, runner in runners.items():
                result = runner.step(plan_of(step, batch, size.context, known=step > 0))
                assert result.replayed == (name == "replayed")
                said[name] = [one.token for one in result.sampled]
                times[name] += [result.duration_s] if step else []
        alike = sum(a == b for a, b in zip(said["launched"], said["replayed"], strict=True)) / batch
        medians = {f"{name}_ms": 1e3 * statistics.median(each) for name, each in times.items()}
        rows.append(
            {"model": size.name, "batch": batch, "context": size.context, **medians, "tokens_alike": alike}
        )
    return rows


def main() -> None:
    options = parser(__doc__)
    args = options.parse_args()
    device = begin(args.interpret_smoke)
    rows: list[dict[str, object]] = []
    print(f"{'':6} {'batch':>6} {'launched ms':>12} {'replayed ms':>12} {'times':>6} {'alike':>6}")
    for size in SMOKE if INTERPRETED else SIZES:
        for row in measure(size, device):
            launched, replayed = float(row["launched_ms"]), float(row["replayed_ms"])  # type: ignore[arg-type]
            print(
                f"{row['model']:6} {row['batch']:6} {launched:12.2f} {replayed:12.2f} {launched / replayed:6.2f} "
                f"{row['tokens_alike']:6.2f}",
                flush=True,
            )
            rows.append(row)
    write(args.json, "benchmarks.gpu.decode_step", device, {"steps": rows})


if __name__ == "__main__":
    main()

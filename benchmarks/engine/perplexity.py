"""What each format of weights and of KV loses on the text that was held out of the embedded model's training.

    python -m benchmarks.engine.perplexity [--json FILE] [--smoke]

The modules of the standard library that `tools/train_embedded.py` held out, in windows of 1,024 tokens, through a whole cluster
in one process: the logarithms of the prompt's probabilities, as the API's `prompt_logprobs` gives them. `transformers` is the
same checkpoint by that library in float32, which float32 here has to equal. GGUF files are made of the checkpoint by the `gguf`
package; as in files of llama.cpp, the embedding of Q4_0 has more bits (Q8_0)."""

import asyncio
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaForCausalLM

from benchmarks.report import parser, write
from cluster.ingress.delivery.frontend import Frontend
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig, load
from core.types import Request, SamplingParams
from kernels.cpu import library
from models.files.hub import resolve
from models.text.tokenizer import load_tokenizer
from tests.models.gguf_files import write_checkpoint
from tools.train_embedded import read_corpus

PREDICTION = (
    "16 bits lose nothing (below 0.0001 nats), int8 and Q8_0 0.002 nats, int4 0.037 nats, as it did with a scale of 16 bits for "
    "each 32 inputs in place of steps; Q4_0 as much; KV in int8 0.001 nats, in float8 0.01"
)
WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    settings: dict[str, Any]
    """The configuration's keys, dotted."""
    gguf: str = ""
    """The kind of a GGUF file's matrices; empty: the checkpoint as it is."""
    int4_group: int = 256
    """Inputs that share a scale; each 32 of them have a step of their own."""
    bits: float
    """What a weight of a large matrix takes, scales included."""


FORMATS = {
    "float32": Format(settings={"model.dtype": "float32"}, bits=32),
    "16 bits (`auto`)": Format(settings={}, bits=16),
    "bfloat16": Format(settings={"model.dtype": "bfloat16"}, bits=16),
    "int8": Format(settings={"model.quantization": "int8"}, bits=8),
    "int4, groups of 32": Format(settings={"model.quantization": "int4"}, bits=4.3125),
    "int4, a scale for 128": Format(settings={"model.quantization": "int4"}, int4_group=128, bits=4.375),
    "int4, a scale for 1,024": Format(
        settings={"model.quantization": "int4"}, int4_group=1024, bits=4.265625
    ),
    "GGUF Q8_0": Format(settings={}, gguf="Q8_0", bits=8.5),
    "GGUF Q4_0": Format(settings={}, gguf="Q4_0", bits=4.5),
    "16 bits, KV int8": Format(settings={"engine.kv_dtype": "int8"}, bits=16),
    "16 bits, KV float8": Format(settings={"engine.kv_dtype": "float8"}, bits=16),
    "int8, KV int8": Format(settings={"model.quantization": "int8", "engine.kv_dtype": "int8"}, bits=8),
}
SMOKE = ("float32", "int4, a scale for 128", "GGUF Q4_0", "16 bits, KV int8")


async def nats_of_prompts(config: ClusterConfig, windows: Sequence[tuple[int, ...]]) -> float:
    """The mean over all tokens but the first of each window."""
    async with LocalCluster.running(config) as cluster:
        scored = [await scores(cluster.frontend, window) for window in windows]
    return -sum(map(sum, scored)) / sum(map(len, scored))


async def scores(frontend: Frontend, window: tuple[int, ...]) -> list[float]:
    request = Request(
        id=frontend.new_request_id(),
        prompt=window,
        sampling=SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=0),
        reply_to=frontend.address,
    )
    return [score.logprob async for token in frontend.generate(request) for score in token.prompt_scores]


def nats_of(form: Format, windows: Sequence[tuple[int, ...]], folder: Path) -> float:
    path = "embedded"
    if form.gguf:
        path = str(folder / f"{form.gguf}.gguf")
        write_checkpoint(Path(path), resolve("embedded"), form.gguf, "llama", "Q8_0")
    settings = {"prefill_instances": 0, "model.path": path, "engine.kv_bytes": 64 << 20, **form.settings}
    with patch("kernels.cpu.prepacked.INT4_GROUP", form.int4_group):
        return asyncio.run(nats_of_prompts(load({}, {}, settings), windows))


@torch.inference_mode()
def nats_by_transformers(windows: Sequence[tuple[int, ...]]) -> float:
    model: Any = LlamaForCausalLM.from_pretrained(resolve("embedded"), dtype=torch.float32)
    total = 0.0
    for window in windows:
        ids = torch.tensor([window])
        total += float(model(ids, labels=ids).loss) * (len(window) - 1)
    return total / sum(len(window) - 1 for window in windows)


def held_out_windows(smoke: bool) -> list[tuple[int, ...]]:
    """Return windows of `WINDOW` tokens; what is left over is not scored."""
    tokenizer = load_tokenizer(resolve("embedded"))
    ids = [token for text in read_corpus()[1] for token in tokenizer.encode(text)]
    size, most = (64, 1) if smoke else (WINDOW, len(ids))
    return [tuple(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size)][:most]


def main() -> None:
    args = parser(__doc__).parse_args()
    windows = held_out_windows(args.smoke)
    exact = nats_by_transformers(windows)
    rows: list[dict[str, Any]] = []
    print(f"predicted: {PREDICTION}\n{'':20} {'bits':>6} {'nats a token':>13} {'loss':>9} {'perplexity':>11}")
    print(f"{'transformers':20} {32:6.2f} {exact:13.5f} {0:9.5f} {math.exp(exact):11.4f}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        library.native()  # Its library stays where it is cached.
        stack.enter_context(patch.dict("os.environ", {"XDG_CACHE_HOME": str(folder)}))
        for name in SMOKE if args.smoke else FORMATS:
            form = FORMATS[name]
            nats = nats_of(form, windows, folder)
            found = {"nats": nats, "loss": nats - exact, "perplexity": math.exp(nats)}
            rows.append({"format": name, "bits": form.bits, **found})
            print(
                f"{name:20} {form.bits:6.2f} {nats:13.5f} {nats - exact:9.5f} {math.exp(nats):11.4f}",
                flush=True,
            )
    content = {
        "prediction": PREDICTION,
        "tokens": sum(len(window) - 1 for window in windows),
        "transformers_nats": exact,
        "formats": rows,
    }
    write(args.json, "benchmarks.engine.perplexity", content)


if __name__ == "__main__":
    main()

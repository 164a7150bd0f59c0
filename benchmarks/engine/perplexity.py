"""What each format of weights and of KV loses on the text that was held out of the embedded model's training.

    python -m benchmarks.engine.perplexity [--json FILE] [--smoke]

The modules of the standard library that `tools/train_embedded.py` held out, in windows of 1,024 tokens, through a whole cluster
in one process: the logarithms of the prompt's probabilities, as the API's `prompt_logprobs` gives them. `transformers` is the
same checkpoint by that library in float32, which float32 here has to equal. GGUF files are made of the checkpoint by the `gguf`
package; as in files of llama.cpp, the embedding of Q4_0 has more bits (Q8_0). Folders are those of
`baton quantize`; the library of compressed-tensors makes the others.

Of files and folders there is a reference: `transformers` computes what the format's own library makes floats of, in float32.
Logits are compared with its over the beginnings of windows: as they are served, with rows rounded where the format has it, and in
float32, where nothing but the order of sums differs."""

import asyncio
import math
import random
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import CompressedTensorsConfig, LlamaForCausalLM

from benchmarks.engine.library_folders import write_by_library
from benchmarks.report import parser, write
from cluster.ingress.delivery.frontend import Frontend
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig, load
from core.types import Request, SamplingParams
from kernels.cpu import library
from models.families.table import read_spec
from models.files.hub import resolve
from models.formats.rounded_matrix import Scheme
from models.quantising.quantised_copy import write_quantised
from models.registry import LoadOptions, choose_weights, load_model
from models.text.tokenizer import load_tokenizer
from tests.models.checkpoints import Paged
from tests.models.gguf_files import write_checkpoint
from tools.train_embedded import read_corpus

PREDICTION = (
    "16 bits lose nothing (below 0.0001 nats), int8 and Q8_0 0.002 nats, int4 0.037 nats, as it did with a scale of 16 bits for "
    "each 32 inputs in place of steps; Q4_0 as much; KV in int8 0.001 nats, in float8 0.01; FP8 0.003, int4 with a scale for 128 "
    "0.06, NVFP4 0.04, MXFP4 0.06; every format as much as by its own library within 0.002, and its logits in float32 within "
    "0.001"
)
WINDOW, COMPARED = 1024, 96
"""Tokens of a window, and those at its beginning whose logits are compared."""
NUM_COMPARED = 8
"""Windows of which logits are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    settings: dict[str, Any]
    """The configuration's keys, dotted."""
    gguf: str = ""
    """The kind of a GGUF file's matrices; empty: the checkpoint as it is."""
    folder: Scheme | None = None
    """What `baton quantize` rounds it to."""
    preset: str = ""
    """The preset of compressed-tensors by which its library makes a folder."""
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
    "fp8": Format(settings={"model.quantization": "fp8"}, bits=8),
    "nvfp4": Format(settings={"model.quantization": "nvfp4"}, bits=4.5),
    "folder of fp8": Format(settings={}, folder="fp8", bits=8),
    "folder of int8": Format(settings={}, folder="int8", bits=8),
    "folder of int4": Format(settings={}, folder="int4", bits=4.125),
    "folder of nvfp4": Format(settings={}, folder="nvfp4", bits=4.5),
    "MXFP4": Format(settings={}, preset="MXFP4A16", bits=4.25),
    "MXFP8": Format(settings={}, preset="MXFP8A16", bits=8.25),
    "packed INT4 with zero points, groups of 64": Format(settings={}, preset="W4A16_ASYM", bits=4.3125),
    "packed INT8, groups of 64": Format(settings={}, preset="W8A16", bits=8.25),
    "16 bits, KV int8": Format(settings={"engine.kv_dtype": "int8"}, bits=16),
    "16 bits, KV float8": Format(settings={"engine.kv_dtype": "float8"}, bits=16),
    "int8, KV int8": Format(settings={"model.quantization": "int8", "engine.kv_dtype": "int8"}, bits=8),
}
SMOKE = ("float32", "int4, a scale for 128", "GGUF Q4_0", "folder of nvfp4", "16 bits, KV int8")


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


def checkpoint_of(form: Format, folder: Path) -> Path:
    """Return the file or folder that the format is stored in; it is made in `folder`."""
    if form.gguf:
        path = folder / f"{form.gguf}.gguf"
        write_checkpoint(path, resolve("embedded"), form.gguf, "llama", {"token_embd.weight": "Q8_0"})
        return path
    if form.folder is not None:
        write_quantised("embedded", form.folder, folder / form.folder)
        return folder / form.folder
    if form.preset:
        write_by_library(form.preset, folder / form.preset)
        return folder / form.preset
    return resolve("embedded")


def nats_of(form: Format, windows: Sequence[tuple[int, ...]], path: Path) -> float:
    settings = {"prefill_instances": 0, "model.path": str(path), "engine.kv_bytes": 64 << 20, **form.settings}
    with patch("kernels.cpu.prepacked.INT4_GROUP", form.int4_group):
        return asyncio.run(nats_of_prompts(load({}, {}, settings), windows))


def by_transformers(form: Format, path: Path) -> Any:
    """Return the model whose matrices the format's own library has made floats."""
    if form.gguf:
        return LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    is_folder = form.folder is not None or form.preset
    how: Any = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_folder else {}
    with (
        warnings.catch_warnings()
    ):  # transformers says that the folder's configuration counts, which is what is wanted
        warnings.simplefilter("ignore", UserWarning)
        return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, **how).float()


@torch.inference_mode()
def nats_by_transformers(model: Any, windows: Sequence[tuple[int, ...]]) -> float:
    total = 0.0
    for window in windows:
        ids = torch.tensor([window])
        total += float(model(ids, labels=ids).loss) * (len(window) - 1)
    return total / sum(len(window) - 1 for window in windows)


@torch.inference_mode()
def compared(path: Path, model: Any, windows: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """Return the largest differences of logits, and how far logits of one token are from each other."""
    folder, cpu = resolve(str(path)), torch.device("cpu")
    spec = read_spec(folder)
    errors: dict[str, list[float]] = {"max_logit_error": [], "max_logit_error_float32": []}
    spreads: list[float] = []
    served = choose_weights(spec, "auto", "none", cpu, deterministic=False)
    ours = [load_model(folder, "float32", cpu, options=LoadOptions(weights=way)) for way in (served, "full")]
    for window in windows[:NUM_COMPARED]:
        tokens = list(window[:COMPARED])
        want = model(torch.tensor([tokens])).logits[0]
        spreads.append(float(want.std(-1).mean()))
        for own, found in zip(ours, errors.values(), strict=True):
            (got,) = Paged(own, 1, random.Random(0)).step([(0, 0, tokens)])
            found.append(float((got - want).abs().max()))
    return {name: max(found) for name, found in errors.items()} | {"logit_spread": max(spreads)}


def measure(form: Format, windows: Sequence[tuple[int, ...]], folder: Path, exact: float) -> dict[str, Any]:
    path = checkpoint_of(form, folder)
    nats = nats_of(form, windows, path)
    found = {"bits": form.bits, "nats": nats, "loss": nats - exact, "perplexity": math.exp(nats)}
    if not (form.gguf or form.folder or form.preset):
        return found
    model = by_transformers(form, path)
    library = nats_by_transformers(model, windows)
    return found | {"library_nats": library, "library_loss": library - exact} | compared(path, model, windows)


def held_out_windows(smoke: bool) -> list[tuple[int, ...]]:
    """Return windows of `WINDOW` tokens; what is left over is not scored."""
    tokenizer = load_tokenizer(resolve("embedded"))
    ids = [token for text in read_corpus()[1] for token in tokenizer.encode(text)]
    size, most = (64, 1) if smoke else (WINDOW, len(ids))
    return [tuple(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size)][:most]


def _by_library(row: dict[str, Any]) -> str:
    if "library_loss" not in row:
        return ""
    served, floats = row["max_logit_error"], row["max_logit_error_float32"]
    return f"{row['library_loss']:.5f}, within {served:.3f} and in float32 {floats:.5f}"


def main() -> None:
    args = parser(__doc__).parse_args()
    windows = held_out_windows(args.smoke)
    exact = nats_by_transformers(by_transformers(FORMATS["float32"], resolve("embedded")), windows)
    rows: list[dict[str, Any]] = []
    print(
        f"predicted: {PREDICTION}\n{'':44} {'bits':>6} {'nats a token':>13} {'loss':>9}   its library, logits"
    )
    print(f"{'transformers':44} {32:6.2f} {exact:13.5f} {0:9.5f}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        library.native()  # Its library stays where it is cached.
        stack.enter_context(patch.dict("os.environ", {"XDG_CACHE_HOME": str(folder)}))
        for name in SMOKE if args.smoke else FORMATS:
            row = {"format": name, **measure(FORMATS[name], windows, folder, exact)}
            rows.append(row)
            print(
                f"{name:44} {row['bits']:6.2f} {row['nats']:13.5f} {row['loss']:9.5f}   {_by_library(row)}",
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

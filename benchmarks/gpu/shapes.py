"""The shapes of models whose steps are measured, with made-up weights, and what a step of them must move and compute."""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kernels.triton.ops import triton_ops
from kernels.triton.platform import INTERPRETED
from models.families.table import read_spec
from models.formats.dummy_weights import DummyWeights
from models.model import Model

DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
"""The interpreter's bfloat16 arithmetic is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense decoder with grouped queries and a tied head."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Numbers in all layers' matrices."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    def decode_bytes(self, batch: int, context: int) -> float:
        """What a step of `batch` sequences must read: each weight once, and the K and V of each context of `context` tokens."""
        weights = self.layer_weights + self.vocab * self.hidden
        kv = batch * context * 2 * self.kv_heads * self.head_dim * self.layers
        return float(DTYPE.itemsize * (weights + kv))

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt of `tokens`: two for each weight and token, and attention's two products over earlier tokens.
        The head multiplies one row."""
        pairs = tokens * (tokens + 1) / 2
        return 2.0 * self.layer_weights * tokens + 4.0 * pairs * self.heads * self.head_dim * self.layers


LARGE = Shape(name="8B", layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, vocab=128256)
SMALL = Shape(name="0.5B", layers=24, hidden=896, inner=4864, heads=14, kv_heads=2, vocab=151936)
TINY = Shape(name="tiny", layers=2, hidden=32, inner=48, heads=2, kv_heads=1, vocab=61)
SHAPES = (TINY,) if INTERPRETED else (LARGE, SMALL)
"""The large one first: a run that is cut has what weighs most."""


def describe(shape: Shape, folder: Path) -> Path:
    """Write the shape's config.json, which is all that `model.load_format: dummy` needs."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.hidden, "vocab_size": shape.vocab,
        "intermediate_size": shape.inner, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
        "torch_dtype": str(DTYPE).removeprefix("torch."), "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def model_of(shape: Shape, device: torch.device) -> Model:
    with TemporaryDirectory() as folder:
        spec = read_spec(describe(shape, Path(folder)))
    return Model(spec, triton_ops(device), DummyWeights(DTYPE, device), device)

"""Tiny checkpoints whose matrices have eight or four bits, as those who make them store them."""

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import FAMILIES, HYBRID, make
from tests.models.gemma4_families import awkward_gemma4

BLOCK = (4, 2)
"""Divides every size below: transformers knows no blocks that are cut off."""
BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
"""Sizes of which no block of 128 x 128 is cut off, nor shared by two projections."""
W8A8_WAYS = [
    ("float", "tensor", 0.0),
    ("float", "tensor", 0.048),
    ("float", "channel", 0.0),
    ("float", "block", 0.0),
    ("int", "channel", 0.0),
    ("int", "channel", 0.1),
]
"""What is stored, how its scales are shared, and the scale that inputs are given (0: each its own)."""


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def compressed(**weights: Any) -> dict[str, Any]:
    """A quantization_config as compressed-tensors writes it."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": "pack-quantized" if weights["num_bits"] == 4 else f"{weights['type']}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    }


def scaled(
    weight: torch.Tensor, kind: str, strategy: str, block: tuple[int, int] = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (math.ceil(size / of) for size, of in zip(weight.shape, block, strict=True))
    shape = {"tensor": (1,), "channel": (len(weight), 1), "block": (rows, columns)}[strategy]
    scales = torch.rand(shape) * 0.01 + 0.001
    full = scales.expand(len(weight), 1) if strategy != "block" else scales
    if strategy == "block":
        full = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    values = weight / full[: weight.shape[0], : weight.shape[1]]
    if kind == "int":
        return values.round().clamp(-127, 127).to(torch.int8), scales
    return values.clamp(-448, 448).to(torch.float8_e4m3fn), scales


def quantise_all(
    folder: Path, family: str, quantise: Callable[[torch.Tensor], dict[str, torch.Tensor]], sizes: dict[str, int] | None = None,
    **config: Any,
) -> None:  # fmt: skip
    """Every projection `x.weight` becomes x.* as `quantise` says; sizes are multiples of 16, and what `sizes` says."""
    made = (FAMILIES | HYBRID)[family](random.Random(0), 0)
    made.num_attention_heads, made.num_key_value_heads, made.num_hidden_layers = 4, 2, 2
    if getattr(made, "layer_types", None):
        made.layer_types = made.layer_types[:2]
    if "gemma4" in family:
        made = awkward_gemma4(family)
        made.vocab_size_per_layer_input = 62
    made.hidden_size, made.intermediate_size, made.vocab_size = 64, 96, 62
    for name, size in (sizes or {}).items():
        setattr(made, name, size)
    make(folder, made, seed=0)
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    is_product = re.compile(r"(?!.*norm).*(_proj|indexer\.w).*weight")
    for name in filter(is_product.fullmatch, list(tensors)):
        stem, weight = name.removesuffix(".weight"), tensors.pop(name)
        tensors |= {f"{stem}.{suffix}": part.contiguous() for suffix, part in quantise(weight).items()}
    rewrite(folder, tensors, **config)


def four_bits(kind: str, parts: dict[str, torch.Tensor], size: int, bits: int = 4) -> torch.Tensor:
    """AutoAWQ's and GPTQ's words by definition, number by number: (outputs, inputs)."""
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # of AWQ: in which nibble column c of a word's eight is

    each, mask = 32 // bits, 2**bits - 1

    def nibble(words: torch.Tensor, row: int, column: int) -> int:
        at = order[column % each] if kind == "awq" else column % each
        return int(words[row, column // each]) >> bits * at & mask

    scales, zeros, words = parts["scales"].double(), parts["qzeros"], parts["qweight"]
    inputs = len(words) * (1 if kind == "awq" else each)
    found = torch.empty(scales.shape[1], inputs, dtype=torch.float64)
    for k in range(inputs):
        group = int(parts["g_idx"][k]) if "g_idx" in parts else k // size
        for n in range(len(found)):
            number = (
                nibble(words, k, n) if kind == "awq" else int(words[k // each, n]) >> bits * (k % each) & mask
            )
            zero = nibble(zeros, group, n) + (1 if kind == "gptq" else 0)
            found[n, k] = (number - zero) * scales[group, n]
    return found.float()


def packed_parts(
    kind: str, weight: torch.Tensor, size: int, bits: int = 4, *, symmetric: bool = False
) -> dict[str, torch.Tensor]:
    """Any bits at all, for a matrix of `weight`'s shape; `packed` is compressed-tensors'. `symmetric`: it has no zero points."""
    each = 32 // bits

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)

    outputs, inputs = weight.shape
    if kind == "packed":
        groups = inputs // size if size else 1
        parts = {
            "weight_packed": words(outputs, inputs // each),
            "weight_scale": torch.rand(outputs, groups) * 0.16 / 2**bits + 0.001,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        zeros = {"weight_zero_point": words(outputs // each, groups)}
        return parts if symmetric else parts | zeros
    parts = {
        "qweight": words(inputs, outputs // 8) if kind == "awq" else words(inputs // each, outputs),
        "qzeros": words(inputs // size, outputs // each),
        "scales": (torch.rand(inputs // size, outputs) * 0.16 / 2**bits + 0.001).half(),
    }
    if kind == "gptq, any order":
        parts["g_idx"] = torch.randint(0, inputs // size, (inputs,), dtype=torch.int32)
    return parts


def mxfp4_checkpoint(folder: Path, **sizes: int) -> None:
    config = FAMILIES["gpt_oss"](random.Random(3), 0)
    config.hidden_size, config.intermediate_size = 64, 96
    config.num_attention_heads, config.num_key_value_heads, config.vocab_size = 4, 2, 62
    for name, size in sizes.items():
        setattr(config, name, size)
    make(folder, config, seed=0)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (num, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 126, (num, outputs, inputs // 32), dtype=torch.uint8)
    rewrite(folder, tensors, quantization_config={"quant_method": "mxfp4"})


def w8a8(
    folder: Path, kind: str, strategy: str, family: str = "qwen3", input_scale: float = 0.0, **sizes: int
) -> None:
    """`input_scale`: of all activations; 0: each token has its own."""
    block = (128, 128)

    def quantise(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scales = scaled(weight, kind, strategy, block)
        given = {"input_scale": torch.tensor([input_scale])} if input_scale else {}
        return {"weight": values, "weight_scale": scales, **given}

    more = {"block_structure": block} if strategy == "block" else {}
    how = compressed(num_bits=8, type=kind, strategy=strategy, **more)
    group = how["config_groups"]["group_0"]
    own = {"strategy": "tensor", "dynamic": False} if input_scale else {"strategy": "token", "dynamic": True}
    group["input_activations"] = {"num_bits": 8, "type": kind, "symmetric": True, **own}
    quantise_all(folder, family, quantise, sizes, quantization_config=how)


def packed_checkpoint(
    folder: Path, kind: str, size: int, bits: int = 4, family: str = "llama", *, symmetric: bool = False, **sizes: int
) -> list[dict[str, torch.Tensor]]:  # fmt: skip
    """The tensors of its matrices, in their order. `size`: of a group; 0: all of a row."""
    made: list[dict[str, torch.Tensor]] = []

    def quantise(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        made.append(packed_parts(kind, weight, size, bits, symmetric=symmetric))
        return made[-1]

    how: dict[str, Any] = {"quant_method": kind.split(",")[0], "bits": bits, "group_size": size}
    if kind == "packed":
        group = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
        how = compressed(num_bits=bits, type="int", symmetric=symmetric, **group)
        how["format"] = "pack-quantized"
    quantise_all(folder, family, quantise, sizes, quantization_config=how)
    return made

"""Tiny checkpoints of bitsandbytes, HQQ and torchao, of any bits at all, and what they mean.

They are made by what is published of the formats: QLoRA (arXiv:2305.14314, section 3) and LLM.int8 (arXiv:2208.07339) with
bitsandbytes' `QuantState.as_dict`; HQQ's `Quantizer` and `BitPack`; and the attributes that torchao documents of its tensors.
How the same tensors were read by the libraries themselves was tried once, by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.stored_scaled import Stored

NF4 = torch.tensor([
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
])  # fmt: skip
"""QLoRA, appendix E."""


def bitsandbytes4(
    weight: Tensor, kind: str = "nf4", *, nested: bool = False, dtype: str = "bfloat16"
) -> Stored:
    """Numbers of the matrix, row after row: the first of two in the upper half of a byte, 64 with one scale."""
    count = weight.numel()
    codes = torch.randint(0, 16, (count,))
    said: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": dtype, "shape": list(weight.shape)}
    table = NF4.clone() if kind == "nf4" else torch.linspace(-1, 1, 16)
    parts = {"weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table}
    scales = torch.rand(-(-count // 64)) * 0.05 + 0.001
    if nested:
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03}
        bytes_, map_ = torch.randint(0, 256, scales.shape, dtype=torch.uint8), torch.linspace(-1, 1, 256)
        shared = torch.rand(-(-len(scales) // 256)) * 0.02
        scales = torch.tensor(
            [float(map_[byte] * shared[i // 256] + 0.03) for i, byte in enumerate(bytes_.tolist())]
        )
        parts |= {"weight.absmax": bytes_, "weight.nested_absmax": shared, "weight.nested_quant_map": map_}
    else:
        parts["weight.absmax"] = scales
    state = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = state
    meant = table[codes] * scales[torch.arange(count) // 64]
    return parts, meant.view(weight.shape)


def bitsandbytes8(weight: Tensor) -> Stored:
    values = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    largest = torch.rand(len(weight)) * 0.1 + 0.01
    layout = torch.zeros((), dtype=torch.uint8)
    meant = values.float() * largest[:, None] / 127
    return {"weight": values, "SCB": largest, "weight_format": layout}, meant


def hqq(weight: Tensor, bits: int, axis: int, group: int = 16, dtype: torch.dtype = torch.float32) -> Stored:
    """The matrix is seen as (-1, group) or (group, -1); words hold numbers of as many equal parts of its rows."""
    count = weight.numel() // group
    form = (count, group) if axis == 1 else (group, count)
    shared = (count, 1) if axis == 1 else (1, count)
    numbers = torch.randint(0, 2**bits, form)
    scale = (torch.rand(shared) * 0.1 / 2**bits).to(dtype)
    zero = (torch.rand(shared) * 2**bits).to(dtype)
    each, word = {
        8: (1, torch.uint8),
        4: (2, torch.uint8),
        3: (10, torch.int32),
        2: (4, torch.uint8),
        1: (8, torch.uint8),
    }[bits]
    rows = -(-form[0] // each)
    padded = torch.zeros(rows * each, form[1], dtype=torch.int64)
    padded[: form[0]] = numbers
    words = sum(padded[part * rows : (part + 1) * rows] << bits * (each - 1 - part) for part in range(each))
    assert isinstance(words, Tensor)
    parts = {"W_q": words.to(word), "scale": scale, "zero": zero, "shape": torch.tensor(list(weight.shape))}
    parts |= {
        name: torch.tensor(value, dtype=torch.int32)
        for name, value in (("nbits", bits), ("axis", axis), ("group_size", group))
    }
    parts |= {
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        "optimize": torch.tensor(1, dtype=torch.uint8),
    }
    return parts, ((numbers - zero.float()) * scale.float()).reshape(weight.shape)


def torchao_scaled(weight: Tensor, kind: str) -> Stored:
    scale = torch.rand(len(weight), 1) * 0.004 + 0.001
    if kind == "Float8Tensor":
        values = (torch.randn(weight.shape) * 20).to(torch.float8_e4m3fn)
        return {"_weight_qdata": values, "_weight_scale": scale}, values.float() * scale
    values, zero = (
        torch.randint(-127, 128, weight.shape, dtype=torch.int8),
        torch.zeros_like(scale, dtype=torch.int8),
    )
    parts = {"_weight_qdata": values, "_weight_scale": scale, "_weight_zero_point": zero}
    return parts, values.float() * scale


def torchao_whole(weight: Tensor, group: int = 32) -> Stored:
    values = torch.randint(-8, 8, weight.shape, dtype=torch.int8)
    each = (len(weight), weight.shape[1] // group)
    scale, zero = torch.rand(each) * 0.02, torch.randint(-3, 4, each, dtype=torch.int8)
    meant = (values.float() - zero.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
    return {"_weight_qdata": values, "_weight_scale": scale, "_weight_zero_point": zero}, meant


def torchao_halves(weight: Tensor, group: int = 32, dtype: torch.dtype = torch.float32) -> Stored:
    outputs, inputs = weight.shape
    numbers = torch.randint(-8, 8, (outputs, inputs))
    nibbles = numbers % 16
    pairs = (nibbles[:, ::2] + nibbles[:, 1::2] * 16).to(torch.uint8)
    each = inputs // group, outputs
    scale, zero = (torch.rand(each) * 0.02).to(dtype), (torch.randn(each) * 0.05).to(dtype)
    spread = [part.float().T.repeat_interleave(group, 1) for part in (scale, zero)]
    meant = numbers * spread[0] + spread[1]
    return {"_weight_qdata": pairs, "_weight_scale": scale, "_weight_zero_point": zero}, meant


def name_classes(folder: Path, kind: str, **data: Any) -> None:
    """Write into the header of which class each matrix was, as torchao does."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    notes = {"format": "pt", "tensor_names": json.dumps(sorted(tensors))}
    for name in tensors:
        if name.endswith("._weight_qdata"):
            note = {"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale"]}
            notes[name.replace("._weight_qdata", ".weight")] = json.dumps(note)
    save_file(tensors, path, notes)


def hqq_config(bits: int, axis: int, group: int = 16) -> dict[str, Any]:
    weights = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True}
    return {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": weights},
        "skip_modules": ["lm_head"],
    }


def torchao_config(name: str) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": {}, "_version": 2}}}


_BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
WAYS: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "NF4": (bitsandbytes4, _BNB4),
    "NF4, nested": (lambda weight: bitsandbytes4(weight, nested=True), _BNB4),
    "FP4": (lambda weight: bitsandbytes4(weight, "fp4"), _BNB4),
    "LLM.int8": (bitsandbytes8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    **{
        f"HQQ, {bits} bits, axis {axis}": (
            lambda weight, bits=bits, axis=axis: hqq(weight, bits, axis),
            hqq_config(bits, axis),
        )
        for bits, axis in ((8, 1), (4, 1), (4, 0), (3, 1), (3, 0), (2, 1), (1, 0))
    },
}
TORCHAO: dict[str, tuple[Callable[[Tensor], Stored], str, dict[str, Any]]] = {
    "Float8DynamicActivationFloat8WeightConfig": (
        lambda weight: torchao_scaled(weight, "Float8Tensor"),
        "Float8Tensor",
        {"act_quant_kwargs": {}},
    ),
    "Int8WeightOnlyConfig": (lambda weight: torchao_scaled(weight, "Int8Tensor"), "Int8Tensor", {}),
    "IntxWeightOnlyConfig": (torchao_whole, "IntxUnpackedToInt8Tensor", {}),
    "Int4WeightOnlyConfig": (torchao_halves, "Int4Tensor", {}),
}
"""How a matrix becomes tensors, its class, and attributes of that, by the configuration that makes it."""

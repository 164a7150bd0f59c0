"""Tiny checkpoints of FP8, MXFP8, MXFP4 and NVFP4 as each publisher spells them, of any bits at all, and what they mean.

The numbers are made by their definitions: OCP's "8-bit Floating Point" and "Microscaling Formats" specifications (v1.0), and for
NVFP4 the documentation of ModelOpt: E2M1 times a scale of E4M3 for 16 inputs, times one of float32 for all of the matrix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.stored import compressed, quantise_all

Parts = dict[str, Tensor]
Stored = tuple[Parts, Tensor]
"""A matrix's tensors, and the floats that they mean."""
EXPONENTS = (115, 121)
"""Exponents of scales of a usual size."""


def e2m1(nibbles: Tensor) -> Tensor:
    """Sign, two bits of exponent with a bias of 1, one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = nibbles >> 3, nibbles >> 1 & 3, nibbles & 1
    normal = (1 + mantissa / 2) * 2.0 ** (exponent.double() - 1)
    return ((1 - 2 * sign.double()) * torch.where(exponent == 0, mantissa / 2, normal)).float()


def halves(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Bytes of two numbers, the even one in the lower half, and the numbers."""
    pairs = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    nibbles = torch.empty(outputs, inputs, dtype=torch.int64)
    nibbles[:, ::2], nibbles[:, 1::2] = (pairs % 16).long(), (pairs // 16).long()
    return pairs, e2m1(nibbles)


def powers(outputs: int, groups: int) -> tuple[Tensor, Tensor]:
    """E8M0, and what it means."""
    exponents = torch.randint(*EXPONENTS, (outputs, groups), dtype=torch.uint8)
    return exponents, 2.0 ** (exponents.double() - 127).float()


def nvfp4(weight: Tensor, overall: float) -> tuple[Tensor, Tensor, Tensor]:
    outputs, inputs = weight.shape
    pairs, numbers = halves(outputs, inputs)
    scales = (torch.rand(outputs, inputs // 16) * 200 + 20).to(torch.float8_e4m3fn)
    return pairs, scales, numbers * scales.float().repeat_interleave(16, 1) * overall


def modelopt_nvfp4(weight: Tensor, overall: float = 3.1e-5) -> Stored:
    pairs, scales, meant = nvfp4(weight, overall)
    parts = {"weight": pairs, "weight_scale": scales, "weight_scale_2": torch.tensor(overall)}
    return parts | {"input_scale": torch.tensor(0.01)}, meant


def compressed_nvfp4(weight: Tensor, overall: float = 2.0**-15) -> Stored:
    """compressed-tensors' own reader makes bfloat16 of it, which has these numbers where the scale of all is a power of two."""
    pairs, scales, meant = nvfp4(weight, overall)
    parts = {
        "weight_packed": pairs,
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([1 / overall]),
    }
    return parts | {"input_global_scale": torch.tensor([100.0])}, meant


def mxfp4(weight: Tensor, name: str) -> Stored:
    outputs, inputs = weight.shape
    pairs, numbers = halves(outputs, inputs)
    exponents, scales = powers(outputs, inputs // 32)
    return {name: pairs, "weight_scale": exponents}, numbers * scales.repeat_interleave(32, 1)


def mxfp8(weight: Tensor, scale: str = "weight_scale", dtype: torch.dtype = torch.float8_e4m3fn) -> Stored:
    outputs, inputs = weight.shape
    exponents, scales = powers(outputs, inputs // 32)
    values = (torch.randn(outputs, inputs) * 4).to(dtype)
    return {"weight": values, scale: exponents}, values.float() * scales.repeat_interleave(32, 1)


def fp8(weight: Tensor, scale: str = "weight_scale", *, by_rows: bool = False, **more: Tensor) -> Stored:
    outputs, inputs = weight.shape
    scales = torch.rand((outputs, 1) if by_rows else ()) * 0.004 + 0.001
    values = (torch.randn(outputs, inputs) * 20).to(torch.float8_e4m3fn)
    return {"weight": values, scale: scales, **more}, values.float() * scales


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    producer = {"name": "modelopt", "version": "0.39.0"}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "producer": producer,
        "ignore": ["lm_head"],
        **more,
    }


def compressed_floats(bits: int, form: str, size: int, **more: Any) -> dict[str, Any]:
    strategy = "tensor_group" if size == 16 else "group"
    how = compressed(num_bits=bits, type="float", strategy=strategy, group_size=size, **more)
    return how | {"format": form}


_MX = {"scale_dtype": "torch.uint8"}
_QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True}
_QUARK_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
WAYS: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "NVFP4 of ModelOpt": (modelopt_nvfp4, modelopt("NVFP4", group_size=16)),
    "NVFP4 of compressed-tensors": (compressed_nvfp4, compressed_floats(4, "nvfp4-pack-quantized", 16)),
    "MXFP4 of ModelOpt": (lambda weight: mxfp4(weight, "weight"), modelopt("W4A8_MXFP4_FP8")),
    "MXFP4 of compressed-tensors": (
        lambda weight: mxfp4(weight, "weight_packed"),
        compressed_floats(4, "mxfp4-pack-quantized", 32, **_MX),
    ),
    "MXFP4 of Quark": (
        lambda weight: mxfp4(weight, "weight"),
        {"quant_method": "quark", "global_quant_config": {"weight": _QUARK_MXFP4}},
    ),
    "MXFP8 of ModelOpt": (mxfp8, modelopt("MXFP8")),
    "MXFP8 of compressed-tensors": (mxfp8, compressed_floats(8, "mxfp8-quantized", 32, **_MX)),
    "MXFP8 of E5M2": (lambda weight: mxfp8(weight, dtype=torch.float8_e5m2), modelopt("MXFP8")),
    "FP8 of DeepSeek with exponents": (
        lambda weight: mxfp8(weight, "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
    ),
    "FP8 of ModelOpt": (lambda weight: fp8(weight, input_scale=torch.tensor(0.02)), modelopt("FP8")),
    "FP8 of ModelOpt by rows": (
        lambda weight: fp8(weight, by_rows=True),
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    ),
    "FP8 of FBGEMM": (
        lambda weight: fp8(weight, by_rows=True),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
    "FP8 of Quark": (
        lambda weight: fp8(weight, input_scale=torch.tensor(0.02)),
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": _QUARK_FP8, "input_tensors": _QUARK_FP8},
        },
    ),
}
"""How a matrix becomes tensors, and the `quantization_config` of such a checkpoint."""


def scaled_checkpoint(folder: Path, way: str, family: str = "qwen3", **sizes: Any) -> None:
    store, how = WAYS[way]
    quantise_all(folder, family, lambda weight: store(weight)[0], sizes, quantization_config=how)


def meaning(
    folder: Path, store: Callable[[Tensor], Stored], how: dict[str, Any], family: str = "qwen3", **sizes: Any
) -> Path:
    """A checkpoint in `folder`, and beside it one of the floats that it means, which is returned."""
    floats: list[Tensor] = []

    def quantise(weight: Tensor) -> Parts:
        parts, meant = store(weight)
        floats.append(meant)
        return parts

    quantise_all(folder, family, quantise, sizes, quantization_config=how)
    plain, again = folder.parent / f"{folder.name}-plain", iter(floats)
    quantise_all(plain, family, lambda _: {"weight": next(again)}, sizes)
    return plain

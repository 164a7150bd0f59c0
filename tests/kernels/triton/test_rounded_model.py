"""Models whose matrices are rounded as they are read, multiplied by the kernels that checkpoints of that format have."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from core.errors import UnsupportedModel
from kernels.ops import Ops
from kernels.packed import EightBit, FourBit, LinearWeight, Prepacked, as_float
from kernels.rounding import Activations, Rounded, as_floats, round_to, rounding_of
from kernels.torch.reference import reference_ops
from kernels.triton.ops import invariant_triton_ops, triton_ops
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, whole
from models.formats.rounded_matrix import Scheme, WeightRounding, rounding_of_model
from models.model import Model
from models.registry import check_rounding
from tests.kernels.triton.test_packed_model import Seen, cosine, logits
from tests.models.checkpoints import CPU, FAMILIES, make


@pytest.mark.parametrize(
    ("family", "to"),
    [
        ("llama", "fp8"),
        ("qwen3_moe", "int8"),
        ("deepseek_v3", "int4"),
        ("gpt_oss", "nvfp4"),
    ],
)
def test_kernels_multiply_what_was_rounded(
    family: str, to: Scheme, device: torch.device, tmp_path: Path
) -> None:
    config = FAMILIES[family](random.Random(0), 0)
    config.hidden_size, config.vocab_size, config.intermediate_size = 64, 64, 64
    for name, size in {"moe_intermediate_size": 64, "q_lora_rank": 32, "head_dim": 16}.items():
        if getattr(config, name, 0):
            setattr(config, name, size)
    make(tmp_path, config, seed=0)
    seen = Seen(triton_ops(device))
    got = logits(_load(tmp_path, to, seen.ops, device), device)
    want = logits(
        _load(tmp_path, to, replace(reference_ops(), linear=rounding, keeps=seen.ops.keeps), CPU), CPU
    )
    assert seen.kinds & {EightBit if to in ("fp8", "int8") else FourBit}
    assert cosine(got, want) > (0.999 if to in ("fp8", "int8") else 0.99999)


def rounding(x: Activations, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply in PyTorch, with rows rounded where the format has it."""
    assert not isinstance(weight, Prepacked)
    how = rounding_of(weight)
    rows = as_floats(x if how is None or isinstance(x, Rounded) else round_to(x, how))
    return F.linear(rows, as_float(weight, rows.dtype), bias)


def _load(folder: Path, to: Scheme, ops: Ops, device: torch.device) -> Model:
    spec = read_spec(folder)
    checkpoint = Checkpoint(
        folder, torch.float32, device, whole, None, ops.keeps, rounds=rounding_of_model(spec, to)
    )
    model = Model(spec, ops, checkpoint, device)
    checkpoint.close()
    return model


def test_what_no_kernel_multiplies_is_refused_before_weights_are_read(device: torch.device) -> None:
    gpu = torch.device("cuda")
    check_rounding(WeightRounding("int4"), triton_ops(device), gpu)
    with pytest.raises(UnsupportedModel, match="model.quantization is int4.*leave engine.kernels at auto"):
        check_rounding(WeightRounding("int4"), invariant_triton_ops(device), gpu)

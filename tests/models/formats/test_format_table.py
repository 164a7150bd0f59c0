"""The table of docs/weights.md says what a tiny checkpoint of each format becomes."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from kernels.cpu.stored import KEPT
from kernels.packed import Int8Groups, Kind
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, whole
from models.formats.format_table import FORMATS, PAGE, Held, WeightFormat, page
from tests.models.checkpoints import CPU
from tests.models.stored import BLOCKS, packed_checkpoint, w8a8
from tests.models.stored_by_libraries import (
    TORCHAO,
    WAYS,
    hqq,
    hqq_config,
    name_classes,
    torchao_config,
    torchao_halves,
)
from tests.models.stored_scaled import meaning, scaled_checkpoint

ON_GPUS: frozenset[Kind] = frozenset(get_args(Kind)) - {"half", "int8_groups"}
Make = Callable[[Path], object]


def by_torchao(name: str) -> Make:
    def make(folder: Path) -> None:
        store, kind, data = TORCHAO[name]
        if kind == "Int4Tensor":
            meaning(folder, lambda weight: torchao_halves(weight, dtype=torch.bfloat16), torchao_config(name))
        else:
            meaning(folder, store, torchao_config(name))
        name_classes(folder, kind, **data)

    return make


MAKE: dict[str, Make] = {
    "FP8, one scale or one for each row": lambda folder: scaled_checkpoint(folder, "FP8 of ModelOpt"),
    "FP8, blocks of 128 x 128": lambda folder: w8a8(folder, "float", "block", **BLOCKS),
    "MXFP8": lambda folder: scaled_checkpoint(folder, "MXFP8 of ModelOpt"),
    "INT8, symmetric": lambda folder: w8a8(folder, "int", "channel"),
    "MXFP4": lambda folder: scaled_checkpoint(folder, "MXFP4 of ModelOpt"),
    "NVFP4": lambda folder: scaled_checkpoint(folder, "NVFP4 of compressed-tensors"),
    "four bits of AWQ": lambda folder: packed_checkpoint(folder, "awq", 16),
    "four bits of GPTQ": lambda folder: packed_checkpoint(folder, "gptq", 16),
    "eight bits of GPTQ": lambda folder: packed_checkpoint(folder, "gptq", 16, 8),
    "packed INT4": lambda folder: packed_checkpoint(folder, "packed", 16),
    "packed INT8": lambda folder: packed_checkpoint(folder, "packed", 16, 8),
    "NF4 and FP4": lambda folder: meaning(folder, *WAYS["NF4, nested"]),
    "LLM.int8": lambda folder: meaning(folder, *WAYS["LLM.int8"]),
    "HQQ of 1, 2, 3, 4 and 8 bits": lambda folder: meaning(
        folder, lambda weight: hqq(weight, 4, 1, dtype=torch.bfloat16), hqq_config(4, 1)
    ),
    "torchao's FP8": by_torchao("Float8DynamicActivationFloat8WeightConfig"),
    "torchao's INT8": by_torchao("IntxWeightOnlyConfig"),
    "torchao's INT4": by_torchao("Int4WeightOnlyConfig"),
}


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_each_is_held_as_the_table_says(row: WeightFormat, tmp_path: Path) -> None:
    MAKE[row.name](tmp_path / "model")
    assert held(row, tmp_path / "model", ON_GPUS) == row.gpu
    assert held(row, tmp_path / "model", KEPT) == row.cpu


def held(row: WeightFormat, folder: Path, keeps: frozenset[Kind]) -> Held:
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder, torch.float32, CPU, whole, spec.quantisation, keeps)
    name, shape = "model.layers.0.mlp.down_proj.weight", (spec.hidden_size, spec.intermediate_size)
    matrix = checkpoint.matrix(name, shape)
    if isinstance(matrix, Tensor):
        is_short = matrix.dtype != torch.float32 or torch.equal(matrix.bfloat16().float(), matrix)
        return "16 bits" if is_short else "float32"
    return "8 bits" if isinstance(matrix, Int8Groups) and "FP4" in row.name else "as it is stored"


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert text == page(text), "run python -m models.formats.format_table"

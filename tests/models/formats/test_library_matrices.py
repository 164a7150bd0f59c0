"""bitsandbytes, HQQ and torchao: their tensors mean what their formats say, whole and on two ranks, and none of their code is run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.cpu.stored import KEPT
from kernels.packed import Int8Groups, Kind, Weight, as_float
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, whole
from models.registry import load_model
from tests.models.checkpoints import CPU
from tests.models.formats.test_quantised import equal_models
from tests.models.formats.test_scaled_matrices import two_ranks
from tests.models.stored import quantise_all, rewrite
from tests.models.stored_by_libraries import (
    TORCHAO,
    WAYS,
    bitsandbytes4,
    hqq,
    hqq_config,
    name_classes,
    torchao_config,
)
from tests.models.stored_scaled import Stored, meaning

GPU: frozenset[Kind] = frozenset(("float8", "int8", "four_bit", "mxfp4", "nvfp4"))


def stored(folder: Path, way: str, **sizes: Any) -> Path:
    """A checkpoint in `folder`, and one of the floats that it means, which is returned."""
    if way in WAYS:
        return meaning(folder, *WAYS[way], **sizes)
    store, kind, data = TORCHAO[way]
    plain = meaning(folder, store, torchao_config(way), **sizes)
    name_classes(folder, kind, **data)
    return plain


@pytest.mark.parametrize("way", [*WAYS, *TORCHAO])
def test_it_says_what_its_floats_say(way: str, tmp_path: Path) -> None:
    plain = stored(tmp_path / "stored", way)
    equal_models(tmp_path / "stored", plain)


@pytest.mark.parametrize("way", ["NF4, nested", "LLM.int8", "HQQ, 4 bits, axis 0", *TORCHAO])
def test_two_ranks_equal_the_whole(way: str, tmp_path: Path) -> None:
    stored(tmp_path / "stored", way)
    want, found = two_ranks(tmp_path / "stored")
    for got in found:
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def held(folder: Path, keeps: frozenset[Kind]) -> tuple[Weight, Tensor]:
    """A matrix as it is kept, and its numbers."""
    how = read_spec(folder).quantisation
    checkpoint = Checkpoint(folder, torch.float32, CPU, whole, how, keeps)
    name = "model.layers.0.mlp.down_proj.weight"
    return checkpoint.matrix(name, (64, 96)), checkpoint.take(name, (64, 96))


@pytest.mark.parametrize("way", ["LLM.int8", "Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_a_cpu_keeps_whole_numbers_as_they_are(way: str, tmp_path: Path) -> None:
    stored(tmp_path / "stored", way)
    matrix, floats = held(tmp_path / "stored", KEPT)
    assert isinstance(matrix, Int8Groups)
    torch.testing.assert_close(as_float(matrix, torch.float32), floats, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("store", "how", "dtype"),
    [
        (bitsandbytes4, WAYS["NF4"][1], torch.bfloat16),
        (lambda weight: bitsandbytes4(weight, dtype="float16"), WAYS["NF4"][1], torch.float16),
        (lambda weight: bitsandbytes4(weight, dtype="float32"), WAYS["NF4"][1], torch.float32),
        (lambda weight: hqq(weight, 4, 1, dtype=torch.float16), hqq_config(4, 1), torch.float16),
    ],
)
def test_a_cpu_has_the_16_bits_of_their_libraries(
    store: Callable[[Tensor], Stored], how: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    meaning(tmp_path / "stored", store, how)
    matrix, floats = held(tmp_path / "stored", KEPT)
    assert isinstance(matrix, Tensor)
    assert matrix.dtype == dtype
    assert torch.equal(matrix, floats.to(dtype))


@pytest.mark.parametrize("way", ["NF4", "LLM.int8", "HQQ, 4 bits, axis 1", "Int8WeightOnlyConfig"])
def test_gpus_make_them_floats(way: str, tmp_path: Path) -> None:
    """A kernel of INT8 would round the large activations that LLM.int8 keeps in 16 bits."""
    stored(tmp_path / "stored", way)
    matrix, floats = held(tmp_path / "stored", GPU)
    assert isinstance(matrix, Tensor)
    assert torch.equal(matrix, floats)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (hqq_config(5, 1), r"hqq, 5 bits"),
        (
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}, "scale_quant_params": {"nbits": 8}}},
            r"hqq with quantised scales",
        ),
        (torchao_config("Int4DynamicActivationInt4WeightConfig"), r"torchao, Int4DynamicActivationInt4WeightConfig"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, r"torchao, int4_weight_only"),
    ],
)  # fmt: skip
def test_other_ways_of_theirs_are_refused_by_name(how: dict[str, Any], named: str, tmp_path: Path) -> None:
    quantise_all(tmp_path, "llama", lambda weight: {"weight": weight}, quantization_config=how)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=named):
        load_model(tmp_path, "float32", CPU)


def test_a_class_that_is_not_read_is_named(tmp_path: Path) -> None:
    stored(tmp_path / "stored", "Int4WeightOnlyConfig")
    name_classes(tmp_path / "stored", "Int4TilePackedTo4dTensor")
    with pytest.raises(UnsupportedModel, match=r"q_proj\.weight.*torchao's Int4TilePackedTo4dTensor"):
        load_model(tmp_path / "stored", "float32", CPU)


def ampere(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight_format"
    tensors[name] = torch.tensor(3, dtype=torch.uint8)


def other_shape(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4"
    said = json.loads(bytes(tensors[name].tolist())) | {"shape": [3, 5]}
    tensors[name] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def no_scales(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.0.self_attn.q_proj.weight.absmax"]


@pytest.mark.parametrize(
    ("way", "harm", "named"),
    [
        ("LLM.int8", ampere, r"laid out for one kind of GPU.*weight_format"),
        ("NF4", other_shape, r"q_proj\.weight' is \(3, 5\)"),
        ("NF4", no_scales, r"q_proj\.weight\.absmax"),
    ],
)
def test_what_does_not_fit_is_named(
    way: str, harm: Callable[[dict[str, Tensor]], None], named: str, tmp_path: Path
) -> None:
    store, how = WAYS[way]
    quantise_all(tmp_path, "qwen3", lambda weight: store(weight)[0], quantization_config=how)
    tensors = load_file(tmp_path / "model.safetensors")
    harm(tensors)
    rewrite(tmp_path, tensors)
    with pytest.raises(UnsupportedModel, match=named):
        load_model(tmp_path, "float32", CPU)

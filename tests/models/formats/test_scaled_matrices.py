"""FP8, MXFP8, MXFP4 and NVFP4 of every publisher, against their definitions and against what other people's readers make of them."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.errors import UnsupportedModel
from engine.sizing.model_dims import dims_of, rules_of
from models.formats.checkpoint import Checkpoint
from models.registry import load_model
from models.spec.quantisation import Quantisation
from parallel.mesh import Mesh
from parallel.rules import Sharding
from tests.models.checkpoints import CPU, FAMILIES, Paged, make
from tests.models.formats.test_quantised import PROMPT, compare, equal_models
from tests.models.parts import Meeting
from tests.models.stored import compressed, packed_parts, quantise_all, rewrite
from tests.models.stored_scaled import (
    WAYS,
    Parts,
    Stored,
    compressed_nvfp4,
    fp8,
    meaning,
    modelopt,
    modelopt_nvfp4,
    mxfp4,
    mxfp8,
    scaled_checkpoint,
)

SIZES = {"intermediate_size": 128, "head_dim": 16}
"""Sizes of which a half is still whole groups of 32."""


@pytest.mark.parametrize("way", WAYS)
def test_it_says_what_its_floats_say(way: str, tmp_path: Path) -> None:
    plain = meaning(tmp_path / "stored", *WAYS[way])
    equal_models(tmp_path / "stored", plain)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("way", [way for way in WAYS if "compressed-tensors" in way])
def test_transformers_reads_the_same_numbers(way: str, tmp_path: Path) -> None:
    scaled_checkpoint(tmp_path, way)
    compare(tmp_path, transformers.CompressedTensorsConfig(dequantize=True))


def test_transformers_reads_the_same_exponents(tmp_path: Path) -> None:
    scaled_checkpoint(tmp_path, "FP8 of DeepSeek with exponents")
    how = transformers.FineGrainedFP8Config(weight_block_size=(1, 32), dequantize=True)
    compare(tmp_path, how)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_modelopts_nvfp4_is_what_llm_compressor_makes_of_it(tmp_path: Path) -> None:
    """The scale of all is a power of two, so that its bfloat16 has every number."""
    ours, theirs = tmp_path / "modelopt", tmp_path / "compressed"
    for folder in (ours, theirs):
        how = modelopt("NVFP4", group_size=16)
        quantise_all(
            folder, "qwen3", lambda weight: modelopt_nvfp4(weight, 2.0**-15)[0], quantization_config=how
        )
    tensors = load_file(theirs / "model.safetensors")
    converter = ModelOptNvfp4Converter(targets=["re:.*_proj"], ignore=["lm_head"])
    rewrite(theirs, converter.process(tensors), quantization_config=WAYS["NVFP4 of compressed-tensors"][1])
    compare(theirs, transformers.CompressedTensorsConfig(dequantize=True))
    equal_models(ours, theirs)


def two_ranks(folder: Path) -> tuple[Tensor, list[Tensor]]:
    whole = Paged(load_model(folder, "float32", CPU), 1, random.Random(0))
    (want,) = whole.step([(0, 0, PROMPT)])
    spec, meeting = whole.model.spec, Meeting(2)

    def rank(i: int) -> Tensor:
        sharding = Sharding(dims_of(spec), Mesh(tp=2), i, rules_of(spec))
        collectives = meeting.collectives(i, spec.vocab_size)
        paged = Paged(
            load_model(folder, "float32", CPU, sharding, collectives=collectives), 1, random.Random(0)
        )
        paged.kv = [layer.chunk(2, 2)[i].contiguous() for layer in paged.kv]
        return paged.step([(0, 0, PROMPT)])[0]

    return want, meeting.run(rank)


@pytest.mark.parametrize("way", ["NVFP4 of ModelOpt", "MXFP4 of compressed-tensors", "MXFP8 of ModelOpt"])
@pytest.mark.parametrize("sizes", [SIZES, {"head_dim": 16, "intermediate_size": 96}], ids=["whole", "halved"])
def test_two_ranks_equal_the_whole(way: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """Floats are cut anywhere, inside a group, too."""
    scaled_checkpoint(tmp_path, way, **sizes)
    want, found = two_ranks(tmp_path)
    for got in found:
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "columns", [[slice(0, 32)], [slice(3, 4), slice(9, 24), slice(31, 32)], [slice(1, 2)]]
)
def test_a_part_begins_and_ends_inside_a_byte(columns: list[slice], tmp_path: Path) -> None:
    parts, meant = modelopt_nvfp4(torch.empty(6, 32))
    save_file({f"x.{name}": part for name, part in parts.items()}, tmp_path / "model.safetensors")
    how, cut = Quantisation(kind="scaled", number="float4", block=(1, 16)), [[slice(1, 4)], columns]
    checkpoint = Checkpoint(tmp_path, torch.float32, CPU, lambda name, shape: cut, how)
    got = checkpoint.take("x.weight", (6, 32))
    torch.testing.assert_close(got, torch.cat([meant[1:4, run] for run in columns], 1))
    checkpoint.close()


def mixed(weight: Tensor, ways: dict[int, Callable[[Tensor], Stored]]) -> Stored:
    """By the number of inputs: 64 of attention and of gates and ups, 128 of downs."""
    return ways[weight.shape[1]](weight)


MIXED: dict[str, tuple[dict[int, Callable[[Tensor], Stored]], dict[str, Any]]] = {
    "ModelOpt": (
        {64: fp8, 128: modelopt_nvfp4},
        modelopt(
            "MIXED_PRECISION",
            quantized_layers={"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}},
        ),
    ),
    "compressed-tensors": (
        {64: mxfp8, 128: compressed_nvfp4},
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                name: {"format": how["format"], **how["config_groups"]["group_0"]}
                for name, how in (
                    ("group_0", WAYS["MXFP8 of compressed-tensors"][1]),
                    ("group_1", WAYS["NVFP4 of compressed-tensors"][1]),
                )
            },
        },
    ),
    "Quark": (
        {64: fp8, 128: lambda weight: mxfp4(weight, "weight")},
        WAYS["FP8 of Quark"][1]
        | {"layer_quant_config": {"*down_proj": WAYS["MXFP4 of Quark"][1]["global_quant_config"]}},
    ),
}


@pytest.mark.parametrize("publisher", MIXED)
def test_layers_are_stored_in_different_ways(publisher: str, tmp_path: Path) -> None:
    ways, how = MIXED[publisher]
    sizes = {"intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
    plain = meaning(tmp_path / "stored", lambda weight: mixed(weight, ways), how, **sizes)
    equal_models(tmp_path / "stored", plain)


def test_words_of_different_groups_and_bits_are_told_apart(tmp_path: Path) -> None:
    """One quantisation for each size says what the mixture must say, too."""
    kinds = {64: (16, 4), 128: (32, 8)}
    groups = {
        f"group_{size}": compressed(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=group)
        ["config_groups"]["group_0"] | {"format": "pack-quantized"}
        for size, (group, bits) in kinds.items()
    }  # fmt: skip
    whole = compressed(num_bits=4, type="int", symmetric=True, strategy="group", group_size=16)

    def store(weight: Tensor) -> Stored:
        group, bits = kinds[weight.shape[1]]
        parts = packed_parts("packed", weight, group, bits, symmetric=True)
        each = 32 // bits
        shifts = torch.arange(0, 32, bits)
        numbers = (parts["weight_packed"].long()[..., None] >> shifts & 2**bits - 1).flatten(1) - 2 ** (
            bits - 1
        )
        assert numbers.shape[1] == parts["weight_packed"].shape[1] * each
        return parts, numbers.float() * parts["weight_scale"].repeat_interleave(group, 1)

    how = whole | {"config_groups": groups}
    plain = meaning(tmp_path / "stored", store, how, intermediate_size=128, head_dim=16)
    equal_models(tmp_path / "stored", plain)


@pytest.mark.parametrize(
    ("file", "content", "store"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, modelopt_nvfp4),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, fp8),
    ],
    ids=["NVFP4", "FP8"],
)
def test_modelopts_own_file_is_read(
    file: str, content: dict[str, Any], store: Callable[[Tensor], Stored], tmp_path: Path
) -> None:
    folder = tmp_path / "stored"
    plain = meaning(folder, store, {})
    (folder / file).write_text(json.dumps({"producer": {"name": "modelopt"}, **content}))
    equal_models(folder, plain)


@pytest.mark.parametrize(("file", "kind"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_files_of_autogptq_and_autoawq_say_the_same_as_config_json(
    file: str, kind: str, tmp_path: Path
) -> None:
    said = {"bits": 4, "group_size": 16, "desc_act": False}
    if kind == "awq":
        said = {"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"}
    for folder, how in ((tmp_path / "own", {}), (tmp_path / "same", {"quant_method": kind, **said})):
        quantise_all(folder, "llama", lambda weight: packed_parts(kind, weight, 16), quantization_config=how)
    (tmp_path / "own" / file).write_text(json.dumps(said))
    equal_models(tmp_path / "own", tmp_path / "same")


def test_kv_alone_in_fewer_bits_leaves_weights_as_they_are(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["llama"](random.Random(0), 0), seed=0)
    said = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    assert load_model(tmp_path, "float32", CPU).spec.quantisation is None


def lacks(parts: Parts) -> None:
    del parts["weight_scale"]


def misshapen(parts: Parts) -> None:
    parts["weight_scale"] = parts["weight_scale"][:, 1:].contiguous()


def several(parts: Parts) -> None:
    parts["weight_scale_2"] = torch.ones(3)


@pytest.mark.parametrize(
    ("harm", "named"), [(lacks, "weight_scale"), (misshapen, "weight_scale"), (several, "weight_scale_2")]
)
def test_scales_that_do_not_fit_are_named(harm: Callable[[Parts], None], named: str, tmp_path: Path) -> None:
    def store(weight: Tensor) -> Parts:
        parts = modelopt_nvfp4(weight)[0]
        harm(parts)
        return parts

    quantise_all(tmp_path, "qwen3", store, quantization_config=modelopt("NVFP4"))
    with pytest.raises(UnsupportedModel, match=rf"layers\.0\.self_attn\.q_proj\.{named}'"):
        load_model(tmp_path, "float32", CPU)


SPARSE = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (modelopt("NVFP4_AWQ"), r"modelopt, quant_algo NVFP4_AWQ"),
        (modelopt("W4A16_AWQ"), r"modelopt, quant_algo W4A16_AWQ"),
        (modelopt("MIXED_PRECISION"), r"MIXED_PRECISION without quantized_layers"),
        (
            compressed(num_bits=8, type="float", strategy="channel") | {"sparsity_config": SPARSE},
            r"sparsity 2:4",
        ),
        (compressed(num_bits=4, type="int", strategy="channel") | {"format": "marlin-24"}, r"2:4.*marlin-24"),
        (compressed(num_bits=6, type="float", strategy="group", group_size=32), r"6 bits, float, group"),
        ({"quant_method": "compressed-tensors"}, r"no config_groups"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, r"quark, int4"),
        ({"quant_method": "quark", "global_quant_config": {"weight": [{}, {}]}}, r"several stages"),
        ({"producer": {"name": "mystery"}, "bits": 4}, r"\(mystery\)"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(how: dict[str, Any], named: str, tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["llama"](random.Random(0), 0), seed=0)
    (tmp_path / "model.safetensors").rename(tmp_path / "unread")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": how}))
    with pytest.raises(UnsupportedModel, match=named):
        load_model(tmp_path, "float32", CPU)


def test_dense_sparsity_is_none(tmp_path: Path) -> None:
    store, how = WAYS["MXFP8 of compressed-tensors"]
    plain = meaning(tmp_path / "stored", store, how | {"sparsity_config": {"format": "dense"}})
    equal_models(tmp_path / "stored", plain)

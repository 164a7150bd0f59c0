"""Checkpoints of eight and four bits, against what transformers makes of them."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.errors import UnsupportedModel
from engine.sizing.model_dims import dims_of, rules_of
from models.formats.checkpoint import Checkpoint
from models.registry import load_model
from models.spec.quantisation import Quantisation
from parallel.mesh import Mesh
from parallel.rules import Sharding
from tests.models.checkpoints import CPU, FAMILIES, Paged, make
from tests.models.parts import Meeting
from tests.models.stored import (
    BLOCK,
    compressed,
    four_bits,
    mxfp4_checkpoint,
    packed_checkpoint,
    packed_parts,
    quantise_all,
    rewrite,
    scaled,
)

PROMPT = list(range(2, 40))
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": BLOCK}


def to_fp8(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (math.ceil(size / of) for size, of in zip(weight.shape, block, strict=True))
    scales = torch.rand(rows, columns) * 0.01 + 0.001
    full = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (weight / full[: weight.shape[0], : weight.shape[1]]).clamp(-448, 448).to(
        torch.float8_e4m3fn
    ), scales


def fp8_checkpoint(folder: Path, family: str) -> None:
    config = FAMILIES[family](random.Random(0), 0)
    config.vocab_size = 62
    make(folder, config, seed=0)
    tensors = load_file(folder / "model.safetensors")
    parts = ("_proj.", "indexer.wq_b.", "indexer.wk.")
    for name in [n for n in tensors if any(part in n for part in parts) and n.endswith("weight")]:
        if "weights_proj" in name:  # published ones have it in 16 bits
            continue
        tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensors[name])
    rewrite(folder, tensors, quantization_config=FP8)


def compare(folder: Path, quantisation: Any) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=quantisation
    ).float()
    with torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]
    paged = Paged(load_model(folder, "float32", CPU), 1, random.Random(0))
    got = torch.cat(paged.step([(0, 0, PROMPT[:20])]) + paged.step([(0, 20, PROMPT[20:])]))
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "deepseek_v32"])
def test_fp8_in_blocks(family: str, tmp_path: Path) -> None:
    fp8_checkpoint(tmp_path, family)
    compare(tmp_path, transformers.FineGrainedFP8Config(weight_block_size=BLOCK, dequantize=True))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("kind", ["float", "int"])
def test_eight_bits_of_compressed_tensors(kind: str, strategy: str, tmp_path: Path) -> None:
    def quantise(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scales = scaled(weight, kind, strategy)
        return {"weight": values, "weight_scale": scales}

    block = {"block_structure": BLOCK} if strategy == "block" else {}
    how = compressed(num_bits=8, type=kind, strategy=strategy, **block)
    quantise_all(tmp_path, "qwen3", quantise, quantization_config=how)
    compare(tmp_path, transformers.CompressedTensorsConfig(dequantize=True))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("strategy", ["channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_compressed_tensors(bits: int, symmetric: bool, strategy: str, tmp_path: Path) -> None:
    size = 16 if strategy == "group" else 0
    packed_checkpoint(tmp_path, "packed", size, bits, symmetric=symmetric)
    compare(tmp_path, transformers.CompressedTensorsConfig(dequantize=True))


@pytest.mark.parametrize(
    "names",
    [("weight_scale", "input_scale"), ("weight_scale_inv", "activation_scale")],
    ids=["llm-compressor", "mistral"],
)
def test_fp8_with_one_scale(names: tuple[str, str], tmp_path: Path) -> None:
    """Static scales of activations, which are not needed here, lie beside the weights."""

    def quantise(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scales = scaled(weight, "float", "tensor")
        return {"weight": values, names[0]: scales[0], names[1]: torch.tensor(0.1)}

    plain, stored = tmp_path / "plain", tmp_path / "stored"
    quantise_all(stored, "llama", quantise, quantization_config={"quant_method": "fp8"})
    quantise_all(plain, "llama", lambda weight: {"weight": from_one_scale(*quantise(weight).values())})
    equal_models(stored, plain)


def from_one_scale(values: torch.Tensor, scale: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return values.float() * scale


def equal_models(stored: Path, plain: Path) -> None:
    got, want = (
        Paged(load_model(folder, "float32", CPU), 1, random.Random(0)).step([(0, 0, PROMPT)])[0]
        for folder in (stored, plain)
    )
    assert want.std() > 0.01
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("awq", 4), *((kind, bits) for kind in ("gptq", "gptq_v2", "gptq, any order") for bits in (4, 8))],
)
def test_words_of_awq_and_gptq(kind: str, bits: int, tmp_path: Path) -> None:
    size, made = 16, []

    def quantise(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        made.append(packed_parts(kind, weight, size, bits))
        return made[-1]

    how = {"quant_method": kind.split(",")[0].split("_")[0], "bits": bits, "group_size": size}
    if kind == "gptq_v2":
        how["checkpoint_format"] = "gptq_v2"
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    quantise_all(stored, "llama", quantise, quantization_config=how)
    again = iter(list(made))
    quantise_all(plain, "llama", lambda _: {"weight": four_bits(kind.split(",")[0], next(again), size, bits)})
    equal_models(stored, plain)


def test_mxfp4(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path)
    compare(tmp_path, transformers.Mxfp4Config(dequantize=True))


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "deepseek_v32", "gpt_oss", "llama"])
def test_two_ranks_equal_the_whole(family: str, tmp_path: Path) -> None:
    """MXFP4 is cut between its groups, of which there are three here: one rank holds twice as much of each expert. Llama's four
    bits are AWQ's."""
    if family == "gpt_oss":
        mxfp4_checkpoint(tmp_path)
    elif family == "llama":
        how = {"quant_method": "awq", "bits": 4, "group_size": 16}
        quantise_all(
            tmp_path, family, lambda weight: packed_parts("awq", weight, 16), quantization_config=how
        )
    else:
        fp8_checkpoint(tmp_path, family)
    whole = Paged(load_model(tmp_path, "float32", CPU), 1, random.Random(0))
    (want,) = whole.step([(0, 0, PROMPT)])
    spec, meeting = whole.model.spec, Meeting(2)

    def rank(i: int) -> torch.Tensor:
        sharding = Sharding(dims_of(spec), Mesh(tp=2), i, rules_of(spec))
        collectives = meeting.collectives(i, spec.vocab_size)
        model = load_model(tmp_path, "float32", CPU, sharding, collectives=collectives)
        paged = Paged(model, 1, random.Random(0))
        if spec.mla is None:
            paged.kv = [layer.chunk(2, 2)[i].contiguous() for layer in paged.kv]
        return paged.step([(0, 0, PROMPT)])[0]

    for got in meeting.run(rank):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "cut", [[[slice(0, 40)], [slice(0, 20)]], [[slice(5, 37)], [slice(3, 4), slice(9, 20)]]]
)
def test_a_part_of_an_fp8_matrix_has_the_scales_of_its_blocks(cut: Any, tmp_path: Path) -> None:
    values, scales = to_fp8(torch.randn(40, 20), (16, 8))
    save_file({"x": values, "x_scale_inv": scales}, tmp_path / "model.safetensors")
    how = Quantisation(kind="scaled", block=(16, 8))
    checkpoint = Checkpoint(tmp_path, torch.float32, CPU, lambda name, shape: cut, how)
    got = checkpoint.take("x", (40, 20))
    rows, columns = ([i for run in runs for i in range(run.start, run.stop)] for runs in cut)
    want = [[float(values[r, c]) * float(scales[r // 16, c // 8]) for c in columns] for r in rows]
    torch.testing.assert_close(got, torch.tensor(want))
    checkpoint.close()


@pytest.mark.parametrize("kind", ["lacks", "misshapen", "surplus"])
def test_scales_that_do_not_fit_are_named(kind: str, tmp_path: Path) -> None:
    fp8_checkpoint(tmp_path, "qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    match kind:
        case "lacks":
            del tensors[name]
        case "misshapen":
            tensors[name] = tensors[name][:1].contiguous()
        case _:
            name = "model.layers.0.mlp.side_proj.weight_scale_inv"
            tensors[name] = torch.ones(1)
    rewrite(tmp_path, tensors)
    with pytest.raises(UnsupportedModel, match=name):
        load_model(tmp_path, "float32", CPU)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_tensor_of_an_unannounced_kind_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    fp8_checkpoint(tmp_path, "qwen3")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors[name].float().to(dtype)
    rewrite(tmp_path, tensors, quantization_config=None)
    with pytest.raises(UnsupportedModel, match="is stored as (F8_E4M3|I8), which is not supported"):
        load_model(tmp_path, "float32", CPU)


@pytest.mark.parametrize(
    ("quantisation", "named"),
    [
        ({"quant_method": "aqlm"}, r"\(aqlm\)"),
        ({"quant_method": "mxfp4"}, r"\(mxfp4\)"),
        ({"quant_method": "gptq", "bits": 3}, r"\(gptq, 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, r"checkpoint_format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"\(awq, 4 bits, version gemv"),
        (compressed(num_bits=4, type="float", strategy="channel"), r"4 bits, float, channel"),
        (compressed(num_bits=8, type="int", strategy="channel", symmetric=False), r"channel, asymmetric"),
        (
            compressed(num_bits=8, type="int", strategy="channel") | {"transform_config": {"a": 1}},
            "transforms",
        ),
        ({}, None),
    ],
)
def test_other_quantisations_are_refused_by_name(
    quantisation: dict[str, Any], named: str | None, tmp_path: Path
) -> None:
    make(tmp_path, FAMILIES["llama"](random.Random(0), 0), seed=0)
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), quantization_config=quantisation)
    if named is None:
        load_model(tmp_path, "float32", CPU)
    else:
        with pytest.raises(UnsupportedModel, match=named):
            load_model(tmp_path, "float32", CPU)

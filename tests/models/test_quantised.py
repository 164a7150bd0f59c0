"""Checkpoints of eight and four bits, against what transformers makes of them."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.errors import UnsupportedModel
from engine.dims import dims_of, rules_of
from models.registry import load_model
from models.weights import Checkpoint
from parallel.mesh import Mesh
from parallel.rules import Sharding
from tests.models.checkpoints import CPU, FAMILIES, Paged, make
from tests.models.parts import Meeting

PROMPT = list(range(2, 40))
BLOCK = (4, 2)
"""Divides every size below: transformers knows no blocks that are cut off."""
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": BLOCK}


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


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
    for name in [n for n in tensors if "_proj" in n and n.endswith("weight")]:
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


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_fp8_in_blocks(family: str, tmp_path: Path) -> None:
    fp8_checkpoint(tmp_path, family)
    compare(tmp_path, transformers.FineGrainedFP8Config(weight_block_size=BLOCK, dequantize=True))


def mxfp4_checkpoint(folder: Path) -> None:
    config = FAMILIES["gpt_oss"](random.Random(3), 0)
    config.hidden_size, config.intermediate_size = 64, 96
    config.num_attention_heads, config.num_key_value_heads, config.vocab_size = 4, 2, 62
    make(folder, config, seed=0)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (num, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 126, (num, outputs, inputs // 32), dtype=torch.uint8)
    rewrite(folder, tensors, quantization_config={"quant_method": "mxfp4"})


def test_mxfp4(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path)
    compare(tmp_path, transformers.Mxfp4Config(dequantize=True))


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss"])
def test_two_ranks_equal_the_whole(family: str, tmp_path: Path) -> None:
    """MXFP4 is cut between its groups, of which there are three here: one rank holds twice as much of each expert."""
    if family == "gpt_oss":
        mxfp4_checkpoint(tmp_path)
    else:
        fp8_checkpoint(tmp_path, family)
    whole = Paged(load_model(tmp_path, "float32", CPU), 1, random.Random(0))
    (want,) = whole.step([(0, 0, PROMPT)])
    spec, meeting = whole.model.spec, Meeting(2)

    def rank(i: int) -> torch.Tensor:
        sharding = Sharding(dims_of(spec), Mesh(tp=2), i, rules_of(spec))
        model = load_model(tmp_path, "float32", CPU, sharding, joins=meeting.joins(i))
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
    checkpoint = Checkpoint(tmp_path, torch.float32, CPU, lambda name, shape: cut, (16, 8))
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
        ({"quant_method": "fp8"}, r"fp8 without weight_block_size"),
        ({"quant_method": "mxfp4"}, r"\(mxfp4\)"),
        ({"quant_method": "gptq"}, r"\(gptq\)"),
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

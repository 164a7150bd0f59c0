"""DeepSeek-V4 as its publisher says and stores it, beside transformers' reading of the same."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.errors import UnsupportedModel
from models.families.table import read_spec
from models.registry import load_model
from models.spec.compressed_spec import CompressedSpec
from tests.models.checkpoints import CPU, VOCAB, Paged, make
from tests.models.compressed_families import deepseek_v4

PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "compress_ratios": [0, 0, 4, 128, 4],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "num_hash_layers": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}  # fmt: skip
"""As published, with fewer layers."""


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(PUBLISHED | changes))
    return folder


def kept(folder: Path) -> CompressedSpec:
    found = read_spec(folder).compressed
    assert found is not None
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compress_ratios": None, "num_hidden_layers": 7},
        {"compress_rate_csa": 8, "compress_rate_hca": 64},
        {"num_hash_layers": 0, "partial_rotary_factor": 0.25},
    ],
)
def test_a_published_configuration_means_what_transformers_takes_it_to_mean(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    said = {key: value for key, value in (PUBLISHED | changes).items() if value is not None}
    theirs = transformers.DeepseekV4Config(**json.loads(json.dumps(said)))
    spec, own = read_spec(write(tmp_path, **changes)), kept(tmp_path)
    rates: Any = {"sliding_attention": 0, **(theirs.compress_rates or {})}
    kinds: list[str] = list(theirs.layer_types or ())
    assert own.rates == tuple(rates[kind] for kind in kinds)
    assert own.chooses == tuple(kind == "compressed_sparse_attention" for kind in kinds)
    assert spec.moe is not None
    assert spec.moe.by_token == tuple(kind == "hash_moe" for kind in theirs.mlp_layer_types or ())
    ropes: Any = theirs.rope_parameters
    for rate, rope in zip(own.rates, spec.layer_ropes, strict=True):
        want = ropes["compress" if rate else "main"]
        assert (rope.kind, rope.theta) == (want["rope_type"], want["rope_theta"])
        assert rope.head_dim == int(512 * want["partial_rotary_factor"])
        assert rope.parameters.get("attention_factor") == want.get("attention_factor")


def test_a_token_and_a_state_take_what_they_must(tmp_path: Path) -> None:
    layout = read_spec(write(tmp_path)).kv_layout(16, "bfloat16")
    assert (layout.head_dim, layout.state_blocks) == (512 + (512 + 128) // 4, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh' is not supported"),
        ({"compress_ratios": [0, 0, 4, 128, 5]}, "layer type '5' is not supported"),
        ({"compress_ratios": [4]}, "layer_types has 1 entries for 5"),
        ({"o_groups": 7}, "cannot be divided into o_groups 7 groups"),
        ({"qk_rope_head_dim": 63}, "63 dimensions are rotated"),
        ({"mlp_layer_types": ["moe"]}, "hash_moe or moe for each of 5 layers"),
        ({"compress_rates": {"heavily_compressed_attention": -1}}, "one entry of -1 tokens"),
        (
            {"quantization_config": {"quant_method": "fp8", "expert_dtype": "fp2"}},
            "expert_dtype fp2",
        ),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read_spec(write(tmp_path, **changes))


def test_weights_in_the_names_and_bits_of_their_publisher(tmp_path: Path) -> None:
    """FP8 by blocks of 128 with exponents as scales, experts in FP4; what they mean is put into transformers' model."""
    config = deepseek_v4(random.Random(0), 0)
    config.hidden_size, config.moe_intermediate_size, config.q_lora_rank = 128, 64, 128
    reference = make(tmp_path / "floats", config, seed=4)
    published = tmp_path / "published"
    published.mkdir()
    tensors: dict[str, Tensor] = {}
    for file in sorted((tmp_path / "floats").glob("*.safetensors")):
        for name, value in load_file(file).items():
            name = own_name(name)
            tensors |= stored(name, value)
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    said = json.loads((tmp_path / "floats" / "config.json").read_text())
    how = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    (published / "config.json").write_text(
        json.dumps(said | {"quantization_config": how, "expert_dtype": "fp4"})
    )
    put_meaning(reference, tensors)
    text = random.Random(7).choices(range(2, VOCAB), k=60)
    with torch.inference_mode():
        want = reference(torch.tensor([text])).logits[0]
    model = load_model(published, "float32", CPU)
    (got,) = Paged(model, 1, random.Random(0)).step([(0, 0, text)])
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def own_name(name: str) -> str:
    """Return what DeepSeek calls a tensor that transformers has saved."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


_EIGHT = re.compile(r".*\.(wq_[ab]|wkv|wo_[ab]|w[123])\.weight")
_TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def stored(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return the tensors that have a matrix in few bits."""
    scale = name.replace(".weight", ".scale")
    if ".experts." in name and "shared" not in name:
        exponents = value.abs().unflatten(1, (-1, 32)).amax(-1).div(6).log2().ceil()
        numbers = value.unflatten(1, (-1, 32)) / exponents.exp2()[..., None]
        codes = (numbers.abs()[..., None] - _TABLE).abs().argmin(-1) + 8 * (numbers < 0)
        codes = codes.flatten(1).to(torch.uint8)
        pairs = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
        return {name: pairs, scale: exponents.exp2().to(torch.float8_e8m0fnu)}
    if not _EIGHT.fullmatch(name) or "compressor" in name:
        return {name: value}
    rows, columns = (-(-size // 128) for size in value.shape)
    exponents = torch.randint(-10, -6, (rows, columns)).float().exp2()
    full = exponents.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(value), : value.shape[1]]
    return {
        name: (value / full).clamp(-448, 448).to(torch.float8_e4m3fn),
        scale: exponents.to(torch.float8_e8m0fnu),
    }


def put_meaning(reference: Any, tensors: dict[str, Tensor]) -> None:
    """Give the reference the numbers that the tensors stand for."""
    own: dict[str, Tensor] = {}
    for name, value in tensors.items():
        scale = tensors.get(name.replace(".weight", ".scale"))
        if not name.endswith(".weight") or scale is None:
            continue
        if value.dtype == torch.int8:
            bytes_ = value.view(torch.uint8).long()
            codes = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(1)
            numbers = _TABLE[codes & 7] * (1 - 2 * (codes >> 3))
            own[name] = numbers * scale.float().repeat_interleave(32, 1)
        else:
            full = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            own[name] = value.float() * full[: len(value), : value.shape[1]]
    with torch.no_grad():
        for number, layer in enumerate(reference.model.layers):
            attention, block, prefix = layer.self_attn, layer.mlp, f"layers.{number}."
            for theirs, ours in (("q_a", "wq_a"), ("q_b", "wq_b"), ("kv", "wkv"), ("o_a", "wo_a"), ("o_b", "wo_b")):  # fmt: skip
                getattr(attention, f"{theirs}_proj").weight.copy_(own[f"{prefix}attn.{ours}.weight"])
            index = f"{prefix}attn.indexer.wq_b.weight"
            if index in own:
                attention.compressor.indexer.q_b_proj.weight.copy_(own[index])
            for theirs, ours in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
                shared = getattr(block.shared_experts, f"{theirs}_proj")
                shared.weight.copy_(own[f"{prefix}ffn.shared_experts.{ours}.weight"])
            for expert in range(len(block.experts.down_proj)):
                w1, w2, w3 = (own[f"{prefix}ffn.experts.{expert}.w{part}.weight"] for part in (1, 2, 3))
                block.experts.gate_up_proj[expert].copy_(torch.cat((w1, w3)))
                block.experts.down_proj[expert].copy_(w2)

"""Checkpoints that are complete, damaged, tied or bfloat16; and the order in which layers become ready."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.errors import ConfigError, UnsupportedModel
from models.formats.checkpoint import Checkpoint
from models.registry import LoadOptions, load_model
from tests.models.checkpoints import BLOCK, CPU, FAMILIES, SPARSE, VOCAB, Paged, make
from tests.resident import SMAPS, resident_bytes

PROMPT = list(range(2, 40))


def checkpoint(
    folder: Path, family: str = "llama", draw: int = 0, seed: int = 0
) -> transformers.PreTrainedModel:
    return make(folder, FAMILIES[family](random.Random(draw), 0), seed)


def edit(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.turns(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_agree_loosely(family: str, dtype: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, family)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    model = load_model(tmp_path, dtype, CPU)
    paged = Paged(model, 1, random.Random(0), getattr(torch, dtype))
    got = torch.cat(paged.step([(0, 0, PROMPT[:20])]) + paged.step([(0, 20, PROMPT[20:])]))
    with torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]
    is_shaped = model.spec.logit_soft_cap or model.spec.logit_divisor != 1.0
    logits = model.logits(torch.zeros(1, model.spec.hidden_size, dtype=model.dtype))
    assert logits.dtype == (torch.float32 if is_shaped else model.dtype)
    similarity = torch.nn.functional.cosine_similarity(got, want)
    # a token whose router is undecided may go to other experts
    assert (similarity.median() if family in SPARSE else similarity.min()) > 0.99


def test_the_longest_text_that_is_served_chooses_longropes_factors(tmp_path: Path) -> None:
    """Transformers gives a short text the short ones, and Baton where no longer one can come."""
    config, prompt = FAMILIES["phi3"](random.Random(0), 0), list(range(2, 30))
    config.original_max_position_embeddings = 64
    config.rope_parameters["original_max_position_embeddings"] = 64
    reference = make(tmp_path, config, seed=1)
    with torch.inference_mode():
        want = reference(torch.tensor([prompt])).logits[0]
    for most, is_same in ((64, True), (65, False)):
        model = load_model(tmp_path, "float32", CPU, options=LoadOptions(max_context_tokens=most))
        (found,) = Paged(model, 1, random.Random(0)).step([(0, 0, prompt)])
        assert torch.allclose(found, want, atol=1e-4, rtol=1e-4) == is_same


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_every_layer_is_reported_when_its_keys_and_values_are_in_the_pool(
    family: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, family)
    model = load_model(tmp_path, "float32", CPU)
    paged = Paged(model, 1, random.Random(0))
    seen: list[tuple[int, list[bool]]] = []

    def on_layer(layer: int) -> None:
        seen.append((layer, [bool(kv.isfinite().any()) for kv in paged.kv]))

    paged.step([(0, 0, PROMPT)], on_layer)
    layers = range(model.spec.num_layers)
    assert seen == [(layer, [other <= layer for other in layers]) for layer in layers]
    layout = model.spec.kv_layout(BLOCK, "float32")
    written = paged.kv[0].isfinite().all(-1).sum()
    assert written == len(PROMPT) * layout.num_planes * layout.num_kv_heads


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    edit(tmp_path, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(UnsupportedModel, match=r"lacks the tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_model(tmp_path, "float32", CPU)


def test_a_tensor_that_no_rule_matches_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    edit(tmp_path, {"model.layers.0.self_attn.sinks": torch.zeros(2)})
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.self_attn\.sinks"):
        load_model(tmp_path, "float32", CPU)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    edit(tmp_path, {"model.norm.weight": torch.zeros(3)})
    with pytest.raises(UnsupportedModel, match=r"'model\.norm\.weight' is \(3,\)"):
        load_model(tmp_path, "float32", CPU)


def test_old_checkpoints_hold_frequencies_that_are_not_weights(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    edit(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    load_model(tmp_path, "float32", CPU)


def test_layers_for_multi_token_prediction_are_left_alone(tmp_path: Path) -> None:
    checkpoint(tmp_path, "deepseek_v3")
    num_layers = load_model(tmp_path, "float32", CPU).spec.num_layers
    edit(tmp_path, {f"model.layers.{num_layers}.eh_proj.weight": torch.zeros(4)})
    load_model(tmp_path, "float32", CPU)
    name = f"model.layers.{num_layers + 1}.eh_proj.weight"
    edit(tmp_path, {name: torch.zeros(4)})
    with pytest.raises(UnsupportedModel, match=name):
        load_model(tmp_path, "float32", CPU)


def test_tied_checkpoints_may_hold_the_head_too(tmp_path: Path) -> None:
    checkpoint(tmp_path, "gemma2")
    edit(
        tmp_path,
        {"lm_head.weight": load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"] + 0},
    )
    model = load_model(tmp_path, "float32", CPU)
    assert model.logits(torch.zeros(1, model.spec.hidden_size)).shape == (1, VOCAB)


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no model\.safetensors.*safetensors only"):
        load_model(tmp_path, "float32", CPU)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, seed=1)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load_model(tmp_path, "float32", CPU)


def test_a_damaged_index(tmp_path: Path) -> None:
    checkpoint(tmp_path, seed=1)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(ConfigError, match="no weight_map"):
        load_model(tmp_path, "float32", CPU)


@pytest.mark.parametrize("keep", [0, 5, 2000])
def test_an_incomplete_download(keep: int, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        load_model(tmp_path, "float32", CPU)


@pytest.mark.skipif(not SMAPS.exists(), reason="this system does not say what a process has of a file")
def test_what_was_read_of_a_file_leaves_memory_unless_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, file = (512, 1024), tmp_path / "model.safetensors"
    matrices = {f"model.layers.{i}.weight": torch.full(shape, float(i)) for i in range(16)}
    save_file(matrices, file, {"format": "pt"})
    monkeypatch.setattr("models.formats.tensor_files.MOST_MAPPED_BYTES", 1)
    stored = Checkpoint(tmp_path, torch.float32, CPU)
    kept, most = stored.take("model.layers.0.weight", shape), 0
    for name, matrix in matrices.items():
        assert torch.equal(stored.take(name, shape), matrix)
        most = max(most, resident_bytes(file))
    assert most < 4 * kept.nbytes
    assert torch.equal(kept, torch.zeros(shape))

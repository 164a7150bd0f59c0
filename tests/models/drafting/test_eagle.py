"""EAGLE-3 heads: what they say is what their definition says, and what cannot be one is refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import UnsupportedModel
from kernels.ops import AttentionMeta
from models.drafting.eagle import load_eagle, read_eagle
from models.families.table import read_spec
from models.registry import LoadOptions, load_model
from tests.models.checkpoints import BLOCK, CPU, VOCAB, Paged
from tests.models.eagle_checkpoints import make_eagle, make_target


@pytest.mark.parametrize(
    "keys",
    [{}, {"own_embedding": True}, {"draft_vocab": VOCAB}, {"reads": (0, 2, 3)}, {"reads": (3, 1, 1)}],
)
def test_its_logits_are_those_of_its_definition(keys: dict[str, Any], tmp_path: Path) -> None:
    """In two pieces, in blocks that lie anywhere, and of an own state behind the target's."""
    rng = random.Random(1)
    reference = make_eagle(tmp_path / "head", make_target(tmp_path), **keys)
    spec = read_eagle(tmp_path / "head", read_spec(tmp_path))
    model = load_model(tmp_path, "float32", CPU, options=LoadOptions(taps=spec.taps))
    head = load_eagle(tmp_path / "head", model, CPU, block_size=BLOCK)
    tokens, paged = [rng.randrange(VOCAB) for _ in range(11)], Paged(model, 1, rng)
    layout = spec.layer.kv_layout(BLOCK, "float32")
    shape = (8, layout.num_planes, layout.num_kv_heads, BLOCK, layout.head_dim)
    kv, table = torch.full(shape, torch.nan), np.array(rng.sample(range(8), 4))

    @torch.inference_mode()
    def states(start: int, followed: list[int], said: torch.Tensor) -> torch.Tensor:
        span = np.arange(start, start + len(followed))
        slots = table[span // BLOCK] * BLOCK + span % BLOCK
        meta = AttentionMeta.build([len(span)], [start + len(span)], [table], slots, CPU)
        return head.forward(torch.tensor(followed), said, torch.from_numpy(span), kv, meta)

    @torch.inference_mode()
    def read(start: int, part: list[int]) -> torch.Tensor:
        paged.step([(0, start, part)])
        return head.read(torch.empty(0))

    states(0, tokens[1:6], read(0, tokens[:5]))
    last = states(5, tokens[6:], read(5, tokens[5:10]))[-1:]
    torch.testing.assert_close(head.logits(last)[0], reference.logits(tokens)[0], atol=1e-4, rtol=1e-4)
    draft = int(head.logits(last).argmax())
    want = reference.logits(tokens, [draft])[1]
    torch.testing.assert_close(head.logits(states(10, [draft], last))[0], want, atol=1e-4, rtol=1e-4)


def test_what_is_no_head_of_this_model_is_refused_by_name(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    spec, folder = read_spec(tmp_path), tmp_path / "head"

    def refused(match: str, **changed: Any) -> None:
        make_eagle(folder, target)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(UnsupportedModel, match=match):
            read_eagle(folder, spec)

    refused("architecture 'Eagle3Speculator', which is no EAGLE-3 head", architectures=["Eagle3Speculator"])
    refused("num_hidden_layers 2", num_hidden_layers=2)
    refused("norm_before_residual True", norm_before_residual=True)
    refused("vocab_size 99 and hidden_size 32; LlamaForCausalLM has 61 and 32", vocab_size=99)
    refused("hidden_size 48; LlamaForCausalLM has 61 and 32", target_hidden_size=48)
    refused("no embed_tokens of its own", hidden_size=48, target_hidden_size=32)
    refused(r"before layers \(1, 8, 2\); LlamaForCausalLM has 5", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 7, 1]})  # fmt: skip
    with pytest.raises(UnsupportedModel, match="which is no EAGLE-3 head"):
        read_eagle(tmp_path, spec)


def without(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (without("d2t"), "40 of 61 tokens, and no d2t"),
        (lambda tensors: tensors["d2t"].add_(VOCAB), "names tokens that the target has not"),
        (without("fc.weight"), "lacks the tensor 'fc.weight'"),
        (lambda tensors: tensors.update(odd=torch.ones(2)), "no rule .* 'odd'"),
    ],
)
def test_tensors_that_are_missing_or_odd_are_named(change: Any, match: str, tmp_path: Path) -> None:
    make_eagle(tmp_path / "head", make_target(tmp_path))
    spec, file = read_eagle(tmp_path / "head", read_spec(tmp_path)), tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    model = load_model(tmp_path, "float32", CPU, options=LoadOptions(taps=spec.taps))
    with pytest.raises(UnsupportedModel, match=match):
        load_eagle(tmp_path / "head", model, CPU)

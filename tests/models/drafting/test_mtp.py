"""Layers for multi-token prediction: what they say is what their definition says, and what is not there is refused."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import UnsupportedModel
from kernels.ops import AttentionMeta
from kernels.packed import EightBit, Kind, LinearWeight, Weight
from kernels.torch.reference import reference_ops
from models.drafting.mtp import MtpHead, check_mtp, load_mtp
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint
from models.formats.rounded_matrix import WeightRounding
from models.model import Model
from models.registry import load_model
from tests.models.checkpoints import BLOCK, CPU, FAMILIES, VOCAB, make
from tests.models.mtp_checkpoints import MTP_FAMILIES, MtpReference, make_mtp
from tests.models.parts import Meeting, tensor_parallel

TOKENS = random.Random(5).sample(range(VOCAB), 11)


class Paged:
    """A sequence's blocks, which lie anywhere in a pool."""

    def __init__(self, head: MtpHead, model: Model) -> None:
        self.head, layout = head, model.spec.kv_layout(BLOCK, "float32")
        shape = (8, layout.num_planes, layout.num_kv_heads, BLOCK, layout.head_dim)
        self.kv, self.table = torch.full(shape, torch.nan), np.array(random.Random(1).sample(range(8), 4))

    def states(self, start: int, followed: list[int], said: torch.Tensor) -> torch.Tensor:
        span = np.arange(start, start + len(followed))
        slots = self.table[span // BLOCK] * BLOCK + span % BLOCK
        meta = AttentionMeta.build([len(span)], [start + len(span)], [self.table], slots, CPU)
        return self.head.forward(torch.tensor(followed), said, torch.from_numpy(span), self.kv, meta)

    @torch.inference_mode()
    def logits(self, said: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Behind TOKENS, of all of which but the last the target has `said` something; the likeliest token, and behind that."""
        self.states(0, TOKENS[1:6], self.head.read(said[:5]))
        last = self.states(5, TOKENS[6:], self.head.read(said[5:]))[-1:]
        first = self.head.logits(last)[0]
        draft = int(first.argmax())
        return first, draft, self.head.logits(self.states(10, [draft], last))[0]


@torch.no_grad()
def said_by(reference: MtpReference) -> torch.Tensor:
    return reference.target.model(torch.tensor([TOKENS])).last_hidden_state[0, :-1]


def check(reference: MtpReference, found: tuple[torch.Tensor, int, torch.Tensor]) -> None:
    first, draft, second = found
    torch.testing.assert_close(first, reference.logits(TOKENS)[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(second, reference.logits(TOKENS, [draft])[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_its_logits_are_those_of_its_definition(family: str, i: int, tmp_path: Path) -> None:
    """In two pieces, and of an own state behind the target's."""
    reference = make_mtp(tmp_path, family, i)
    model = load_model(tmp_path, "float32", CPU)
    assert isinstance(model, Model)
    check(reference, Paged(load_mtp(tmp_path, model, CPU), model).logits(said_by(reference)))


def test_two_halves_equal_the_whole(tmp_path: Path) -> None:
    reference, meeting = make_mtp(tmp_path, "deepseek_v3", vocab_size=VOCAB + 1), Meeting(2)
    said = said_by(reference)

    def rank(i: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        shard = tensor_parallel(i, 2)
        model = load_model(tmp_path, "float32", CPU, shard, collectives=meeting.collectives(i, VOCAB + 1))
        assert isinstance(model, Model)
        return Paged(load_mtp(tmp_path, model, CPU, shard=shard), model).logits(said)

    for found in meeting.run(rank):
        check(reference, found)


def test_a_model_or_a_checkpoint_without_one_is_refused(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["deepseek_v3"](random.Random(1), 0), seed=1)
    with pytest.raises(
        UnsupportedModel, match=r"saved without .* it has no model\.layers\.\d+\.enorm\.weight"
    ):
        check_mtp(read_spec(tmp_path), tmp_path, "auto")
    check_mtp(read_spec(tmp_path), tmp_path, "dummy")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(
        UnsupportedModel, match="DeepseekV3ForCausalLM has no layer for multi-token prediction"
    ):
        check_mtp(read_spec(tmp_path), tmp_path, "auto")


@pytest.mark.parametrize(
    ("family", "name"), [("deepseek_v3", "model.layers.{}.odd"), ("qwen3_next", "mtp.odd")]
)
def test_a_tensor_of_the_layer_that_nobody_reads_is_an_error(family: str, name: str, tmp_path: Path) -> None:
    make_mtp(tmp_path, family)
    file, odd = tmp_path / "model.safetensors", name.format(read_spec(tmp_path).num_layers)
    save_file({**load_file(file), odd: torch.ones(3)}, file)
    model = load_model(tmp_path, "float32", CPU)
    with pytest.raises(UnsupportedModel, match=f"no rule .* '{re.escape(odd)}'"):
        load_mtp(tmp_path, model, CPU)


def test_the_layer_is_rounded_as_its_model_is(tmp_path: Path) -> None:
    make_mtp(tmp_path, "qwen3_next")
    spec, keeps, packed = read_spec(tmp_path), frozenset[Kind](("int8",)), list[LinearWeight]()

    def pack(weight: Weight, dtype: torch.dtype) -> LinearWeight:
        del dtype
        packed.append(weight)
        return weight

    ops = replace(reference_ops(), keeps=keeps, pack=pack)
    rounding = WeightRounding("int8")
    checkpoint = Checkpoint(tmp_path, torch.float32, CPU, keeps=keeps, rounds=rounding)
    target = Model(spec, ops, checkpoint, CPU)
    packed.clear()
    load_mtp(tmp_path, target, CPU)
    assert any(isinstance(matrix, EightBit) for matrix in packed)

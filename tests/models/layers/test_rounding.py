"""Norms and activations round what W8A8 layers multiply, once for all layers that take it."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.ops import Ops
from kernels.packed import EightBit, Weight
from kernels.rounding import Activations, Rounded, round_to, rounding_of
from kernels.torch import reference
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, whole
from models.model import Model
from tests.models.checkpoints import CPU, Paged
from tests.models.stored import BLOCKS, W8A8_WAYS, w8a8


class Rounding8:
    """PyTorch's operations over weights as they are stored; `early`: norms and activations round."""

    def __init__(self, early: bool) -> None:
        self.given: list[Rounded] = []
        self.num_later = 0
        rounds = rounding_of if early else reference.no_rounding
        keeps = frozenset(("float8", "int8"))
        self.ops: Ops = replace(reference.reference_ops(), keeps=keeps, rounds=rounds, linear=self._linear)

    def _linear(self, x: Activations, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(x, Rounded):
            assert isinstance(weight, EightBit)
            self.given.append(x)
        elif (how := rounding_of(weight)) is not None:
            self.num_later += 1
            x = round_to(x, how)
        return reference.linear(x, weight, bias)


def logits(folder: Path, ops: Ops) -> tuple[torch.Tensor, Model]:
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder, torch.float32, CPU, whole, spec.quantisation, ops.keeps)
    model = Model(spec, ops, checkpoint, CPU)
    checkpoint.close()
    return Paged(model, 1, random.Random(0)).step([(0, 0, list(range(2, 11)))])[0], model


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize(("kind", "strategy", "given"), W8A8_WAYS)
def test_rounding_early_gives_the_bits_of_rounding_late(
    kind: str, strategy: str, given: float, family: str, tmp_path: Path
) -> None:
    w8a8(tmp_path, kind, strategy, family, given, **BLOCKS if strategy == "block" else {})
    early, late = Rounding8(True), Rounding8(False)
    got, model = logits(tmp_path, early.ops)
    want, _ = logits(tmp_path, late.ops)
    assert torch.equal(got, want)
    layers = model.spec.num_layers
    assert len(early.given) == 3 * layers  # q, k and v are one product, so are gate and up; and down
    assert (early.num_later, late.num_later, late.given) == (layers, 4 * layers, [])
    assert {x.dtype for x in early.given} == {torch.float32}
    if given:
        assert {round(x.scales.item(), 6) for x in early.given} == {given}


def test_experts_and_their_router_are_given_floats(tmp_path: Path) -> None:
    """A shared expert rounds for itself: its input is the router's, too."""
    w8a8(
        tmp_path, "int", "channel", "qwen2_moe", moe_intermediate_size=48, shared_expert_intermediate_size=64
    )
    early, late = Rounding8(True), Rounding8(False)
    assert torch.equal(logits(tmp_path, early.ops)[0], logits(tmp_path, late.ops)[0])
    assert early.given
    assert early.num_later


def test_of_two_scales_for_one_input_the_larger_is_taken(tmp_path: Path) -> None:
    w8a8(tmp_path, "int", "channel", "qwen3", 0.02)
    _changed(tmp_path, "k_proj.input_scale", 0.05)
    early = Rounding8(True)
    logits(tmp_path, early.ops)
    assert sorted({round(x.scales.item(), 3) for x in early.given}) == [0.02, 0.05]


def test_without_a_scale_for_each_every_token_has_its_own(tmp_path: Path) -> None:
    w8a8(tmp_path, "int", "channel", "qwen3", 0.02)
    _changed(tmp_path, "up_proj.input_scale", None)
    early = Rounding8(True)
    logits(tmp_path, early.ops)
    assert {tuple(x.scales.shape) for x in early.given} == {(1,), (9,)}


def _changed(folder: Path, end: str, value: float | None) -> None:
    """Tensors whose names end so have that value now, or are gone."""
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.endswith(end)]
    for name in names:
        del tensors[name]
        if value is not None:
            tensors[name] = torch.tensor([value])
    assert names
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

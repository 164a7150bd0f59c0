"""A CPU multiplies the numbers that a checkpoint stores in 8 and 4 bits: what its logits lose is the rounding of activations."""

import gc
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from core.errors import UnsupportedModel
from engine.sizing.model_dims import dims_of, rules_of
from kernels.collectives import ONE_RANK, Collectives
from kernels.cpu.library import Isa, native
from kernels.cpu.linear import Layout, Panels
from kernels.cpu.prepacked import WeightFormat, prepacked_ops
from kernels.cpu.stored import stored_panels
from kernels.ops import ExpertWeights, Ops
from kernels.packed import ExpertWeight, Kind, LinearWeight, PrepackedExperts, Weight, as_float
from kernels.rounding import Activations, Rounding, as_floats, round_to
from kernels.torch.experts import experts
from kernels.torch.reference import feed_forward, no_fusing, reference_ops
from models import registry
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, Shard, whole
from models.model import Model
from models.registry import LoadOptions, choose_kv_dtype, choose_weights, load_model
from parallel.mesh import Mesh
from parallel.rules import Sharding
from tests.models.checkpoints import CPU, FAMILIES, Paged
from tests.models.checkpoints import make as make_checkpoint
from tests.models.parts import Meeting
from tests.models.stored import (
    BLOCKS,
    compressed,
    mxfp4_checkpoint,
    packed_checkpoint,
    quantise_all,
    scaled,
    w8a8,
)
from tests.models.stored_scaled import scaled_checkpoint

pytestmark = pytest.mark.skipif(native() is None, reason="there are no native kernels here")
PROMPT = list(range(2, 30))
Make = Callable[[Path], object]


def weights_only(folder: Path) -> None:
    """INT8 whose activations keep their 16 bits."""

    def quantise(weight: Tensor) -> dict[str, Tensor]:
        values, scales = scaled(weight, "int", "channel")
        return {"weight": values, "weight_scale": scales}

    quantise_all(
        folder, "qwen3", quantise, quantization_config=compressed(num_bits=8, type="int", strategy="channel")
    )


GROUPS = {"intermediate_size": 128, "head_dim": 16}
"""Sizes of which a half is still whole groups of 32."""
DENSE: dict[str, Make] = {
    "awq": lambda folder: packed_checkpoint(folder, "awq", 16),
    "gptq": lambda folder: packed_checkpoint(folder, "gptq", 16),
    "gptq of 8 bits": lambda folder: packed_checkpoint(folder, "gptq", 16, 8),
    "packed": lambda folder: packed_checkpoint(folder, "packed", 16),
    "packed, symmetric": lambda folder: packed_checkpoint(folder, "packed", 16, symmetric=True),
    "packed by rows": lambda folder: packed_checkpoint(folder, "packed", 0),
    "packed, 8 bits": lambda folder: packed_checkpoint(folder, "packed", 16, 8),
    "packed by rows, 8 bits, symmetric": lambda folder: packed_checkpoint(
        folder, "packed", 0, 8, symmetric=True
    ),
    "int8": lambda folder: w8a8(folder, "int", "channel"),
    "int8 blocks": lambda folder: w8a8(folder, "int", "block", **BLOCKS | {"head_dim": 64}),
    "int8 weights alone": weights_only,
    "NVFP4": lambda folder: scaled_checkpoint(folder, "NVFP4 of ModelOpt"),
    "MXFP4": lambda folder: scaled_checkpoint(folder, "MXFP4 of compressed-tensors", **GROUPS),
}
EXPERTS: dict[str, Make] = {
    "awq experts": lambda folder: packed_checkpoint(
        folder, "awq", 16, 4, "qwen3_moe", moe_intermediate_size=64
    ),
    "gptq experts of 8 bits": lambda folder: packed_checkpoint(
        folder, "gptq", 16, 8, "qwen3_moe", moe_intermediate_size=64
    ),
    "int8 experts": lambda folder: w8a8(folder, "int", "channel", "qwen3_moe", moe_intermediate_size=64),
    "gpt-oss": lambda folder: mxfp4_checkpoint(folder, intermediate_size=128),
    "NVFP4 experts": lambda folder: scaled_checkpoint(
        folder, "NVFP4 of compressed-tensors", "qwen3_moe", moe_intermediate_size=64
    ),
}


def in_bytes(x: Tensor) -> Tensor:
    return as_floats(round_to(x, Rounding(torch.int8)))


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


class Watched:
    """A CPU's operations, each of whose products with stored numbers is compared with PyTorch's of what they mean."""

    def __init__(self, weights: WeightFormat = "half") -> None:
        self._own = prepacked_ops(weights)
        self._stored: list[tuple[LinearWeight, Weight]] = []
        self._experts: list[tuple[ExpertWeights, ExpertWeights]] = []
        self.worst, self.num_products = 0.0, 0
        self.ops = replace(
            self._own,
            pack=self._pack,
            pack_experts=self._pack_experts,
            linear=self._linear,
            experts=self._held,
            feed_forward=feed_forward,
            fuse=no_fusing,
        )

    def _pack(self, weight: Weight, dtype: torch.dtype) -> LinearWeight:
        packed = self._own.pack(weight, dtype)
        if not isinstance(weight, Tensor):
            self._stored.append((packed, weight))
        return packed

    def _pack_experts(self, held: ExpertWeights) -> ExpertWeights:
        self._experts.append((self._own.pack_experts(held), held))
        return self._experts[-1][0]

    def _linear(self, x: Activations, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        got = self._own.linear(x, weight, bias)
        for stored in (stored for packed, stored in self._stored if packed is weight):
            assert isinstance(x, Tensor)
            self._note(error(got, F.linear(in_bytes(x), as_float(stored, x.dtype), bias)))
        return got

    def _held(
        self, x: Tensor, slots: Tensor, weights: Tensor, held: ExpertWeights, activate: Callable[[Tensor], Tensor]
    ) -> Tensor:  # fmt: skip
        (stored,) = (stored for packed, stored in self._experts if packed is held)
        got = self._own.experts(x, slots, weights, held, activate)
        want = experts(x, slots, weights, stored, activate, rounding_product)
        self._note(error(got, want))
        return got

    def _note(self, found: float) -> None:
        self.worst, self.num_products = max(self.worst, found), self.num_products + 1


def rounding_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(in_bytes(x), weight, bias)


def load(
    folder: Path, ops: Ops, shard: Shard = whole, collectives: Collectives = ONE_RANK
) -> tuple[Model, int]:
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder, torch.float32, CPU, shard, spec.quantisation, ops.keeps)
    model = Model(spec, ops, checkpoint, CPU, collectives=collectives)
    checkpoint.close()
    return model, checkpoint.bytes_read


def logits(model: Model) -> Tensor:
    return Paged(model, 1, random.Random(0)).step([(0, 0, PROMPT)])[0]


@pytest.mark.parametrize("make", [*DENSE.values(), *EXPERTS.values()], ids=[*DENSE, *EXPERTS])
def test_every_product_is_that_of_the_stored_numbers(make: Make, tmp_path: Path) -> None:
    make(tmp_path)
    watched = Watched()
    logits(load(tmp_path, watched.ops)[0])
    assert watched.num_products >= (3 if make == EXPERTS["gpt-oss"] else 6)
    # A product of experts rounds what is between its two matrices.
    assert watched.worst < (0.01 if make in EXPERTS.values() else 3e-6)


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE)
def test_logits_lose_what_the_rounding_of_activations_loses(make: Make, tmp_path: Path) -> None:
    make(tmp_path)
    got, want = (logits(load(tmp_path, ops)[0]) for ops in (prepacked_ops("half"), reference_ops()))
    away = (got - want).norm(dim=-1) / (want - want.mean(-1, keepdim=True)).norm(dim=-1)
    assert 1e-4 < away.median() < 0.1


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        ("half", torch.bfloat16),
        ("half", torch.float16),
        ("int8", torch.bfloat16),
        ("int4", torch.float16),
        ("full", torch.float16),
    ],
)
@pytest.mark.parametrize("family", ["llama", "phi3", "glm", "qwen3_moe", "deepseek_v3"])
def test_matrices_of_16_bits_have_the_same_bits_as_if_they_had_been_made_floats(
    family: str, weights: WeightFormat, dtype: torch.dtype, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, FAMILIES[family](random.Random(family), 0), seed=2).to(dtype).save_pretrained(
        tmp_path
    )
    ops = prepacked_ops(weights)
    kept, floats = (
        logits(load(tmp_path, replace(ops, keeps=keeps))[0]) for keeps in (ops.keeps, frozenset[Kind]())
    )
    assert torch.equal(kept, floats)


@pytest.mark.parametrize("make", [*DENSE.values(), *EXPERTS.values()], ids=[*DENSE, *EXPERTS])
def test_two_ranks_hold_their_parts_as_they_are_stored(make: Make, tmp_path: Path) -> None:
    make(tmp_path)
    spec, meeting = read_spec(tmp_path), Meeting(2)
    whole_model, all_bytes = load(tmp_path, prepacked_ops("half"))
    want = logits(whole_model)

    def rank(i: int) -> tuple[Tensor, Watched]:
        watched, sharding = Watched(), Sharding(dims_of(spec), Mesh(tp=2), i, rules_of(spec))
        model, bytes_read = load(tmp_path, watched.ops, sharding, meeting.collectives(i, spec.vocab_size))
        assert bytes_read < 0.75 * all_bytes
        paged = Paged(model, 1, random.Random(0))
        paged.kv = [layer.chunk(2, 2)[i].contiguous() for layer in paged.kv]
        return paged.step([(0, 0, PROMPT)])[0], watched

    for got, watched in meeting.run(rank):
        assert watched.worst < (0.01 if make in EXPERTS.values() else 3e-6)
        assert F.cosine_similarity(got, want).median() > 0.99


def panels_of(folder: Path, ops: Ops) -> list[Panels]:
    """What a loaded model keeps of the matrices that are stored in few bits."""
    made: list[Panels] = []

    def noted(weight: Weight, *, drops_zeros: bool = True) -> Panels | None:
        panels = stored_panels(weight, drops_zeros=drops_zeros)
        if panels is not None:
            made.append(panels)
        return panels

    with (
        patch("kernels.cpu.prepacked.stored_panels", noted),
        patch("kernels.cpu.stored.stored_panels", noted),
    ):
        load(folder, ops)
    return made


@pytest.mark.parametrize(
    ("kind", "layout", "bytes_each"),
    [
        ("awq", Layout.INT4, 0.5 + 3 / 16),
        ("packed, symmetric", Layout.INT4, 0.5 + 4 / 16),
        ("gptq of 8 bits", Layout.INT8, 1 + 4 / 16),
        ("int8 experts", Layout.INT8, 1 + 4 / 64),
        ("NVFP4", Layout.INT8, 1 + 4 / 16),
    ],
)
def test_matrices_take_the_bytes_of_their_format(
    kind: str, layout: Layout, bytes_each: float, tmp_path: Path
) -> None:
    """Every matrix of a layer: 16-bit scales and zero points of AWQ and GPTQ; compressed-tensors' scales are float32 here."""
    (DENSE | EXPERTS)[kind](tmp_path)
    made = panels_of(tmp_path, prepacked_ops("half"))
    least = 40 if kind == "int8 experts" else 8
    assert len(made) >= least
    assert {panels.layout for panels in made} == {layout}
    same = [panels for panels in made if panels.inputs == 64]
    numbers = sum(panels.outputs * panels.inputs for panels in same)
    assert sum(panels.data.nbytes for panels in same) == pytest.approx(numbers * bytes_each, rel=1e-3)


def test_experts_are_held_in_panels_alone(tmp_path: Path) -> None:
    EXPERTS["awq experts"](tmp_path)
    for held in load(tmp_path, prepacked_ops("half"))[0].experts.values():
        both: tuple[ExpertWeight, ...] = (held.gate_up, held.down)
        assert all(isinstance(weight, PrepackedExperts) for weight in both)
        assert all(
            tensor.dtype == torch.uint8 and len(tensor) == held.down.shape[0] for tensor in held.tensors
        )


def test_a_row_has_the_same_bits_in_every_batch(tmp_path: Path) -> None:
    EXPERTS["awq experts"](tmp_path)
    model = load_model(tmp_path, "float32", CPU, options=LoadOptions(deterministic=True, weights="half"))
    together = Paged(model, 1, random.Random(0)).step([(0, 0, PROMPT)])[0]
    paged = Paged(model, 1, random.Random(0))
    apart = torch.cat([paged.step([(0, at, PROMPT[at : at + 1])])[0] for at in range(len(PROMPT))])
    assert torch.equal(apart, together)


def test_a_dtype_that_is_asked_for_makes_floats(tmp_path: Path) -> None:
    DENSE["awq"](tmp_path)
    spec = read_spec(tmp_path)
    assert choose_weights(spec, "auto", "none", CPU, deterministic=False) == "half"
    assert choose_weights(spec, "float32", "none", CPU, deterministic=False) == "full"
    assert panels_of(tmp_path, prepacked_ops("full")) == []


@pytest.mark.parametrize("isa", [Isa.AVX512, Isa.AVX512_BF16])
def test_kv_is_bfloat16_where_rows_are_rounded_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: Isa
) -> None:
    make_checkpoint(tmp_path, FAMILIES["llama"](random.Random(1), 0), seed=2)
    plain = replace(read_spec(tmp_path), dtype="bfloat16", head_dim=64)
    monkeypatch.setattr(registry, "fastest_of_bfloat16", lambda: isa)
    rounded = "bfloat16" if isa == Isa.AVX512_BF16 else "float32"
    for weights in ("half", "int8", "int4"):
        assert choose_kv_dtype(plain, "float32", weights, CPU, deterministic=False) == rounded
    assert choose_kv_dtype(plain, "float32", "half", CPU, deterministic=True) == "float32"
    assert choose_kv_dtype(plain, "float32", "full", CPU, deterministic=False) == "float32"
    assert choose_kv_dtype(plain, "bfloat16", "full", CPU, deterministic=False) == "bfloat16"
    for other in (replace(plain, dtype="float16"), replace(plain, head_dim=10)):
        assert choose_kv_dtype(other, "float32", "half", CPU, deterministic=False) == "float32"


def test_a_cut_inside_a_group_is_refused(tmp_path: Path) -> None:
    packed_checkpoint(tmp_path, "awq", 32)
    spec = read_spec(tmp_path)
    sharding = Sharding(dims_of(spec), Mesh(tp=2), 0, rules_of(spec))
    with pytest.raises(UnsupportedModel, match=r"inside a group of 32.*model.dtype=float32 on a CPU"):
        load(tmp_path, prepacked_ops("half"), sharding)
    load(tmp_path, prepacked_ops("full"), sharding)


def test_an_order_of_activations_makes_floats_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed_checkpoint(tmp_path, "gptq, any order", 16)
    with caplog.at_level(logging.INFO):
        got = logits(load(tmp_path, prepacked_ops("half"))[0])
    assert "14 matrices of few bits are floats here" in caplog.text
    torch.testing.assert_close(got, logits(load(tmp_path, reference_ops())[0]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["half", "int8", "int4"])
def test_an_embedding_takes_no_more_than_it_is_stored_in_and_none_beside_a_head_that_has_it(
    tmp_path: Path, weights: WeightFormat, tied: bool
) -> None:
    """It is as large as a fifth of the whole model; what is read of it is float32."""
    config = FAMILIES["llama"](random.Random(1), 0)
    config.vocab_size, config.hidden_size, config.tie_word_embeddings = 4096, 384, tied
    reference = make_checkpoint(tmp_path, config, seed=2).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    table = reference.get_input_embeddings().weight.detach().float()
    before = {id(each) for each in gc.get_objects() if type(each) is Tensor}
    model = load_model(tmp_path, "float32", CPU, options=LoadOptions(weights=weights))
    made = [each for each in gc.get_objects() if type(each) is Tensor and id(each) not in before]
    assert isinstance(model, Model)
    large = sum(each.nbytes for each in made if each.nbytes > table.numel() / 3)
    head = {"half": 2, "int8": 1, "int4": 0.54}[weights]
    own = {"half": 2, "int8": 1, "int4": 1}[weights] if not tied or weights == "int4" else 0
    assert large == pytest.approx(table.numel() * (head + own), rel=0.15)
    rows = model.embed(torch.tensor([3, 4095, 17]))
    assert rows.dtype == torch.float32
    bound = 0 if weights == "half" else float(table.abs().max()) / 254
    torch.testing.assert_close(rows, table[[3, 4095, 17]], atol=bound, rtol=0)

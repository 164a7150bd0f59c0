"""Which part of a packed matrix a rank holds, and what it means: on a CPU, whose operations read packed weights too, slowly."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.errors import UnsupportedModel
from engine.sizing.model_dims import dims_of, rules_of
from kernels.collectives import ONE_RANK, Collectives
from kernels.packed import EightBit, FourBit, Kind, LinearWeight, Weight, as_float
from kernels.torch.reference import reference_ops
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, Shard, whole
from models.model import Model
from parallel.mesh import Mesh
from parallel.rules import Sharding
from tests.models.checkpoints import CPU, Paged
from tests.models.parts import Meeting
from tests.models.stored import BLOCKS, mxfp4_checkpoint, packed_checkpoint, w8a8
from tests.models.stored_scaled import WAYS, scaled_checkpoint

PROMPT = list(range(2, 30))
ALL: frozenset[Kind] = frozenset(("float8", "int8", "four_bit", "mxfp4", "nvfp4"))


def load(
    folder: Path, shard: Shard = whole, collectives: Collectives = ONE_RANK, *, packed: bool = True
) -> Model:
    spec, ops = read_spec(folder), replace(reference_ops(), keeps=ALL if packed else frozenset())
    checkpoint = Checkpoint(folder, torch.float32, CPU, shard, spec.quantisation, ops.keeps)
    model = Model(spec, ops, checkpoint, CPU, collectives=collectives)
    checkpoint.close()
    return model


KINDS = ["awq", "gptq", "packed", "mxfp4", "MXFP4", "NVFP4", "int8", "int8 experts", "float8 blocks"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_the_whole(kind: str, tmp_path: Path) -> None:
    if kind == "mxfp4":
        mxfp4_checkpoint(tmp_path)
    elif kind in ("MXFP4", "NVFP4"):
        scaled_checkpoint(tmp_path, f"{kind} of compressed-tensors", intermediate_size=128, head_dim=16)
    elif kind == "int8 experts":
        w8a8(tmp_path, "int", "channel", "qwen3_moe", moe_intermediate_size=48)
    elif kind == "int8":
        w8a8(tmp_path, "int", "channel")
    elif kind == "float8 blocks":
        w8a8(tmp_path, "float", "block", **BLOCKS | {"head_dim": 64})
    else:
        packed_checkpoint(tmp_path, kind, 16)
    spec, meeting = read_spec(tmp_path), Meeting(2)
    (want,) = Paged(load(tmp_path, packed=False), 1, random.Random(0)).step([(0, 0, PROMPT)])
    bytes_read: list[int] = []

    def rank(i: int) -> torch.Tensor:
        sharding = Sharding(dims_of(spec), Mesh(tp=2), i, rules_of(spec))
        model = load(tmp_path, sharding, meeting.collectives(i, spec.vocab_size))
        bytes_read.append(model.bytes_read)
        paged = Paged(model, 1, random.Random(0))
        paged.kv = [layer.chunk(2, 2)[i].contiguous() for layer in paged.kv]
        return paged.step([(0, 0, PROMPT)])[0]

    for got in meeting.run(rank):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert max(bytes_read) < 0.75 * load(tmp_path).bytes_read


def test_projections_of_latent_attention_are_held_as_they_are_stored(tmp_path: Path) -> None:
    w8a8(tmp_path, "int", "channel", "deepseek_v3", q_lora_rank=16, kv_lora_rank=16, moe_intermediate_size=48)
    held: list[LinearWeight] = []

    def pack(weight: Weight, dtype: torch.dtype) -> LinearWeight:
        del dtype
        held.append(weight)
        return weight

    spec, ops = read_spec(tmp_path), replace(reference_ops(), keeps=ALL, pack=pack)
    Model(spec, ops, Checkpoint(tmp_path, torch.float32, CPU, whole, spec.quantisation, ALL), CPU)
    head, *others = held
    assert isinstance(head, torch.Tensor)
    assert all(isinstance(matrix, EightBit) for matrix in others)


def test_each_expert_is_held_as_it_is_stored(tmp_path: Path) -> None:
    w8a8(tmp_path, "int", "channel", "qwen3_moe", moe_intermediate_size=48)
    for held in load(tmp_path).experts.values():
        assert isinstance(held.gate_up, EightBit)
        assert [tensor.dtype for tensor in held.tensors] == [torch.uint8, torch.float32] * 2
        assert all(len(tensor) == held.down.shape[0] for tensor in held.tensors)


def test_mxfp4_is_held_as_it_is_stored(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path)
    for held in load(tmp_path).experts.values():
        assert isinstance(held.gate_up, FourBit)
        assert isinstance(held.down, FourBit)
        assert held.down.is_float


@pytest.mark.parametrize("way", [way for way in WAYS if "FP4" in way])
def test_matrices_of_four_bits_are_held_as_they_are_stored(way: str, tmp_path: Path) -> None:
    """A whole matrix is as large as its nibbles and the bytes of its scales, and for NVFP4 a number for each output."""
    scaled_checkpoint(tmp_path, way, intermediate_size=128, hidden_size=128, head_dim=32)
    spec = read_spec(tmp_path)
    checkpoint = Checkpoint(tmp_path, torch.float32, CPU, whole, spec.quantisation, ALL)
    name = "model.layers.0.mlp.down_proj.weight"
    held, floats = checkpoint.matrix(name, (128, 128)), checkpoint.take(name, (128, 128))
    assert isinstance(held, FourBit)
    assert held.is_float
    scales = 128 * 128 / 32 if "MX" in way else 128 * 128 / 16 + 128 * 4
    assert sum(tensor.nbytes for tensor in held.tensors) == 128 * 128 / 2 + scales
    torch.testing.assert_close(as_float(held, torch.float32), floats, rtol=1e-6, atol=0)


def test_a_cut_inside_a_group_is_refused(tmp_path: Path) -> None:
    """96 inputs of down_proj are three groups of 32, which two ranks cannot share; floats can be cut anywhere."""
    packed_checkpoint(tmp_path, "awq", 32)
    spec = read_spec(tmp_path)
    sharding = Sharding(dims_of(spec), Mesh(tp=2), 0, rules_of(spec))
    with pytest.raises(
        UnsupportedModel, match=r"down_proj.*would be cut at 0 and 48 of 96, inside a group of 32"
    ):
        load(tmp_path, sharding)
    load(tmp_path, sharding, packed=False)


def test_a_cut_inside_a_group_of_mxfp4_is_refused(tmp_path: Path) -> None:
    scaled_checkpoint(tmp_path, "MXFP4 of ModelOpt", head_dim=16)
    spec = read_spec(tmp_path)
    sharding = Sharding(dims_of(spec), Mesh(tp=2), 0, rules_of(spec))
    with pytest.raises(UnsupportedModel, match=r"down_proj.*inside a group of 32 .*choose another tp"):
        load(tmp_path, sharding)
    load(tmp_path, sharding, packed=False)


def test_a_cut_inside_a_block_is_refused(tmp_path: Path) -> None:
    """256 rows are two blocks, which three ranks cannot share."""
    w8a8(tmp_path, "float", "block", **BLOCKS | {"num_key_value_heads": 4})
    spec = read_spec(tmp_path)
    sharding = Sharding(dims_of(spec), Mesh(tp=3), 1, rules_of(spec))
    with pytest.raises(UnsupportedModel, match=r"inside a group of 128.*choose another tp"):
        load(tmp_path, sharding)

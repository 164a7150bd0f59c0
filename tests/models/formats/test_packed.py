"""Which part of a packed matrix a rank holds, and what it means: on a CPU, whose operations read packed weights too, slowly."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.errors import UnsupportedModel
from engine.sizing.model_dims import dims_of, rules_of
from kernels.collectives import ONE_RANK, Collectives
from kernels.packed import EightBit, FourBit, Kind
from kernels.torch.reference import reference_ops
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, Shard, whole
from models.model import Model
from parallel.mesh import Mesh
from parallel.rules import Sharding
from tests.models.checkpoints import CPU, Paged
from tests.models.parts import Meeting
from tests.models.stored import BLOCKS, mxfp4_checkpoint, packed_checkpoint, w8a8

PROMPT = list(range(2, 30))
ALL: frozenset[Kind] = frozenset(("float8", "int8", "four_bit", "mxfp4"))


def load(
    folder: Path, shard: Shard = whole, collectives: Collectives = ONE_RANK, *, packed: bool = True
) -> Model:
    spec, ops = read_spec(folder), replace(reference_ops(), keeps=ALL if packed else frozenset())
    checkpoint = Checkpoint(folder, torch.float32, CPU, shard, spec.quantisation, ops.keeps)
    model = Model(spec, ops, checkpoint, CPU, collectives=collectives)
    checkpoint.close()
    return model


@pytest.mark.parametrize("kind", ["awq", "gptq", "packed", "mxfp4", "int8", "int8 experts", "float8 blocks"])
def test_two_ranks_equal_the_whole(kind: str, tmp_path: Path) -> None:
    if kind == "mxfp4":
        mxfp4_checkpoint(tmp_path)
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


def test_a_cut_inside_a_block_is_refused(tmp_path: Path) -> None:
    """256 rows are two blocks, which three ranks cannot share."""
    w8a8(tmp_path, "float", "block", **BLOCKS | {"num_key_value_heads": 4})
    spec = read_spec(tmp_path)
    sharding = Sharding(dims_of(spec), Mesh(tp=3), 1, rules_of(spec))
    with pytest.raises(UnsupportedModel, match=r"inside a group of 128.*choose another tp"):
        load(tmp_path, sharding)

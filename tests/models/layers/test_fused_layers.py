"""A CPU computes all layers of a dense decoder at once, and no bit of what a model says differs by that."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import native
from kernels.cpu.prepacked import WeightFormat, prepacked_ops
from kernels.ops import AttentionMeta, DenseLayer, FusedLayers, KVLayer, Ops
from kernels.torch.reference import no_fusing
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint
from models.model import Model
from tests.models.checkpoints import CPU, FAMILIES, VOCAB, Paged, make

pytestmark = pytest.mark.skipif(native() is None, reason="there are no native kernels here")
FUSED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "phi3", "glm", "glm4")
ONE_BY_ONE = ("olmo2", "mixtral", "deepseek_v2", "llama4", "gpt_oss")
"""Norms of whole projections, experts, latents: there is more in their layers."""
FORMATS: list[tuple[WeightFormat, torch.dtype]] = [
    ("half", torch.float32),
    ("half", torch.bfloat16),
    ("half", torch.float16),
    ("int8", torch.float32),
    ("int4", torch.float32),
]
NUM_SEQS = 8


class Noting:
    """A CPU's operations, which count the steps whose layers were computed at once."""

    def __init__(self, weights: WeightFormat) -> None:
        self._own = prepacked_ops(weights)
        self.ops, self.num_fused = replace(self._own, fuse=self._fuse), 0

    def _fuse(self, layers: Sequence[DenseLayer]) -> FusedLayers | None:
        fused = self._own.fuse(layers)

        def noted(
            x: Tensor, rotations: Sequence[tuple[Tensor, Tensor]], kv: Sequence[KVLayer], meta: AttentionMeta
        ) -> tuple[Tensor, Tensor] | None:
            assert fused is not None
            done = fused(x, rotations, kv, meta)
            self.num_fused += done is not None
            return done

        return None if fused is None else noted


def load(folder: Path, ops: Ops, taps: tuple[int, ...] = ()) -> Paged:
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder, torch.float32, CPU, quantisation=spec.quantisation, keeps=ops.keeps)
    model = Model(spec, ops, checkpoint, CPU, taps=taps)
    checkpoint.close()
    return Paged(model, NUM_SEQS, random.Random(1))


def steps() -> list[list[tuple[int, int, list[int]]]]:
    """Prompts, and then steps of 1, 2 and 8 sequences, with draft tokens and without."""
    rng = random.Random(2)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(count)]

    at = [11 + 3 * seq for seq in range(NUM_SEQS)]
    made = [[(seq, 0, tokens(at[seq])) for seq in range(NUM_SEQS)]]
    for seqs, count in (([0], 1), ([1, 5], 1), (range(NUM_SEQS), 1), ([3], 4), (range(NUM_SEQS), 3)):
        made.append([(seq, at[seq], tokens(count)) for seq in seqs])
        for seq in seqs:
            at[seq] += count
    return made


def said(paged: Paged) -> list[Tensor]:
    return [logits for step in steps() for logits in paged.step(step)]


@pytest.mark.parametrize(("weights", "dtype"), FORMATS, ids=str)
@pytest.mark.parametrize("family", FUSED)
def test_logits_and_kv_have_the_same_bits(
    family: str, weights: WeightFormat, dtype: torch.dtype, tmp_path: Path
) -> None:
    draw = FUSED.index(family) % 6
    make(tmp_path, FAMILIES[family](random.Random(family), draw), seed=2).to(dtype).save_pretrained(tmp_path)
    noting = Noting(weights)
    own, wanted = load(tmp_path, noting.ops), load(tmp_path, replace(prepacked_ops(weights), fuse=no_fusing))
    assert all(map(torch.equal, said(own), said(wanted)))
    assert noting.num_fused == len(steps())
    for pool, other in zip(own.kv, wanted.kv, strict=True):
        assert torch.equal(pool.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_layers_of_other_kinds_are_computed_one_by_one(family: str, tmp_path: Path) -> None:
    make(tmp_path, FAMILIES[family](random.Random(family), 1), seed=2)
    noting = Noting("half")
    said(load(tmp_path, noting.ops))
    assert not noting.num_fused


def test_who_waits_for_layers_or_reads_between_them_gets_them_one_by_one(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["llama"](random.Random(1), 0), seed=2)
    noting = Noting("half")
    paged, told = load(tmp_path, noting.ops), list[int]()
    paged.step([(0, 0, [5, 6, 7])], told.append)
    assert told == list(range(paged.model.spec.num_layers))
    tapped = load(tmp_path, noting.ops, taps=(1,))
    tapped.step([(0, 0, [5, 6, 7])])
    assert isinstance(tapped.model, Model)
    assert list(tapped.model.tapped) == [1]
    assert not noting.num_fused

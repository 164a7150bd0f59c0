"""Tiny models end to end on the Triton kernels: what PyTorch's operations say, and with the batch-invariant ones the same bits for
a sequence alone, in a batch and in chunks."""

import random
from pathlib import Path

import pytest
import torch

from kernels.ops import Ops
from kernels.torch.reference import reference_ops
from kernels.triton.ops import invariant_triton_ops, triton_ops
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint
from models.model import Model
from tests.kernels.triton.places import need_equal_places
from tests.models.checkpoints import FAMILIES, VOCAB, Paged, make

FEATURES = [
    "llama",
    "gemma2",
    "gemma4",
    "gemma4_small",
    "gemma4_moe",
    "olmo2",
    "glm4",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "glm_moe_dsa",
]
INVARIANT = ["gemma2", "gemma4", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm_moe_dsa"]
"""The others compute by no operation that these do not."""
Chunks = list[list[tuple[int, int, list[int]]]]
"""(sequence, first position, tokens) of each step."""


def model_in(folder: Path, ops: Ops, device: torch.device) -> Model:
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder, torch.float32, device, quantisation=spec.quantisation, keeps=ops.keeps)
    return Model(spec, ops, checkpoint, device)


def logits(model: Model, steps: Chunks, device: torch.device) -> dict[tuple[int, int], torch.Tensor]:
    """The logits of every (sequence, position)."""
    paged = Paged(model, 3, random.Random(0), device=device)
    found: dict[tuple[int, int], torch.Tensor] = {}
    for step in steps:
        for (seq, start, _), rows in zip(step, paged.step(step), strict=True):
            found |= {(seq, start + i): row for i, row in enumerate(rows)}
    return found


@pytest.fixture(scope="module", params=FEATURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    config = FAMILIES[request.param](random.Random(request.param), 1)
    if "gemma4" not in request.param:  # whose layers share others' keys and values
        config.num_hidden_layers = 2
        for kinds in ("layer_types", "mlp_layer_types", "indexer_types"):
            if getattr(config, kinds, None):
                setattr(config, kinds, getattr(config, kinds)[:2])
    make(folder, config, seed=0)
    return folder


def chunks() -> tuple[Chunks, Chunks]:
    """(three sequences one after the other, the same in pieces of batches)"""
    rng = random.Random(2)
    texts = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in (21, 1, 9)]
    whole: Chunks = [[(seq, 0, text)] for seq, text in enumerate(texts)]
    cut: Chunks = [
        [(2, 0, texts[2][:4]), (0, 0, texts[0][:5])],
        [(0, 5, texts[0][5:20]), (1, 0, texts[1]), (2, 4, texts[2][4:])],
        [(0, 20, texts[0][20:])],
    ]
    return whole, cut


def check_against_pytorch(
    folder: Path, ops: Ops, device: torch.device
) -> dict[tuple[int, int], torch.Tensor]:
    """Return the logits of sequences in pieces."""
    whole, cut = chunks()
    want = logits(model_in(folder, reference_ops(), device), whole, device)
    got = logits(model_in(folder, ops, device), cut, device)
    for key, row in want.items():
        torch.testing.assert_close(got[key], row, atol=2e-4, rtol=2e-4)
        assert got[key].argmax() == row.argmax()
    return got


def test_any_batch_and_any_chunks(folder: Path, device: torch.device) -> None:
    check_against_pytorch(folder, triton_ops(device), device)


@pytest.mark.parametrize("folder", INVARIANT, indirect=True)
def test_the_same_bits_alone_and_in_any_chunks(folder: Path, device: torch.device) -> None:
    got = check_against_pytorch(folder, invariant_triton_ops(device), device)
    need_equal_places()
    alone = logits(model_in(folder, invariant_triton_ops(device), device), chunks()[0], device)
    assert [key for key, row in alone.items() if not torch.equal(row, got[key])] == []

"""Where transformers computes the layers, each format of weights is read as Baton's own layers read it."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.registry import LoadOptions, load_model
from models.spec.model_spec import Implementation
from tests.models.checkpoints import CPU, Paged
from tests.models.formats.test_format_table import MAKE


def logits(folder: Path, implementation: Implementation) -> Tensor:
    model = load_model(folder, "float32", CPU, options=LoadOptions(implementation=implementation))
    return Paged(model, 1, random.Random(0)).step([(0, 0, list(range(2, 40)))])[0]


@pytest.mark.parametrize("name", MAKE)
@torch.inference_mode()
def test_a_format_is_read_as_batons_own_layers_read_it(name: str, tmp_path: Path) -> None:
    MAKE[name](tmp_path / "model")
    ours, theirs = (logits(tmp_path / "model", whose) for whose in ("baton", "transformers"))
    assert float((ours - theirs).norm() / ours.norm()) < 1e-3

"""Parts of a model, each with its own bytes of the checkpoint, together give what the whole gives."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import UnsupportedModel
from engine.sizing.model_dims import dims_of, shards_of
from models.formats.checkpoint import Checkpoint
from models.registry import load_model
from parallel.mesh import Mesh
from parallel.plans import stage_layers
from tests.models.checkpoints import BLOCK, CPU, FAMILIES, HYBRID, VOCAB, Paged, make
from tests.models.parts import Meeting, expert_parallel, tensor_parallel
from tests.parallel.families import awkward

PROMPT = list(range(2, 40))
STEPS = [[(0, 0, PROMPT[:20])], [(0, 20, PROMPT[20:])]]


def divisible(family: str, folder: Path, **saving: Any) -> Any:
    """A model whose heads and vocabulary two ranks can share."""
    for draw in range(50):
        config = FAMILIES[family](random.Random(draw), 0)
        if config.num_key_value_heads % 2 == 0:
            config.vocab_size = VOCAB + 1
            return make(folder, config, seed=1, **saving)
    raise AssertionError(family)


def logits(paged: Paged) -> torch.Tensor:
    return torch.cat([row for step in STEPS for row in paged.step(step)])


@pytest.mark.parametrize(
    ("family", "original"),
    [
        ("llama", True),
        ("qwen3", True),
        ("gemma2", True),
        ("mixtral", True),
        ("mixtral", False),
        ("qwen2_moe", False),
    ],
)
def test_two_halves_equal_the_whole(family: str, original: bool, tmp_path: Path) -> None:
    reference = divisible(family, tmp_path, save_original_format=original)
    with torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]
    meeting = Meeting(2)

    def rank(i: int) -> torch.Tensor:
        model = load_model(
            tmp_path,
            "float32",
            CPU,
            tensor_parallel(i, 2, family == "gpt_oss"),
            collectives=meeting.collectives(i, reference.config.vocab_size),
        )
        paged = Paged(model, 1, random.Random(0))
        if model.spec.mla is None:
            paged.kv = [layer.chunk(2, 2)[i].contiguous() for layer in paged.kv]
        return logits(paged)

    for got in meeting.run(rank):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "original"), [("qwen3_moe", True), ("qwen3_moe", False), ("gpt_oss", True)]
)
def test_ranks_that_hold_some_experts_equal_the_whole(family: str, original: bool, tmp_path: Path) -> None:
    """The experts are 0 to 8; one is held twice."""
    config = FAMILIES[family](random.Random(1), 0)
    config.num_experts = 9
    reference = make(tmp_path, config, seed=1, save_original_format=original)
    with torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]
    meeting = Meeting(2)
    placement = [[range(0, 3), range(7, 8)], [range(2, 7), range(8, 9)]]

    def rank(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        collectives = meeting.expert_joins(i, placement[i])
        model = load_model(tmp_path, "float32", CPU, expert_parallel(placement[i]), collectives=collectives)
        return logits(Paged(model, 1, random.Random(0))), model.expert_load

    for got, load in meeting.run(rank):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert load.sum(1).tolist() == [len(PROMPT) * config.num_experts_per_tok] * len(load)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "deepseek_v3", *HYBRID])
def test_stages_equal_the_whole(family: str, tmp_path: Path) -> None:
    """Each has its own layers of the pool, recurrent states included, and tells of them by the whole pool's numbers."""
    reference = make(tmp_path, awkward(family), seed=1)
    with torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]
    whole = Paged(load_model(tmp_path, "float32", CPU), 1, random.Random(0))
    spec = whole.model.spec
    shards = shards_of(spec, Mesh(pp=2), spec.kv_layout(BLOCK, "float32"))
    cuts = stage_layers(dims_of(spec), 2)
    stages = [load_model(tmp_path, "float32", CPU, layers=range(*layers)) for layers in cuts]
    seen: list[int] = []

    class Chain:
        def forward(
            self, x: torch.Tensor, positions: torch.Tensor, kv: Any, meta: Any, _: Any
        ) -> torch.Tensor:
            for stage, shard in zip(stages, shards, strict=True):
                x = stage.forward(x, positions, kv[slice(*shard.layers)], meta, seen.append)
            return x

        logits = staticmethod(stages[-1].logits)

    whole.model = Chain()  # type: ignore[assignment]
    torch.testing.assert_close(logits(whole), want, atol=1e-4, rtol=1e-4)
    assert seen == [*range(len(whole.kv))] * len(STEPS)


@pytest.mark.parametrize(
    ("cut", "rows", "columns"),
    [
        ([[slice(0, 6)], [slice(0, 4)]], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3]),
        ([[slice(2, 4)], [slice(1, 3)]], [2, 3], [1, 2]),
        ([[slice(4, 6), slice(0, 1)], [slice(0, 1), slice(3, 4)]], [4, 5, 0], [0, 3]),
        ([[slice(5, 6), slice(5, 6)], [slice(0, 4)]], [5, 5], [0, 1, 2, 3]),
    ],
)
def test_only_what_a_rank_holds_is_read(
    cut: Any, rows: list[int], columns: list[int], tmp_path: Path
) -> None:
    tensor = torch.arange(24.0).view(6, 4)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32, CPU, lambda name, shape: cut)
    got = checkpoint.take("x", (6, 4))
    torch.testing.assert_close(got, tensor[rows][:, columns])
    assert checkpoint.bytes_read == got.nbytes
    checkpoint.close()


def test_a_rank_checks_the_whole_tensors_shape(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(6, 4)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32, CPU, tensor_parallel(0, 2))
    with pytest.raises(UnsupportedModel, match=r"'x' is \(6, 4\); config\.json says \(3, 4\)"):
        checkpoint.take("x", (3, 4))


def test_a_stage_refuses_what_no_stage_knows(tmp_path: Path) -> None:
    divisible("llama", tmp_path)
    for path in tmp_path.glob("model-00001*.safetensors"):
        save_file(load_file(path) | {"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}, path)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists()
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.9"):
        load_model(tmp_path, "float32", CPU, layers=range(0, 1))

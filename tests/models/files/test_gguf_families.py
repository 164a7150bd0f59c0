"""A GGUF file of each architecture gives the logits of the checkpoint that it was made of.

llama.cpp gives them, too: `benchmarks.engine.gguf_parity`."""

import random
from pathlib import Path

import pytest
import torch

from kernels.cpu.library import native
from kernels.cpu.prepacked import prepacked_ops
from models.files.gguf_configs import ARCHITECTURES
from models.files.hub import resolve
from models.formats.gguf_names import NAMES
from models.registry import load_model
from tests.models.checkpoints import CPU, Paged, make
from tests.models.formats.test_cpu_stored import load, logits
from tests.models.gguf_cases import CASES
from tests.models.gguf_files import write_checkpoint

PROMPT = list(range(2, 30))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native()  # The library stays where it is.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    reference = make(tmp_path / "plain", case.config(), 0)
    write_checkpoint(tmp_path / "model.gguf", tmp_path / "plain", "F32", case.architecture)
    model = load_model(resolve(str(tmp_path / "model.gguf")), "float32", CPU)
    got = Paged(model, 1, random.Random(0)).step([(0, 0, PROMPT)])[0]
    with torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)


@pytest.mark.turns(6)
@pytest.mark.skipif(native() is None, reason="there are no native kernels here")
@pytest.mark.parametrize("name", CASES)
def test_blocks_stay_as_they_are_stored(name: str, tmp_path: Path) -> None:
    """Experts, rows in another order and parts of wholes, too."""
    case = CASES[name]
    reference = make(tmp_path / "plain", case.config(), 0)
    write_checkpoint(tmp_path / "model.gguf", tmp_path / "plain", "Q8_0", case.architecture)
    got = logits(load(resolve(str(tmp_path / "model.gguf")), prepacked_ops("half"))[0])
    with torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]
    assert torch.nn.functional.cosine_similarity(got, want).median() > 0.95  # Another expert may be chosen.


def test_every_architecture_is_tried() -> None:
    assert set(ARCHITECTURES) == set(NAMES) == {case.architecture for case in CASES.values()}


def test_layers_that_predict_further_tokens_have_the_names_of_their_family() -> None:
    """Behind the others, or apart as Qwen3.5's: converters write them, and a tensor that nobody knows is refused."""
    assert NAMES["glm4moe"].of("blk.4.nextn.eh_proj.weight", 4) == "model.layers.4.eh_proj.weight"
    assert NAMES["qwen35"].of("blk.4.nextn.eh_proj.weight", 4) == "mtp.fc.weight"
    assert NAMES["qwen35moe"].of("blk.4.attn_q.weight", 4) == "mtp.layers.0.self_attn.q_proj.weight"
    assert NAMES["qwen35"].of("blk.3.attn_q.weight", 4) == "model.layers.3.self_attn.q_proj.weight"

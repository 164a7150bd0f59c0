"""`baton quantize`: what it writes is read by transformers and by Baton itself, and nothing that is not whole has the name."""

import json
import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from typer.testing import CliRunner

from baton.cli.main import app
from core.errors import ConfigError, UnsupportedModel
from kernels.packed import Kind, tensors_of
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, whole
from models.formats.rounded_matrix import Scheme, rounding_of_model
from models.quantising import quantised_copy
from models.quantising.quantised_copy import write_quantised
from models.registry import load_model
from tests.models.checkpoints import CPU, FAMILIES, Paged, make

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
ALL: frozenset[Kind] = frozenset(("float8", "int8", "four_bit", "nvfp4"))
PROMPT = list(range(2, 20))


def full_precision(folder: Path, family: str = "llama", seed: int = 0, **fields: Any) -> Path:
    config = FAMILIES[family](random.Random(0), 0)
    config.hidden_size, config.head_dim, config.vocab_size, config.intermediate_size = 64, 32, 64, 128
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    for name, value in fields.items():
        setattr(config, name, value)
    make(folder, config, seed=seed)
    return folder


def logits(folder: Path) -> torch.Tensor:
    return Paged(load_model(folder, "float32", CPU), 1, random.Random(0)).step([(0, 0, PROMPT)])[0]


def by_transformers(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    with torch.inference_mode():
        return model.float()(torch.tensor([PROMPT])).logits[0]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("to", SCHEMES)
def test_transformers_computes_the_same_logits_of_the_folder(to: Scheme, tmp_path: Path) -> None:
    folder, out = full_precision(tmp_path / "model"), tmp_path / "out"
    write_quantised(str(folder), to, out)
    want = by_transformers(out)
    torch.testing.assert_close(logits(out), want, atol=2e-4, rtol=1e-3)
    assert (want - logits(folder)).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("to", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe", "deepseek_v3"])
def test_the_folder_has_the_very_matrices_that_are_rounded_on_load(
    family: str, to: Scheme, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = FAMILIES[family](random.Random(0), 0)
    made = make(tmp_path / "wide", config, seed=0)
    made.to(dtype).save_pretrained(tmp_path / "model")
    write_quantised(str(tmp_path / "model"), to, tmp_path / "out")
    shapes = {
        name: (tensor.shape[0], tensor.shape[1])
        for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items()
        if tensor.ndim == 2
    }
    rounding = rounding_of_model(read_spec(tmp_path / "model"), to)
    on_load = Checkpoint(tmp_path / "model", torch.float32, CPU, whole, None, ALL, rounds=rounding)
    stored = Checkpoint(
        tmp_path / "out", torch.float32, CPU, whole, read_spec(tmp_path / "out").quantisation, ALL
    )
    num_rounded = 0
    for name, shape in shapes.items():
        ours, theirs = on_load.matrix(name, shape), stored.matrix(name, shape)
        if not name.startswith("model.layers") or isinstance(theirs, torch.Tensor):
            continue
        num_rounded += 1
        for mine, other in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8)), name
    assert num_rounded > 4


def test_the_folder_has_everything_else_and_names_what_stays_as_it_is(tmp_path: Path) -> None:
    folder, out = full_precision(tmp_path / "model", tie_word_embeddings=False), tmp_path / "a" / "out"
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("the same weights")
    seen: list[tuple[int, int]] = []
    num_bytes = write_quantised(str(folder), "int8", out, lambda done, whole: seen.append((done, whole)))
    names = {path.name for path in out.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "1_Pooling",
    } < names
    assert "pytorch_model.bin" not in names
    config = json.loads((out / "config.json").read_text())
    assert "lm_head" in config["quantization_config"]["ignore"]
    tensors = load_file(out / "model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == num_bytes
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    assert tensors["lm_head.weight"].dtype == torch.float32
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_many_files_are_as_good_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = full_precision(tmp_path / "model", seed=1)
    write_quantised(str(folder), "nvfp4", tmp_path / "one")
    monkeypatch.setattr(quantised_copy, "FILE_BYTES", 20_000)
    write_quantised(str(folder), "nvfp4", tmp_path / "many")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "one"), logits(tmp_path / "many"))


class _Stopped(BaseException):
    """As KeyboardInterrupt is."""


def test_work_that_is_interrupted_leaves_no_folder(tmp_path: Path) -> None:
    folder = full_precision(tmp_path / "model")

    def stop(done: int, whole: int) -> None:
        if done > whole / 2:
            raise _Stopped

    with pytest.raises(_Stopped):
        write_quantised(str(folder), "fp8", tmp_path / "out", stop)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_until_it_is_whole_the_folder_has_another_name_and_no_config(tmp_path: Path) -> None:
    folder, seen = full_precision(tmp_path / "model"), set[str]()

    def look(done: int, whole: int) -> None:
        del done, whole
        assert not (tmp_path / "out").exists()
        seen.update(path.name for part in tmp_path.glob(".out.incomplete-*") for path in part.iterdir())

    write_quantised(str(folder), "fp8", tmp_path / "out", look)
    assert "config.json" not in seen


def test_a_disk_that_is_full_is_said_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise SafetensorError("No space left on device")

    folder = full_precision(tmp_path / "model")
    monkeypatch.setattr(quantised_copy, "save_file", full)
    with pytest.raises(ConfigError, match="cannot write .*out: No space left on device"):
        write_quantised(str(folder), "fp8", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    folder, out = full_precision(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(ConfigError, match="exists already"):
        write_quantised(str(folder), "fp8", out)
    assert (out / "mine").read_text() == "x"


def test_what_has_few_bits_already_or_no_matrix_that_fits_is_refused(tmp_path: Path) -> None:
    folder = full_precision(tmp_path / "model")
    write_quantised(str(folder), "fp8", tmp_path / "fp8")
    with pytest.raises(UnsupportedModel, match="has few bits already"):
        write_quantised(str(tmp_path / "fp8"), "int4", tmp_path / "out")
    make(tmp_path / "stacked", FAMILIES["llama4"](random.Random(0), 0), seed=0)
    with pytest.raises(UnsupportedModel, match="experts.*set model.quantization instead"):
        write_quantised(str(tmp_path / "stacked"), "int8", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_the_folder_and_says_how_large_it_is(tmp_path: Path) -> None:
    folder, out = full_precision(tmp_path / "model"), tmp_path / "out"
    result = CliRunner().invoke(app, ["quantize", str(folder), str(out), "--to", "int4"])
    assert result.exit_code == 0, result.output
    assert "GB of weights" in " ".join(result.output.split())
    assert read_spec(out).quantisation is not None

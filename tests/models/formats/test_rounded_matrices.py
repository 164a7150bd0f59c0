"""Matrices of floats that are rounded as they are read: against the library of compressed-tensors, on every family and any cut."""

import random
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file
from torch import Tensor

from core.errors import UnsupportedModel
from engine.sizing.model_dims import dims_of, rules_of
from kernels.packed import EightBit, FourBit, Kind, Weight, as_float
from kernels.torch.reference import reference_ops
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, Shard, whole
from models.formats.dummy_weights import DummyWeights
from models.formats.rounded_matrix import Scheme, WeightRounding, round_part, rounding_of_model
from models.formats.tensor_files import TensorFiles
from models.model import Model
from models.quantising.multiplied import multiplied_matrices
from parallel.mesh import Mesh
from parallel.rules import Sharding
from tests.models.checkpoints import CPU, FAMILIES, HYBRID, Paged, make
from tests.models.parts import Meeting
from tests.models.stored import rewrite

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
ALL: frozenset[Kind] = frozenset(("float8", "int8", "four_bit", "nvfp4"))
PROMPT = list(range(2, 30))
SIZES = {
    "head_dim": 16, "vocab_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64, "moe_intermediate_size": 64,
    "shared_intermediate_size": 64,
}  # fmt: skip
EVERY = {**FAMILIES, **HYBRID}
ARGS: dict[Scheme, dict[str, Any]] = {
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "nvfp4": {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn,
    },
}  # fmt: skip


def by_the_library(matrix: Tensor, to: Scheme) -> Tensor:
    """Return what compressed-tensors makes of the smallest and largest number of each group."""
    args = QuantizationArgs(**ARGS[to])
    groups = matrix.unflatten(1, (-1, args.group_size or matrix.shape[1]))
    least, most = groups.amin(2), groups.amax(2)
    overall = None
    if to == "nvfp4":  # a power of two, where the library takes just what fits
        overall = 2.0 ** generate_gparam(matrix.min(), matrix.max()).log2().floor()
    scales, zeros = calculate_qparams(least, most, args, global_scale=overall)
    return fake_quantize(matrix, scales, zeros, args, global_scale=overall)


def rounded(matrix: Tensor, to: Scheme, keeps: frozenset[Kind] = ALL) -> Tensor:
    weight = round_part(WeightRounding(to), "x.weight", matrix, [slice(0, matrix.shape[1])], keeps)
    return as_float(weight, torch.float32)


@pytest.mark.parametrize("to", SCHEMES)
def test_each_number_is_the_one_that_the_format_s_library_makes_of_it(to: Scheme) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(64, 256) * torch.logspace(-6, 4, 64)[:, None]
    matrix[5, :128], matrix[7] = (
        0,
        torch.arange(256) / 4 - 32,
    )  # nothing at all, and many that lie in the middle
    torch.testing.assert_close(rounded(matrix, to), by_the_library(matrix, to), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("to", SCHEMES)
def test_no_number_is_further_off_than_half_a_step_of_its_group(to: Scheme, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = (torch.randn(64, 256) / 16).to(dtype)
    got, groups = rounded(matrix, to), WeightRounding(to).how
    size = groups.group or (groups.block or (1, 256))[1]
    most = matrix.float().unflatten(1, (-1, size)).abs().amax(2, keepdim=True).expand(-1, -1, size).flatten(1)
    # An E4M3 number has steps of a 16th of itself; E2M1's largest two are 2 of 6 apart, and its scale is as coarse as E4M3.
    allowed = {"fp8": 1 / 28, "int8": 0.55 / 127.5, "int4": 0.55 / 7.5, "nvfp4": 1 / 5}[to]
    assert ((got - matrix.float()).abs() <= allowed * most).all()


@pytest.mark.parametrize("to", SCHEMES)
def test_numbers_that_are_not_finite_are_refused_by_the_tensor_s_name(to: Scheme) -> None:
    matrix = torch.ones(16, 128)
    matrix[3, 4] = torch.nan
    with pytest.raises(UnsupportedModel, match=r"x\.weight.*not finite"):
        rounded(matrix, to)


def checkpoint(
    folder: Path, to: Scheme | None, shard: Shard = whole, keeps: frozenset[Kind] = ALL
) -> Checkpoint:
    rounds = None if to is None else rounding_of_model(read_spec(folder), to)
    return Checkpoint(folder, torch.float32, CPU, shard, None, keeps, rounds=rounds)


def load(folder: Path, source: Checkpoint) -> Model:
    model = Model(read_spec(folder), replace(reference_ops(), keeps=source.keeps), source, CPU)
    source.close()
    return model


def sized(family: str) -> Any:
    """A tiny configuration whose sizes are multiples of 16."""
    config = EVERY[family](random.Random(0), 0)
    text = config.get_text_config()
    if not family.startswith(("gemma4", "granite4")) and family not in HYBRID:
        text.num_attention_heads, text.num_key_value_heads, text.hidden_size = 4, 2, 64
    for name, size in SIZES.items() if not family.startswith("gemma4") else ():
        if getattr(text, name, 0):
            setattr(text, name, size)
    return config


class _Noting(Checkpoint):
    """Notes which matrices were rounded."""

    def __init__(self, folder: Path, to: Scheme) -> None:
        rounds = rounding_of_model(read_spec(folder), to)
        super().__init__(folder, torch.float32, CPU, whole, None, ALL, rounds=rounds)
        self.rounded: set[str] = set()

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        made = super().matrix(name, shape)
        self.rounded |= set[str]() if isinstance(made, Tensor) else {name}
        return made


@pytest.mark.turns(3)
@pytest.mark.parametrize(("family", "to"), list(zip(EVERY, cycle(SCHEMES), strict=False)))
def test_every_family_computes_with_matrices_that_are_rounded(
    family: str, to: Scheme, tmp_path: Path
) -> None:
    """Kept as kernels multiply them, they are the numbers that they are as floats. `baton quantize` names the same ones."""
    make(tmp_path, sized(family), seed=0)
    noting = _Noting(tmp_path, to)
    kept, floats, plain = (
        Paged(load(tmp_path, source), 1, random.Random(0)).step([(0, 0, PROMPT)])[0]
        for source in (noting, checkpoint(tmp_path, to, keeps=frozenset()), checkpoint(tmp_path, None))
    )
    torch.testing.assert_close(kept, floats, atol=1e-4, rtol=1e-4)
    assert not torch.equal(kept, plain)
    try:
        named = multiplied_matrices(read_spec(tmp_path), TensorFiles(tmp_path, decoders=True))
    except UnsupportedModel as error:
        assert "has the matrices of all" in str(error)  # noqa: PT017 (most families have none)
        return
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    assert noting.rounded - ends == {
        name for name, shape in named.items() if noting.rounds is not None and noting.rounds.takes(shape)
    }


@pytest.mark.parametrize("to", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "llama4", "gpt_oss", "granite_moe", "glm4_moe"])
def test_two_ranks_equal_the_whole_or_are_refused_by_name(family: str, to: Scheme, tmp_path: Path) -> None:
    make(tmp_path, sized(family), seed=0)
    spec, meeting = read_spec(tmp_path), Meeting(2)
    want = Paged(load(tmp_path, checkpoint(tmp_path, to)), 1, random.Random(0)).step([(0, 0, PROMPT)])[0]

    def rank(i: int) -> Tensor:
        source = checkpoint(tmp_path, to, Sharding(dims_of(spec), Mesh(tp=2), i, rules_of(spec)))
        model = Model(
            spec, replace(reference_ops(), keeps=ALL), source, CPU, collectives=meeting.collectives(i, 64)
        )
        paged = Paged(model, 1, random.Random(0))
        paged.kv = [layer.chunk(2, 2)[i].contiguous() for layer in paged.kv]
        return paged.step([(0, 0, PROMPT)])[0]

    if to == "int4":  # 64 inputs share a scale
        with pytest.raises(UnsupportedModel, match="model.quantization is int4, of which 64 inputs"):
            rank(0)
        return
    for got in meeting.run(rank):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_matrices_that_engines_join_share_nvfp4_s_overall_scale(tmp_path: Path) -> None:
    config = FAMILIES["llama"](random.Random(0), 0)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 64, 16
    make(tmp_path, config, seed=0)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 100
    rewrite(tmp_path, tensors)
    source = checkpoint(tmp_path, "nvfp4")
    prefix, shape = "model.layers.0.mlp.", (64, 64)
    gate, up, down = (source.matrix(f"{prefix}{name}_proj.weight", shape) for name in ("gate", "up", "down"))
    overall = [
        each.factors[0] for each in (gate, up, down) if isinstance(each, FourBit) and each.factors is not None
    ]
    assert overall[0] == overall[1] != overall[2]


@pytest.mark.parametrize("to", SCHEMES)
def test_an_embedding_has_eight_bits_also_where_matrices_have_four(to: Scheme, tmp_path: Path) -> None:
    config = FAMILIES["llama"](random.Random(0), 0)
    config.hidden_size, config.vocab_size, config.tie_word_embeddings = 64, 64, True
    make(tmp_path, config, seed=0)
    source, name = checkpoint(tmp_path, to), "model.embed_tokens.weight"
    assert isinstance(source.table(name, (64, 64)), EightBit)
    assert isinstance(source.matrix(name, (64, 64)), EightBit if to in ("fp8", "int8") else FourBit)


@pytest.mark.parametrize("to", SCHEMES)
def test_weights_that_are_made_up_are_rounded_too(to: Scheme) -> None:
    source = DummyWeights(torch.bfloat16, CPU, rounds=WeightRounding(to, 64), kept=ALL)
    assert isinstance(source.matrix("model.layers.0.mlp.up_proj.weight", (64, 64)), EightBit | FourBit)

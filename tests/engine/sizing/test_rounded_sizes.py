"""What a GPU keeps of matrices that are rounded as they are read, and who is refused."""

import gc
import random
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_args

import pytest
import torch

from core.config.cluster_config import EngineConfig, ModelConfig
from core.errors import UnsupportedModel
from engine.sizing.memory_needs import needs_of
from engine.sizing.pool_size import size_pool
from engine.sizing.stored_weights import Stored, stored_as
from kernels.cpu.library import native
from kernels.cpu.prepacked import WeightFormat
from kernels.packed import Kind, PrepackedExperts
from kernels.torch.reference import reference_ops
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, whole
from models.formats.rounded_matrix import Scheme
from models.model import Model
from models.registry import LoadOptions, choose_weights, load_model, rounded_to
from parallel.mesh import ONE_RANK
from tests.models.checkpoints import CPU, FAMILIES, Paged, make
from tests.models.stored import w8a8

GPU = torch.device("cuda")
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
KEPT_ON_GPUS: frozenset[Kind] = frozenset(("float8", "int8", "four_bit", "nvfp4"))


def checkpoint(folder: Path, family: str = "llama", **fields: Any) -> Path:
    config = FAMILIES[family](random.Random(0), 0)
    config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim = 256, 512, 1024, 64
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    for name, value in fields.items():
        setattr(config, name, value)
    make(folder / "wide", config, seed=0).bfloat16().save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("to", SCHEMES)
def test_a_gpu_keeps_as_many_bytes_as_are_counted(to: Scheme, tied: bool, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, tie_word_embeddings=tied)
    spec = read_spec(folder)
    weights = choose_weights(spec, "auto", to, GPU, deterministic=False)
    source = Checkpoint(
        folder, torch.bfloat16, CPU, whole, None, KEPT_ON_GPUS, rounds=rounded_to(spec, weights, GPU)
    )
    model = Model(spec, replace(reference_ops(), keeps=KEPT_ON_GPUS), source, CPU)
    source.close()
    (needs,) = needs_of(
        spec,
        EngineConfig(),
        ONE_RANK,
        stored_as(spec, "bfloat16", weights, GPU, deterministic=False),
        context_tokens=1024,
    )
    assert needs.weight_bytes == pytest.approx(held_bytes(model), rel=0.05)


def held_bytes(model: Model) -> int:
    """The bytes of all tensors that a model leads to."""
    seen, left = dict[int, object](), list[object]([model])
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType):
            continue
        seen[id(each)] = each
        left += (each.__closure__ or ()) if isinstance(each, FunctionType) else gc.get_referents(each)
    storages = [each.untyped_storage() for each in seen.values() if isinstance(each, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.skipif(native() is None, reason="there are no native kernels here")
@pytest.mark.parametrize("family", ["qwen3_moe", "granite_moe"])
@pytest.mark.parametrize(("to", "most"), [("int8", 0.3), ("int4", 0.2), ("nvfp4", 0.4)])
def test_a_cpu_keeps_experts_in_few_bits_too(to: Scheme, most: float, family: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, family, moe_intermediate_size=256)
    (kept, counted), (plain, _) = (held_and_counted(folder, weights) for weights in (to, "half"))
    experts = [each for held in kept.experts.values() for each in (held.gate_up, held.down)]
    assert all(isinstance(each, PrepackedExperts) for each in experts)
    sizes = [
        sum(each.nbytes for held in model.experts.values() for each in held.tensors)
        for model in (kept, plain)
    ]
    assert sizes[0] < most * sizes[1]
    assert counted.expert == pytest.approx(4 * sizes[0] / sizes[1], rel=0.1)
    # A router of random weights chooses other experts after little.
    assert torch.cosine_similarity(logits(kept), logits(plain), -1).median() > 0.6


def held_and_counted(folder: Path, weights: WeightFormat) -> tuple[Any, Stored]:
    spec = read_spec(folder)
    return (
        load_model(folder, "float32", CPU, options=LoadOptions(weights=weights)),
        stored_as(spec, "float32", weights, CPU, deterministic=False),
    )


@pytest.mark.skipif(native() is None, reason="there are no native kernels here")
@pytest.mark.parametrize("to", ["fp8", "nvfp4"])
def test_a_cpu_computes_with_the_numbers_that_a_gpu_has(to: Scheme, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    spec = read_spec(folder)
    weights = choose_weights(spec, "auto", to, CPU, deterministic=False)
    got = logits(load_model(folder, "float32", CPU, options=LoadOptions(weights=weights)))
    source = Checkpoint(
        folder, torch.float32, CPU, whole, None, KEPT_ON_GPUS, rounds=rounded_to(spec, to, GPU)
    )
    want = logits(Model(spec, replace(reference_ops(), keeps=KEPT_ON_GPUS), source, CPU))
    # fp8's are floats there, but for an embedding of 8 bits; nvfp4's are multiplied with rows of 8 bits.
    assert torch.cosine_similarity(got, want, -1).min() > (0.999999 if to == "fp8" else 0.99)


def logits(model: Any) -> torch.Tensor:
    return Paged(model, 1, random.Random(0)).step([(0, 0, list(range(2, 30)))])[0]


@pytest.mark.skipif(native() is None, reason="there are no native kernels here")
@pytest.mark.parametrize("to", ["fp8", "int8", "int4", "nvfp4"])
def test_a_server_on_a_cpu_sizes_its_pool_with_each(to: Scheme, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    engine = EngineConfig(num_blocks=64, max_batch_tokens=64)
    size = size_pool(folder, ModelConfig(quantization=to), engine, device=CPU)
    assert size.weights == to


def test_what_cannot_be_rounded_is_refused_by_name(tmp_path: Path) -> None:
    spec = read_spec(checkpoint(tmp_path))
    with pytest.raises(UnsupportedModel, match="engine.deterministic multiplies floats alone"):
        choose_weights(spec, "auto", "int4", GPU, deterministic=True)
    w8a8(tmp_path / "w8a8", "int", "channel")
    with pytest.raises(UnsupportedModel, match="has few bits already"):
        choose_weights(read_spec(tmp_path / "w8a8"), "auto", "int8", GPU, deterministic=False)
    foreign = replace(spec, implementation="transformers", architecture="GPT2LMHeadModel")
    with pytest.raises(UnsupportedModel, match="transformers computes GPT2LMHeadModel"):
        choose_weights(foreign, "auto", "int8", GPU, deterministic=False)
    with pytest.raises(UnsupportedModel, match="transformers computes GPT2LMHeadModel"):
        choose_weights(foreign, "auto", "nvfp4", CPU, deterministic=False)

"""`model.load_format: dummy`: a model of which there is only config.json."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core.config.cluster_config import EngineConfig, ModelConfig
from core.errors import UnsupportedModel
from engine.sizing.pool_size import size_pool
from kernels.cpu.library import native
from kernels.cpu.prepacked import WeightFormat, prepacked_ops
from kernels.ops import Ops
from kernels.packed import LinearWeight, Weight
from models.formats.dummy_weights import DummyWeights
from models.registry import LoadOptions, load_model
from tests.models.checkpoints import CPU, FAMILIES, VOCAB, Paged
from tests.models.parts import tensor_parallel

PROMPT = list(range(2, 30))


def describe(folder: Path, family: str = "llama", **fields: Any) -> Path:
    config: transformers.PretrainedConfig = FAMILIES[family](random.Random(0), 0)
    architecture = type(transformers.AutoModelForCausalLM.from_config(config)).__name__
    config.architectures = [architecture]
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_without_a_file_of_weights(family: str, tmp_path: Path) -> None:
    describe(tmp_path, family)
    models = [
        load_model(tmp_path, "float32", CPU, options=LoadOptions(load_format="dummy")) for _ in range(2)
    ]
    first, second = (torch.cat(Paged(model, 1, random.Random(0)).step([(0, 0, PROMPT)])) for model in models)
    assert first.shape == (len(PROMPT), VOCAB)
    assert first.isfinite().all()
    assert first.std() > 0.01, "logits differ from token to token"
    assert torch.equal(first, second), "the same everywhere, so that pools hand over to each other"


def test_a_rank_makes_no_more_than_its_part() -> None:
    source = DummyWeights(torch.bfloat16, CPU, tensor_parallel(1, 2))
    assert source.take("model.layers.0.mlp.up_proj.weight", (64, 32)).shape == (32, 32)
    assert source.take("model.norm.weight", (32,), torch.float32).shape == (32,)


@pytest.mark.skipif(native() is None, reason="without native kernels a CPU keeps no 16 bits")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_have_the_16_bits_that_a_checkpoint_s_would(
    monkeypatch: pytest.MonkeyPatch, dtype: str, tmp_path: Path
) -> None:
    described, packed = describe(tmp_path, dtype=dtype), set[torch.dtype]()

    def noting(weights: WeightFormat) -> Ops:
        ops = prepacked_ops(weights)

        def pack(weight: Weight, computed: torch.dtype) -> LinearWeight:
            assert isinstance(weight, torch.Tensor)
            packed.add(weight.dtype)
            return ops.pack(weight, computed)

        return replace(ops, pack=pack)

    monkeypatch.setattr("kernels.select.prepacked_ops", noting)
    load_model(described, "auto", CPU, options=LoadOptions(load_format="dummy", weights="half"))
    assert packed == {getattr(torch, dtype)}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantization_config"),
        ({"architectures": ["PhiForCausalLM"], "model_type": "phi"}, "PhiForCausalLM"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_up_is_refused_before_anything_starts(
    fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    describe(tmp_path, **fields)
    with pytest.raises(UnsupportedModel, match=named):
        size_pool(tmp_path, ModelConfig(load_format="dummy"), EngineConfig())

"""Images beside adapters, draft models and decoders of few bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from baton import LLM, SamplingParams
from core.errors import UnsupportedModel
from tests.models.peft_adapters import LINEAR, make_adapter
from tests.models.seeing_checkpoints import greedy_over, make_seeing, talks
from tests.models.stored import compressed, four_bits, packed_parts, rewrite, scaled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SMALL = {"engine__block_size": 4, "engine__num_blocks": 600, "engine__max_batch_tokens": 11}
DISAGGREGATED = {"prefill_instances": 1, "decode_instances": 1, "schedule__local_threshold_tokens": 0}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_an_adapter_of_the_decoder_goes_with_images(family: str, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    reference, processor = make_seeing(base, family)
    targets = rf".*language_model.*\.({'|'.join(LINEAR)})"
    adapted = make_adapter(adapter, reference, 3, targets=targets)
    plain, changed = (
        [greedy_over(model, processor, messages, images, 8) for messages, images in talks()]
        for model in (reference, adapted)
    )
    assert plain[0] != changed[0]
    for roles in ({}, DISAGGREGATED):
        with LLM(str(base), adapters={"own": str(adapter)}, **SMALL, **roles) as llm:
            assert [llm.chat(messages, PARAMS, adapter="own").token_ids for messages, _ in talks()] == changed
            assert [llm.chat(messages, PARAMS).token_ids for messages, _ in talks()] == plain


def test_an_adapter_of_the_tower_is_refused_by_name(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    reference, _ = make_seeing(base, "llava")
    make_adapter(adapter, reference, 3, targets=r".*vision_tower.*\.q_proj")
    with pytest.raises(UnsupportedModel, match=r"vision_tower.*is not supported"):
        LLM(str(base), adapters={"own": str(adapter)}, **SMALL)


@pytest.mark.parametrize(("family", "kind"), [("llava", "Llama"), ("qwen2_5_vl", "Qwen2")])
def test_a_draft_model_that_sees_nothing_changes_nothing(family: str, kind: str, tmp_path: Path) -> None:
    """It is the decoder by itself."""
    base, draft = tmp_path / "base", tmp_path / "draft"
    reference, processor = make_seeing(base, family)
    decoder = _decoder(reference, kind)
    decoder.save_pretrained(draft)
    processor.tokenizer.save_pretrained(draft)
    want = [greedy_over(reference, processor, messages, images, 24) for messages, images in talks()]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    for roles in ({}, DISAGGREGATED):
        with LLM(str(base), **SMALL, **roles, engine__speculate=f"draft:{draft}") as llm:
            assert [llm.chat(messages, params).token_ids for messages, _ in talks()] == want


def _decoder(reference: Any, kind: str) -> Any:
    text = reference.config.text_config.to_dict()
    names = ("vocab_size", *text.keys() & {"rope_theta", "rms_norm_eps", "head_dim"})
    sizes = [
        name for name in text if name.startswith(("hidden_size", "intermediate", "num_", "max_position"))
    ]
    config = getattr(transformers, f"{kind}Config")(
        **{name: text[name] for name in {*names, *sizes}},
        rope_parameters=_plain_rope(text),
        pad_token_id=None,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.model.load_state_dict(reference.model.language_model.state_dict())
    model.lm_head.load_state_dict(reference.lm_head.state_dict())
    return model


def _plain_rope(text: dict[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": text["rope_parameters"]["rope_theta"]}


def _int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    values, scales = scaled(weight, "int", "channel")
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def _words(kind: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    parts = packed_parts(kind, weight, 16)
    return parts, four_bits(kind, parts, 16)


_TOWERS = ["vision_tower", "multi_modal_projector", "visual", "lm_head"]
_WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (
        lambda weight: _words("awq", weight),
        {"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": _TOWERS},
    ),
    "gptq": (
        lambda weight: _words("gptq", weight),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "modules_in_block_to_quantize": [list(LINEAR)]},
    ),
    "compressed": (
        _int8,
        {
            **compressed(num_bits=8, type="int", strategy="channel"),
            "ignore": [f"re:.*{name}.*" for name in _TOWERS],
        },
    ),
}


@pytest.mark.parametrize(
    ("family", "way"), [("llava", "compressed"), *(("qwen2_5_vl", way) for way in _WAYS)]
)
def test_a_decoder_of_few_bits_beside_a_whole_tower(family: str, way: str, tmp_path: Path) -> None:
    reference, processor = make_seeing(tmp_path, family)
    quantise, how = _WAYS[way]
    torch.manual_seed(1)
    stored = load_file(tmp_path / "model.safetensors")
    plain = dict(stored)
    for name in [name for name in stored if "language_model" in name and name.endswith("_proj.weight")]:
        parts, plain[name] = quantise(stored.pop(name))
        stored |= {f"{name.removesuffix('.weight')}.{end}": part.contiguous() for end, part in parts.items()}
    rewrite(tmp_path, plain)
    reference = type(reference).from_pretrained(tmp_path).eval()
    rewrite(tmp_path, stored, quantization_config=how)
    want = [greedy_over(reference, processor, messages, images, 8) for messages, images in talks()]
    assert len(set(want)) == len(want)
    with LLM(str(tmp_path), **SMALL, model__dtype="float32") as llm:
        assert [llm.chat(messages, PARAMS).token_ids for messages, _ in talks()] == want


def test_a_tower_of_few_bits_is_refused_by_name(tmp_path: Path) -> None:
    make_seeing(tmp_path, "llava")
    stored = load_file(tmp_path / "model.safetensors")
    name = next(name for name in stored if "vision_tower" in name and name.endswith("q_proj.weight"))
    values, scales = scaled(stored[name], "float", "tensor")
    how = compressed(num_bits=8, type="float", strategy="tensor")
    rewrite(tmp_path, {**stored, name: values, f"{name}_scale": scales}, quantization_config=how)
    with pytest.raises(UnsupportedModel, match=r"vision_tower.*_scale: what sees is quantised"):
        LLM(str(tmp_path), **SMALL)

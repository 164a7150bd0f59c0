"""A model with adapters, in one batch and without: its logits are PEFT's own."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.families.table import read_spec
from models.lora.adapter import read_adapters
from models.registry import LoadOptions, load_model
from tests.models.checkpoints import CPU, FAMILIES, VOCAB, Paged, make
from tests.models.continuation import continuation
from tests.models.peft_adapters import FUSED, LINEAR, make_adapter

DENSE = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_small",
    "granite",
    "olmo2",
    "phi3",
    "glm",
    "glm4",
)
TARGETS = {
    "phi3": FUSED,
    "glm": (*LINEAR[:4], "gate_up_proj", "down_proj"),
    "glm4": (*LINEAR[:4], *FUSED[2:]),
}
ATTENTION = LINEAR[:4]


def adapted(
    folder: Path, family: str, i: int, kinds: dict[str, dict[str, Any]]
) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """Return transformers' model, PEFT's with each adapter, and the adapters' folders."""
    reference = make(folder / "base", FAMILIES[family](random.Random(f"{family}{i}"), i), seed=i)
    paths = {name: str(folder / name) for name in kinds}
    models = {
        name: make_adapter(folder / name, reference, seed, **how)
        for seed, (name, how) in enumerate(kinds.items())
    }
    return reference, models, paths


def keys(folder: Path, paths: dict[str, str]) -> dict[str, str]:
    """Return how requests name the adapters."""
    found = read_adapters(paths, read_spec(folder / "base"))
    return {name: each.key for name, each in zip(paths, found, strict=True)}


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("family", DENSE)
def test_a_batch_of_two_ranks_and_no_adapter_has_the_logits_of_peft(family: str, tmp_path: Path) -> None:
    targets = TARGETS.get(family, LINEAR)
    kinds = {
        "small": {"rank": 2, "lora_alpha": 3, "targets": targets},
        "large": {"rank": 8, "lora_alpha": 20, "targets": targets[1:], "use_rslora": True},
    }
    reference, models, paths = adapted(tmp_path, family, 0, kinds)
    model, named = (
        load_model(tmp_path / "base", "float32", CPU, options=LoadOptions(adapters=paths)),
        keys(tmp_path, paths),
    )
    rng = random.Random(family)
    truths = [models["small"], reference, models["large"], models["small"]]
    of = {0: named["small"], 2: named["large"], 3: named["small"]}
    prompts = [[rng.randrange(2, VOCAB) for _ in range(count)] for count in (21, 9, 17, 5)]
    paged = Paged(model, len(prompts), rng)
    cuts = [rng.randrange(1, len(prompt)) for prompt in prompts]
    first = paged.step([(s, 0, prompt[: cuts[s]]) for s, prompt in enumerate(prompts)], adapters=of)
    rest = paged.step([(s, cuts[s], prompt[cuts[s] :]) for s, prompt in enumerate(prompts)], adapters=of)
    for truth, prompt, *rows in zip(truths, prompts, first, rest, strict=True):
        torch.testing.assert_close(torch.cat(rows), logits_of(truth, prompt), atol=2e-4, rtol=2e-4)
    assert (logits_of(models["small"], prompts[0]) - logits_of(reference, prompts[0])).abs().max() > 0.1


def test_greedy_tokens_of_a_mixed_batch_are_those_of_peft(tmp_path: Path) -> None:
    kinds = {
        "small": {"rank": 2, "lora_alpha": 3},
        "large": {"rank": 16, "lora_alpha": 8, "targets": "all-linear"},
    }
    reference, models, paths = adapted(tmp_path, "qwen2", 2, kinds)
    model, named = (
        load_model(tmp_path / "base", "float32", CPU, options=LoadOptions(adapters=paths)),
        keys(tmp_path, paths),
    )
    rng = random.Random(1)
    truths = [models["small"], reference, models["large"], models["small"], reference]
    of = {0: named["small"], 2: named["large"], 3: named["small"]}
    prompts = [[rng.randrange(2, VOCAB) for _ in range(count)] for count in (7, 12, 9, 5, 1)]
    paged, texts = Paged(model, len(prompts), rng), [list(prompt) for prompt in prompts]
    for step in range(20):
        starts = [len(text) - 1 if step else 0 for text in texts]
        parts = [(s, start, texts[s][start:]) for s, start in enumerate(starts)]
        for text, logits in zip(texts, paged.step(parts, adapters=of), strict=True):
            text.append(int(logits[-1].argmax()))
    for truth, prompt, text in zip(truths, prompts, texts, strict=True):
        said = text[len(prompt) :]
        assert said == continuation(truth, prompt, said, 20)


PATTERNS: dict[str, dict[str, Any]] = {
    "patterns": {
        "rank": 4,
        "lora_alpha": 6,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
        "alpha_pattern": {"self_attn.v_proj": 9, "up_proj": 1},
    },
    "some layers": {"rank": 3, "targets": ("q_proj", "down_proj"), "layers_to_transform": [1]},
    "a regular expression": {"rank": 3, "targets": r".*\.0\..*(k_proj|up_proj)"},
}


@pytest.mark.parametrize("name", PATTERNS)
def test_what_a_configuration_says_of_single_modules_holds(name: str, tmp_path: Path) -> None:
    _, models, paths = adapted(tmp_path, "llama", 0, {"one": PATTERNS[name]})
    model, named = (
        load_model(tmp_path / "base", "float32", CPU, options=LoadOptions(adapters=paths)),
        keys(tmp_path, paths),
    )
    prompt = list(range(2, 40))
    (got,) = Paged(model, 1, random.Random(0)).step([(0, 0, prompt)], adapters={0: named["one"]})
    torch.testing.assert_close(got, logits_of(models["one"], prompt), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_attention_beside_experts_may_have_adapters(family: str, tmp_path: Path) -> None:
    _, models, paths = adapted(tmp_path, family, 0, {"one": {"targets": ATTENTION}})
    model, named = (
        load_model(tmp_path / "base", "float32", CPU, options=LoadOptions(adapters=paths)),
        keys(tmp_path, paths),
    )
    prompt = list(range(2, 30))
    (got,) = Paged(model, 1, random.Random(0)).step([(0, 0, prompt)], adapters={0: named["one"]})
    torch.testing.assert_close(got, logits_of(models["one"], prompt), atol=2e-4, rtol=2e-4)


def test_a_step_without_adapter_rows_has_the_bits_of_a_model_without_adapters(tmp_path: Path) -> None:
    _, _, paths = adapted(tmp_path, "llama", 0, {"one": {}})
    prompt, logits = list(range(2, 40)), []
    for adapters in (paths, {}):
        model = load_model(tmp_path / "base", "float32", CPU, options=LoadOptions(adapters=adapters))
        (got,) = Paged(model, 1, random.Random(0)).step([(0, 0, prompt)])
        logits.append(got)
    assert torch.equal(*logits)


def test_an_adapter_that_was_trained_without_the_head_is_read_too(tmp_path: Path) -> None:
    _, models, paths = adapted(tmp_path, "llama", 0, {"one": {}})
    file = tmp_path / "one" / "adapter_model.safetensors"
    stem, other = "base_model.model.model.", "base_model.model."
    save_file({other + name.removeprefix(stem): tensor for name, tensor in load_file(file).items()}, file)
    model, named = (
        load_model(tmp_path / "base", "float32", CPU, options=LoadOptions(adapters=paths)),
        keys(tmp_path, paths),
    )
    (got,) = Paged(model, 1, random.Random(0)).step([(0, 0, [5, 6, 7])], adapters={0: named["one"]})
    torch.testing.assert_close(got, logits_of(models["one"], [5, 6, 7]), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("weights", ["half", "int8", "int4"])
def test_beside_packed_matrices_is_what_peft_adds_to_their_products(weights: str, tmp_path: Path) -> None:
    """With the adapter it is no farther from PEFT than the packed model is from transformers without."""
    reference, models, paths = adapted(tmp_path, "llama", 0, {"one": {"lora_alpha": 16}})
    model = load_model(
        tmp_path / "base", "float32", CPU, options=LoadOptions(weights=weights, adapters=paths)
    )  # type: ignore[arg-type]
    prompt, of = list(range(2, 40)), {0: keys(tmp_path, paths)["one"]}
    want, plain = logits_of(models["one"], prompt), logits_of(reference, prompt)
    (with_it,), (without,) = (
        Paged(model, 1, random.Random(0)).step([(0, 0, prompt)], adapters=each) for each in (of, None)
    )
    rounding = max(1e-4, float((without - plain).norm() / plain.norm()))
    error = (with_it - want).norm() / want.norm()
    assert error < 1.5 * rounding
    assert error < 0.5 * (plain - want).norm() / want.norm(), "it is nearer to PEFT than without the adapter"


def test_a_deterministic_row_has_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    _, _, paths = adapted(tmp_path, "llama", 0, {"one": {}, "two": {"rank": 2}})
    model = load_model(
        tmp_path / "base", "float32", CPU, options=LoadOptions(deterministic=True, adapters=paths)
    )
    named, prompt = keys(tmp_path, paths), list(range(2, 30))
    (alone,) = Paged(model, 1, random.Random(0)).step([(0, 0, prompt)], adapters={0: named["one"]})
    parts = [(s, 0, prompt) for s in range(4)]
    of = {0: named["two"], 1: named["one"], 3: named["one"]}
    batch = Paged(model, 4, random.Random(0)).step(parts, adapters=of)
    assert torch.equal(alone, batch[1])
    assert torch.equal(alone, batch[3])
    assert not torch.equal(alone, batch[0])

"""Architectures that Baton has no code for: through the whole of a disaggregated cluster, with the tokens of transformers."""

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.errors import ConfigError, UnsupportedModel
from core.types import Request, SamplingParams
from engine.sizing.model_dims import check_mesh
from models.families.table import read_spec
from models.registry import LoadOptions, choose_weights, load_model
from parallel.mesh import Mesh
from tests.models.checkpoints import FAMILIES, Paged, make
from tests.models.foreign_checkpoints import VOCAB, make_foreign

pytestmark = pytest.mark.usefixtures("forked")
CPU = torch.device("cpu")
LENGTH, TIE = 24, 1e-4
SAMPLING = SamplingParams(temperature=0.0, max_tokens=LENGTH)
SERVED = (
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "AriaTextForCausalLM",
    "BitNetForCausalLM",
    "Cohere2MoeForCausalLM",
    "CwmForCausalLM",
    "Emu3ForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM",
    "FlexOlmoForCausalLM",
    "GPTBigCodeForCausalLM",
    "GPTNeoXForCausalLM",
    "GemmaForCausalLM",
    "HeliumForCausalLM",
    "Jais2ForCausalLM",
    "MiniCPM3ForCausalLM",
    "MinistralForCausalLM",
    "NanoChatForCausalLM",
    "NemotronForCausalLM",
    "OPTForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "PersimmonForCausalLM",
    "PhiForCausalLM",
    "SolarOpenForCausalLM",
    "Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM",
    "YoutuForCausalLM",
    "GPT2LMHeadModel",
)
ONE_RANK = {
    "AfmoeForCausalLM": "leaves the heads of attention together",
    "BitNetForCausalLM": "has no plan",
    "Emu3ForCausalLM": "leaves the heads of attention together",
    "FlexOlmoForCausalLM": "has rowwise_split_input",
    "GPTBigCodeForCausalLM": "has no plan",
    "OPTForCausalLM": "has no plan",
    "OlmoeForCausalLM": "has rowwise_split_input",
    "PersimmonForCausalLM": "has no plan",
    "YoutuForCausalLM": "leaves the heads of attention together",
    "GPT2LMHeadModel": "has no plan",
}
"""Architectures whose layers transformers has no way to cut, and why. All others decode on two ranks."""


def prompts() -> list[list[int]]:
    """Every second one begins as the one before it."""
    rng = random.Random(0)
    shared = [rng.randrange(2, VOCAB) for _ in range(23)]
    return [
        [*shared[:length], *(rng.randrange(2, VOCAB) for _ in range(more))]
        for length, more in ((23, 14), (18, 5), (0, 40), (23, 2))
    ]


@torch.inference_mode()
def likeliest(reference: Any, prompt: Sequence[int], said: Sequence[int]) -> bool:
    """Is each token the likeliest behind those before it, but for rounding, which differs between processors?"""
    rows = reference(torch.tensor([[*prompt, *said[:-1]]])).logits[0, len(prompt) - 1 :]
    behind = rows.max(-1).values - rows.gather(1, torch.tensor(said)[:, None])[:, 0]
    return bool((behind < TIE).all())


async def served(folder: Path, asked: Sequence[Sequence[int]], **keys: Any) -> list[list[int]]:
    """All at once, twice: the second time over what the first has left. Prompts go from prefill to decode in chunks."""
    values = {
        "model.path": str(folder),
        "model.implementation": "transformers",
        "engine.block_size": 4,
        "engine.num_blocks": 200,
        "engine.max_batch_tokens": 24,
        "schedule.local_threshold_tokens": 0,
    }
    async with LocalCluster.running(load(None, {}, values | keys)) as cluster:
        frontend = cluster.frontend

        async def answer(prompt: Sequence[int]) -> list[int]:
            request = Request(
                id=frontend.new_request_id(), prompt=tuple(prompt), sampling=SAMPLING, reply_to=frontend.address
            )  # fmt: skip
            return [token.token async for token in frontend.generate(request)]

        first, second = [await asyncio.gather(*map(answer, asked)) for _ in range(2)]
        assert first == second
        for instance in cluster.instances:
            instance.check_integrity()
    return list(first)


@pytest.mark.parametrize(
    ("architecture", "share"),
    [
        ("OlmoeForCausalLM", 0.5),
        ("HunYuanMoEV1ForCausalLM", 0.5),
        ("Dots1ForCausalLM", 0.5),
        ("PhiForCausalLM", 0.0),
    ],
)
def test_which_part_of_the_experts_a_token_draws_is_known_of_foreign_models_too(
    architecture: str, share: float, tmp_path: Path
) -> None:
    make_foreign(tmp_path, architecture)
    assert read_spec(tmp_path).expert_share == share


@pytest.mark.slow
@pytest.mark.turns(3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("architecture", "prefix_cache"), [*((name, True) for name in SERVED), ("ArceeForCausalLM", False)]
)
async def test_tokens_are_those_of_transformers(
    architecture: str, prefix_cache: bool, tmp_path: Path
) -> None:
    """Prompts are computed by one rank, and outputs by two. No architecture knows of the prefix cache, so that one is enough to go
    without it."""
    reference = make_foreign(tmp_path, architecture)
    ranks = 1 if architecture in ONE_RANK else 2
    found = await served(tmp_path, prompts(), **{"engine.prefix_cache": prefix_cache, "decode.tp": ranks})
    for prompt, said in zip(prompts(), found, strict=True):
        assert len(said) == LENGTH
        assert likeliest(reference, prompt, said)


@pytest.mark.slow
@pytest.mark.turns(3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ["GPTNeoXForCausalLM", "SmolLM3ForCausalLM", "Dots1ForCausalLM"])
async def test_stages_of_a_pipeline_share_its_layers(architecture: str, tmp_path: Path) -> None:
    reference = make_foreign(tmp_path, architecture, num_hidden_layers=4)
    keys = {"prefill.pp": 2, "decode.pp": 2, "decode.tp": 2}
    for prompt, said in zip(prompts(), await served(tmp_path, prompts(), **keys), strict=True):
        assert likeliest(reference, prompt, said)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_ranks_know_who_computes_an_architecture_of_batons_own(tmp_path: Path) -> None:
    reference = make_foreign(tmp_path, "Qwen2ForCausalLM")
    keys = {"prefill.tp": 2, "decode.tp": 2}
    for prompt, said in zip(prompts(), await served(tmp_path, prompts(), **keys), strict=True):
        assert likeliest(reference, prompt, said)


@pytest.mark.parametrize(("quantization", "loss"), [("none", 0.002), ("int8", 0.1), ("int4", 0.9)])
def test_its_products_keep_as_few_bits_as_those_of_batons_own(
    tmp_path: Path, quantization: str, loss: float
) -> None:
    """With matrices large enough to be packed, in a checkpoint of 16 bits."""
    reference = make_foreign(tmp_path, "ArceeForCausalLM", hidden_size=512, intermediate_size=1024)
    reference.to(torch.bfloat16).save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    weights = choose_weights(spec, "auto", quantization, CPU, deterministic=False)
    assert weights == ("half" if quantization == "none" else quantization)
    model = load_model(tmp_path, "float32", CPU, options=LoadOptions(weights=weights))
    paged = Paged(model, 1, random.Random(0))
    tokens = list(range(2, 40))
    found = paged.step([(0, 0, tokens)])[0]
    exact: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        wanted = exact(torch.tensor([tokens])).logits[0]
    assert float((found - wanted).norm() / wanted.norm()) < loss


async def test_an_architecture_of_batons_own_is_computed_by_transformers_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    """One that is fast enough for every run of the tests, with sliding windows."""
    make(tmp_path, FAMILIES["mistral"](random.Random(1), 1), seed=1)
    asked = [[token % 61 for token in prompt] for prompt in prompts()]
    by_both = [
        await served(tmp_path, asked, **{"model.implementation": whose})
        for whose in ("baton", "transformers")
    ]
    assert by_both[0] == by_both[1]
    assert read_spec(tmp_path, "transformers").implementation == "transformers"
    assert read_spec(tmp_path).implementation == "baton"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"architectures": ["NobodysForCausalLM"]}, "transformers has no causal language model of that name"),
        (
            {"architectures": ["NobodysForCausalLM"], "auto_map": {"AutoModel": "code.Mine"}},
            "its code is in its own repository, which Baton does not run",
        ),
        ({"quantization_config": {"quant_method": "quip"}}, r"quantization_config \(quip\) is not supported"),
        ({"num_key_value_heads": [2, 1]}, r"num_key_value_heads"),
    ],
)
def test_what_transformers_cannot_do_for_us_is_refused_by_name_before_a_weight_is_read(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    make_foreign(tmp_path, "ArceeForCausalLM")
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UnsupportedModel, match=why):
        read_spec(tmp_path)


def test_a_model_that_transformers_cannot_cut_is_refused_on_several_ranks(tmp_path: Path) -> None:
    for architecture in SERVED:
        folder = tmp_path / architecture
        make_foreign(folder, architecture)
        if (why := ONE_RANK.get(architecture)) is None:
            check_mesh(read_spec(folder, "transformers"), Mesh(tp=2), "decode")
        else:
            with pytest.raises(ConfigError, match=f"decode: tp 2 is impossible for {architecture}.*{why}"):
                check_mesh(read_spec(folder, "transformers"), Mesh(tp=2), "decode")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"decode.tp": 3}, "decode: tp 3 is impossible for ArceeForCausalLM.*2 KV heads"),
        ({"prefill.dp": 2}, "prefill: dp 2 is impossible for ArceeForCausalLM.*cannot share sequences"),
        ({"engine.deterministic": True}, "engine.deterministic is for Baton's own"),
        ({"model.implementation": "baton"}, "of its own Baton has LlamaForCausalLM"),
    ],
)
async def test_a_configuration_that_such_a_model_cannot_have_is_refused(
    tmp_path: Path, keys: dict[str, Any], why: str
) -> None:
    make_foreign(tmp_path, "ArceeForCausalLM")
    with pytest.raises(ConfigError, match=why):
        await served(tmp_path, prompts(), **keys)


def test_a_model_that_attends_in_another_way_than_it_is_asked_to_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one would that forgot its window: here the window that it says is not the one that it has."""
    make_foreign(tmp_path, "Cohere2ForCausalLM")
    load_model(tmp_path, "float32", CPU, options=LoadOptions(implementation="transformers"))
    from models.hf import packed_layers, sequence_layers

    attend = packed_layers.attend
    monkeypatch.setattr(
        packed_layers, "attend", lambda *args, **kw: attend(*args, **{**kw, "sliding_window": 2})
    )
    monkeypatch.setattr(sequence_layers, "CACHE_NAMES", ())
    with pytest.raises(UnsupportedModel, match=r"results are \d+% off"):
        load_model(tmp_path, "float32", CPU, options=LoadOptions(implementation="transformers"))


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_foreign(tmp_path, "ArceeForCausalLM")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        load_model(tmp_path, "float32", CPU)

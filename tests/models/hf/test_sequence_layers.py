"""Layers that keep something else than keys and values, or attend by code of their own: one sequence after the other."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.errors import ConfigError
from core.types import Request, SamplingParams
from kernels.ops import AttentionMeta, StateBlocks
from models.families.table import read_spec
from models.registry import LoadOptions, load_model
from tests.models.checkpoints import Paged
from tests.models.foreign_checkpoints import make_foreign
from tests.models.parity.tiny_checkpoints import VOCAB, make_tiny
from tests.models.seeing_checkpoints import make_seeing
from tests.models.served import greedy
from tests.models.stored import packed_checkpoint, w8a8

CPU = torch.device("cpu")
LENGTH = 40
RECURRENT = ("MambaForCausalLM", "BambaForCausalLM")
MORE = ("JambaForCausalLM", "Zamba2ForCausalLM", "RecurrentGemmaForCausalLM", "FalconH1ForCausalLM")


def prompts() -> list[list[int]]:
    """Prompts of which the second begins as the first, and in which phrases come again, which draft tokens are made of."""
    rng = random.Random(0)
    phrase = [rng.randrange(2, VOCAB) for _ in range(9)]
    first = [*phrase, *phrase, *phrase, *(rng.randrange(2, VOCAB) for _ in range(10))]
    return [first, [*first[:27], *phrase]]


async def served(folder: Path, asked: Sequence[Sequence[int]], **keys: Any) -> list[list[int]]:
    """All at once, twice: the second time after what the first has left in the prefix cache."""
    values = {
        "model.path": str(folder),
        "engine.block_size": 4,
        "engine.num_blocks": 2400,
        "engine.max_batch_tokens": 24,
        "schedule.local_threshold_tokens": 0,
    }
    async with LocalCluster.running(load(None, {}, values | keys)) as cluster:
        frontend = cluster.frontend

        async def answer(prompt: Sequence[int]) -> list[int]:
            sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH)
            request = Request(
                id=frontend.new_request_id(), prompt=tuple(prompt), sampling=sampling, reply_to=frontend.address
            )  # fmt: skip
            return [token.token async for token in frontend.generate(request)]

        first, second = [await asyncio.gather(*map(answer, asked)) for _ in range(2)]
        for instance in cluster.instances:
            instance.check_integrity()
    assert first == second
    return list(first)


async def check(folder: Path, architecture: str, **keys: Any) -> None:
    reference = make_tiny(folder, architecture)
    found = await served(folder, prompts(), **keys)
    assert found == [list(greedy(reference, prompt, LENGTH)) for prompt in prompts()]


@pytest.mark.turns(3)
@pytest.mark.parametrize("architecture", RECURRENT)
async def test_recurrent_states_pass_from_prefill_to_decode_and_through_the_prefix_cache(
    architecture: str, tmp_path: Path
) -> None:
    await check(tmp_path, architecture)
    assert read_spec(tmp_path).kv_layout(4, "float32").state_blocks > 0


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize("architecture", MORE)
async def test_so_do_those_of_other_kinds(architecture: str, tmp_path: Path) -> None:
    await check(tmp_path, architecture)


class Drafting(Paged):
    """Steps of one sequence whose last tokens may be draft tokens."""

    num_drafts = 0
    states: StateBlocks

    def _states(self, parts: list[tuple[int, int, list[int]]]) -> StateBlocks:
        drafts = (self.num_drafts,) if self.num_drafts else ()
        self.states = replace(super()._states(parts), num_drafts=drafts)
        return self.states


@pytest.mark.turns(3)
@pytest.mark.parametrize("architecture", ["BambaForCausalLM", "RecurrentGemmaForCausalLM"])
@torch.inference_mode()
def test_states_take_in_the_draft_tokens_that_were_right(architecture: str, tmp_path: Path) -> None:
    reference, tokens = make_tiny(tmp_path, architecture), list(range(2, 22))
    wanted = reference(input_ids=torch.tensor([tokens])).logits[0]
    paged = Drafting(load_model(tmp_path, "float32", CPU), 1, random.Random(0))
    paged.step([(0, 0, tokens[:8])])
    paged.num_drafts = 3
    found = paged.step([(0, 8, [*tokens[8:11], 99])])[0]
    torch.testing.assert_close(found[:3], wanted[8:11], atol=1e-4, rtol=0)
    assert AttentionMeta.of_states([4], paged.states).take_in([2])
    paged.num_drafts = 0
    torch.testing.assert_close(paged.step([(0, 11, tokens[11:])])[0], wanted[11:], atol=1e-4, rtol=0)


async def test_draft_tokens_change_no_token(tmp_path: Path) -> None:
    await check(tmp_path, "BambaForCausalLM", **{"engine.speculate": "ngram", "engine.speculate_tokens": 3})


async def test_attention_that_is_built_in_reads_the_pool(tmp_path: Path) -> None:
    await check(tmp_path, "BioGptForCausalLM")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"decode.tp": 2}, "decode: tp 2 is impossible for BambaForCausalLM.*it keeps recurrent states"),
        ({"decode.pp": 2}, "decode: pp 2 is impossible for BambaForCausalLM.*stages cannot share the cache"),
        (
            {"engine.kv_dtype": "float8"},
            "engine.kv_dtype is float8, but transformers attends in BambaForCausalLM",
        ),
        ({"engine.deterministic": True}, "engine.deterministic is"),
    ],
)
async def test_a_setting_that_such_a_model_cannot_have_is_refused(
    tmp_path: Path, keys: dict[str, Any], why: str
) -> None:
    make_tiny(tmp_path, "BambaForCausalLM")
    with pytest.raises(ConfigError, match=why):
        await served(tmp_path, prompts(), **keys)


def test_what_layers_keep_is_known_before_a_weight_is_read(tmp_path: Path) -> None:
    make_tiny(tmp_path, "MambaForCausalLM")
    (tmp_path / "model.safetensors").unlink()
    cache = read_spec(tmp_path).cache
    assert cache is not None
    assert cache.state_bytes > 0
    assert not cache.grows


@pytest.mark.turns(3)
@pytest.mark.parametrize("how", ["fp8", "awq", "gptq", "packed"])
@torch.inference_mode()
def test_quantised_matrices_are_made_floats_as_batons_own_are(how: str, tmp_path: Path) -> None:
    if how == "fp8":
        w8a8(tmp_path, "float", "channel", family="llama")
    else:
        packed_checkpoint(tmp_path, how, 16)
    tokens = list(range(2, 40))
    ours, theirs = (
        Paged(
            load_model(tmp_path, "float32", CPU, options=LoadOptions(implementation=whose)), 1, random.Random(0)
        ).step([(0, 0, tokens)])[0]
        for whose in ("baton", "transformers")
    )  # fmt: skip
    assert float((ours - theirs).norm() / ours.norm()) < 1e-3


def test_a_quantised_matrix_without_its_scales_is_refused(tmp_path: Path) -> None:
    w8a8(tmp_path, "float", "channel", family="llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.down_proj.weight_scale"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the tensor '[a-z0-9.]*down_proj\.weight_scale'"):
        load_model(tmp_path, "float32", CPU, options=LoadOptions(implementation="transformers"))


def test_towers_for_images_are_left_out(tmp_path: Path) -> None:
    reference, _ = make_seeing(tmp_path, "llava")
    model = load_model(tmp_path, "float32", CPU, options=LoadOptions(implementation="transformers"))
    names = dict(model.causal.named_parameters())  # pyright: ignore[reportAttributeAccessIssue]
    assert not any("vision" in name or "projector" in name for name in names)
    tokens = list(range(2, 12))
    with torch.inference_mode():
        found = Paged(model, 1, random.Random(0)).step([(0, 0, tokens)])[0]
        wanted = reference(input_ids=torch.tensor([tokens])).logits[0]
    assert torch.allclose(found, wanted, atol=1e-4)


def test_a_class_that_keeps_what_nobody_can_place_is_refused_by_name(tmp_path: Path) -> None:
    make_foreign(tmp_path, "ArceeForCausalLM")
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "architectures": ["ReformerModelWithLMHead"]})
    )
    with pytest.raises(ConfigError, match="architecture 'ReformerModelWithLMHead' is not supported"):
        read_spec(tmp_path)

"""Instances of many processes behind the real scheduler, workers and hand-over: the tokens are transformers' own."""

import asyncio
import math
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.instance.instance import Instance
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig, load
from core.types import Request, SamplingParams, ThinkingBudget
from parallel.comm import TIMEOUT_S
from tests.even_steps import cluster_of_even_steps
from tests.knowing import know_answers
from tests.models.checkpoints import FAMILIES, HYBRID, VOCAB, make
from tests.models.eagle_checkpoints import make_right_eagle
from tests.models.mtp_checkpoints import make_right_mtp
from tests.parallel.families import awkward
from tests.parallel.forked_ranks import forked_ranks
from tests.patience import PATIENCE_S
from tests.processes import children

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.turns(3)]
forked = pytest.mark.usefixtures("forked")
LENGTH = 12
SAMPLING = SamplingParams(temperature=0.0, max_tokens=LENGTH, min_tokens=LENGTH, masked_until_min=(1,))


LENGTHS = ((18, 20), (13, 9), (0, 30), (18, 3))
"""Tokens that prompts begin with alike, and others."""


def checkpoint(
    folder: Path,
    family: str = "llama",
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
    num_tokens: int = LENGTH,
) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Prompts, and what transformers says to them."""
    rng = random.Random(family)
    config = awkward(family) if family in HYBRID else FAMILIES[family](rng, 0)
    if family in FAMILIES:
        config.num_attention_heads, config.num_key_value_heads = (4, 2)
        if hasattr(config, "kv_lora_rank"):
            config.num_key_value_heads = 4
        config.hidden_size, config.num_hidden_layers = 32, 3
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[i % 2] for i in range(3)]
        if hasattr(config, "indexer_types"):
            config.mlp_layer_types = ["dense", "sparse", "sparse"]
            config.indexer_types = ["full", "full", "shared"]
    reference = make(folder, config, seed=1)
    shared = [rng.randrange(2, VOCAB) for _ in range(18)]
    prompts = [(*shared[:n], *(rng.randrange(2, VOCAB) for _ in range(k))) for n, k in lengths]
    want = []
    for prompt in prompts:
        tokens = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        want.append(tokens[0, len(prompt) :].tolist())
    return prompts, want


STATES = {"engine.num_blocks": 2400}
"""Room for recurrent states."""


def settings(folder: Path, **keys: Any) -> ClusterConfig:
    values = {
        "model.path": str(folder),
        "engine.block_size": 4,
        "engine.num_blocks": 120,
        "engine.max_batch_tokens": 24,
        "schedule.local_threshold_tokens": 0,
    }
    return load(None, {}, values | keys)


async def answer(
    cluster: LocalCluster, prompt: tuple[int, ...], sampling: SamplingParams = SAMPLING
) -> list[int]:
    frontend = cluster.frontend
    request = Request(
        id=frontend.new_request_id(), prompt=prompt, sampling=sampling, reply_to=frontend.address
    )
    return [token.token async for token in frontend.generate(request)]


async def answers(
    cluster: LocalCluster, prompts: list[tuple[int, ...]], sampling: SamplingParams = SAMPLING
) -> list[list[int]]:
    return list(await asyncio.gather(*(answer(cluster, prompt, sampling) for prompt in prompts)))


MESHES = [
    pytest.param({"prefill.tp": 2, "decode.pp": 2}, id="tp2 to pp2"),
    pytest.param({"prefill.pp": 2, "decode.tp": 2}, id="pp2 to tp2"),
    pytest.param({"prefill.tp": 4}, id="tp4 to tp1"),
    pytest.param({"prefill.pp": 3, "decode.tp": 4}, id="pp3 to tp4"),
    pytest.param({"prefill.tp": 2, "prefill.pp": 2, "decode.pp": 3}, id="tp2 x pp2 to pp3"),
]


EXPERT_MESHES = [
    pytest.param("mixtral", {"prefill.ep": 2, "decode.tp": 2}, id="ep2 to tp2"),
    pytest.param("deepseek_v3", {"prefill.ep": 4, "decode.ep": 2}, id="ep4 to ep2"),
    pytest.param("mixtral", {"prefill.tp": 2, "prefill.ep": 2}, id="tp2 x ep2 to one rank"),
    pytest.param("glm_moe_dsa", {"prefill.tp": 2, "decode.pp": 2}, id="chosen tokens, tp2 to pp2"),
    pytest.param("deepseek_v3", {"prefill.dp": 2, "decode.dp": 2}, id="dp2 to dp2"),
    pytest.param("mixtral", {"prefill.dp": 2, "prefill.ep": 2, "decode.tp": 2}, id="dp2 x ep2 to tp2"),
    pytest.param("deepseek_v2", {"prefill.pp": 2, "decode.tp": 2, "decode.dp": 2}, id="pp2 to tp2 x dp2"),
    pytest.param("qwen3_moe", {"prefill.pp": 2, "prefill.dp": 2, "decode.ep": 2}, id="pp2 x dp2 to ep2"),
    pytest.param(
        "qwen3_next",
        {"prefill.pp": 2, "decode.tp": 2, "decode.ep": 2, **STATES},
        id="recurrent layers, pp2 to tp2 x ep2",
    ),
]


def ranks() -> list[psutil.Process]:
    """The ranks of all instances, in the order in which they were started; those of the prefill instance are the last.

    Process ids do not tell: they begin again when they have run out."""
    found = [*children("engine.ranks.rank_process"), *forked_ranks()]
    return sorted(found, key=lambda rank: rank.create_time())


async def fails(instance: Instance) -> None:
    """Wait until it has failed: long before a collective would give up by itself, also on a busy machine."""
    async with asyncio.timeout(TIMEOUT_S / 2):
        while instance.failure is None:
            await asyncio.sleep(0.01)


@forked
@pytest.mark.parametrize("keys", MESHES)
async def test_tokens_equal_transformers_on_other_meshes_also_when_a_rank_is_killed(
    keys: dict[str, int], tmp_path: Path
) -> None:
    await serve_and_kill(keys, tmp_path, "llama")


@forked
@pytest.mark.parametrize(("family", "keys"), EXPERT_MESHES)
async def test_the_same_with_experts(family: str, keys: dict[str, int], tmp_path: Path) -> None:
    await serve_and_kill(keys, tmp_path, family)


async def serve_and_kill(keys: dict[str, Any], folder: Path, family: str) -> None:
    prompts, want = checkpoint(folder, family)
    async with LocalCluster.running(settings(folder, **keys)) as cluster:
        assert await answers(cluster, prompts) == want
        assert await answers(cluster, prompts) == want, "with prefixes cached"
        for instance in cluster.instances:
            instance.check_integrity()
        victim = ranks()[-1]
        victim.send_signal(signal.SIGKILL)
        failing = asyncio.create_task(fails(cluster.instances[-1]))
        others = [tuple(reversed(prompt)) for prompt in prompts]
        assert await answers(cluster, prompts) == want, "what it held goes on elsewhere"
        await failing
        assert "was killed by SIGKILL" in str(cluster.instances[-1].failure)
        assert f"of {len(ranks_of(keys, 'prefill'))}" in str(cluster.instances[-1].failure)
        assert len(await answers(cluster, others)) == len(others), "the others serve on"
    assert ranks() == []


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("keys", [MESHES[0], MESHES[1]])
async def test_the_same_on_gpus(keys: dict[str, int], tmp_path: Path) -> None:
    await serve_and_kill({**keys, "engine.device": "cuda", "engine.kernels": "torch"}, tmp_path, "llama")


def ranks_of(keys: dict[str, int], role: str) -> range:
    return range(math.prod(keys.get(f"{role}.{axis}", 1) for axis in ("tp", "pp", "dp", "ep")))


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        pytest.param("llama", {"decode.tp": 2}, id="tp2"),
        pytest.param(
            "qwen3_next", {"decode.pp": 2, "engine.speculate": "ngram", **STATES}, id="recurrent layers, pp2"
        ),
    ],
)
async def test_a_killed_rank_of_decode_loses_no_token(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Ranks are started as instances start them."""
    prompts, want = checkpoint(tmp_path, family)
    keys = {"prefill_instances": 0, "decode_instances": 2, **keys}
    async with LocalCluster.running(settings(tmp_path, **keys)) as cluster:
        running = asyncio.create_task(answers(cluster, prompts))
        while not all(instance.num_used_blocks for instance in cluster.instances):
            await asyncio.sleep(0.001)
        ranks()[0].send_signal(signal.SIGKILL)
        await fails(cluster.instances[0])
        assert "rank 0 of 2" in str(cluster.instances[0].failure)
        assert "was killed by SIGKILL" in str(cluster.instances[0].failure)
        assert await running == want
        assert cluster.instances[1].failure is None
        assert await answers(cluster, prompts) == want


async def test_a_spent_budget_ends_reasoning_on_either_side_of_a_hand_over(tmp_path: Path) -> None:
    """With a budget of 0 prefill samples the first forced token, and decode the second."""
    prompts, want = checkpoint(tmp_path)
    async with LocalCluster.running(settings(tmp_path)) as cluster:
        for num_tokens in (0, 1, 4):
            budget = ThinkingBudget(max_tokens=num_tokens, begin=(), end=(VOCAB - 1,), forced=(VOCAB - 1, 7))
            found = await answer(cluster, prompts[0], replace(SAMPLING, thinking=budget))
            assert found[: num_tokens + 2] == [*want[0][:num_tokens], VOCAB - 1, 7]
            assert len(found) == LENGTH


@forked
@pytest.mark.parametrize("keys", [MESHES[0], MESHES[1]])
async def test_prompts_are_scored_and_embedded_on_any_mesh(keys: dict[str, int], tmp_path: Path) -> None:
    prompts, _ = checkpoint(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        every = [torch.log_softmax(reference(torch.tensor([prompt])).logits[0], -1) for prompt in prompts]
        states = [reference.model(torch.tensor([prompt]))[0][0] for prompt in prompts]
    async with LocalCluster.running(settings(tmp_path, **keys)) as cluster:
        for _ in ("nothing cached", "all of it"):
            for prompt, want in zip(prompts, every, strict=True):
                frontend = cluster.frontend
                request = Request(
                    id=frontend.new_request_id(),
                    prompt=prompt,
                    sampling=replace(SAMPLING, num_prompt_logprobs=1),
                    reply_to=frontend.address,
                )
                first, *others = [token async for token in frontend.generate(request)]
                assert not any(token.prompt_scores for token in others)
                following = zip(first.prompt_scores, want[:-1], prompt[1:], strict=True)
                for score, row, token in following:
                    assert score.logprob == pytest.approx(float(row[token]), abs=2e-4)
                    assert score.top[0][0] == int(row.argmax())
        for kind in ("last", "mean"):
            for prompt, state in zip(prompts, states, strict=True):
                frontend = cluster.frontend
                request = Request(
                    id=frontend.new_request_id(),
                    prompt=prompt,
                    sampling=SamplingParams(temperature=0.0, max_tokens=1, pooling=kind),
                    reply_to=frontend.address,
                )
                (token,) = [token async for token in frontend.generate(request)]
                want = state[-1] if kind == "last" else state.mean(0)
                got = torch.frombuffer(bytearray(token.embedding), dtype=torch.float32)
                torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@forked
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        pytest.param("llama", {"decode.tp": 2, "decode.pp": 2}, id="tp2 x pp2"),
        pytest.param("deepseek_v3", {"decode.dp": 2, "decode.pp": 2}, id="dp2 x pp2"),
        pytest.param("qwen3_next", {"decode.tp": 2, **STATES}, id="recurrent layers, tp2"),
        pytest.param("granite_hybrid", {"decode.pp": 2, **STATES}, id="recurrent layers, pp2"),
        pytest.param("granite_hybrid", {"decode.ep": 2, **STATES}, id="recurrent layers, ep2"),
        pytest.param("qwen3_next", {"decode.dp": 2, **STATES}, id="recurrent layers, dp2"),
        pytest.param(
            "nemotron_h", {"decode.ep": 2, **STATES}, id="halves of layers, ep2", marks=pytest.mark.slow
        ),
        pytest.param(
            "kimi_linear",
            {"decode.dp": 2, "decode.tp": 2, **STATES},
            id="states beside latents, dp2 x tp2",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_draft_tokens_change_no_token_on_any_mesh(
    family: str, keys: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, want = checkpoint(tmp_path, family)
    known = know_answers(monkeypatch)
    drafting: dict[str, Any] = {**keys, "prefill_instances": 0, "engine.speculate": "ngram"}
    async with cluster_of_even_steps(settings(tmp_path, **drafting)) as cluster:
        for _ in ("nothing is known of outputs", "all of them are"):
            assert [await answer(cluster, prompt) for prompt in prompts] == want
            known.update(zip(map(tuple, prompts), want, strict=True))
        assert await answers(cluster, prompts) == want
        (instance,) = cluster.instances
        instance.check_integrity()
        async with asyncio.timeout(PATIENCE_S):
            while not (status := await cluster.frontend.status()).instances[0].work.accepted_tokens:
                await asyncio.sleep(0.05)
        assert status.instances[0].work.draft_tokens > 0


@forked
@pytest.mark.parametrize(
    ("source", "keys"),
    [
        pytest.param("mtp", {"decode.tp": 2}, id="mtp, tp2"),
        pytest.param("mtp", {"decode.ep": 2}, id="mtp, ep2"),
        pytest.param("mtp of a hybrid", {"decode.tp": 2, **STATES}, id="mtp of a hybrid, tp2"),
        pytest.param("eagle", {"decode.tp": 2}, id="eagle, tp2"),
    ],
)
async def test_heads_propose_alike_on_all_ranks(source: str, keys: dict[str, int], tmp_path: Path) -> None:
    """A head that is right, so that ranks that proposed otherwise would part."""
    speculate = source.split()[0]
    if speculate == "mtp":
        make_right_mtp(tmp_path, family="qwen3_next" if "hybrid" in source else "deepseek_v3")
    else:
        make_right_eagle(tmp_path / "head", tmp_path, num_heads=2)
        speculate = f"eagle:{tmp_path / 'head'}"
    prompts = [tuple(range(first, first + 20)) for first in (2, 9, 30)]
    sampling = replace(SAMPLING, temperature=0.7, seed=3, max_tokens=40, min_tokens=40)
    found: list[list[list[int]]] = []
    # The EAGLE head knows one token.
    with_drafts = {
        **keys,
        "engine.speculate": speculate,
        "engine.speculate_tokens": 1 if source == "eagle" else 8,
    }
    for drafting in ({}, with_drafts):
        async with cluster_of_even_steps(settings(tmp_path, prefill_instances=0, **drafting)) as cluster:
            found.append([await answer(cluster, prompt, sampling) for prompt in prompts])
            if drafting:
                async with asyncio.timeout(PATIENCE_S):
                    while not (status := await cluster.frontend.status()).instances[0].work.accepted_tokens:
                        await asyncio.sleep(0.05)
                work = status.instances[0].work
                assert work.accepted_tokens > 0.9 * work.draft_tokens
    assert found[0] == found[1]

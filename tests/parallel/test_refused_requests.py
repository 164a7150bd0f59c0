"""A request that no step can compute is refused by the instance itself, which serves on: no check of an ingress is relied on."""

import asyncio
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.errors import RequestError
from core.types import Grammar, Request, SamplingParams, ThinkingBudget

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.turns(3),
    pytest.mark.usefixtures("forked"),
]
VOCAB = 4096
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = (5, 6, 7, 8)
FAR = ThinkingBudget(max_tokens=0, begin=(), end=(3,), forced=(VOCAB,))
ENDLESS = ThinkingBudget(max_tokens=0, begin=(), end=(), forced=(3,))
SMALL: dict[str, Any] = {
    "engine.num_blocks": 200,
    "engine.max_batch_tokens": 64,
    "schedule.local_threshold_tokens": 0,
}
MESHES = [
    pytest.param({"prefill_instances": 0}, id="one rank"),
    pytest.param({"prefill_instances": 0, "decode.tp": 2}, id="tp2"),
    pytest.param({"prefill.pp": 2, "decode.tp": 2}, id="pp2 to tp2"),
]
IMPOSSIBLE: dict[str, Any] = {
    "temperature": [nan, inf, -1.0],
    "top_p": [nan, 0.0, 1.5],
    "top_k": [-1],
    "min_p": [nan, 2.0],
    "repetition_penalty": [nan, 0.0],
    "presence_penalty": [nan],
    "frequency_penalty": [inf],
    "seed": [2**63, 2**70, -(2**63) - 1],
    "logit_bias": [((VOCAB, 1.0),), ((-1, 1.0),), ((5, nan),)],
    "allowed_token_ids": [(5, VOCAB)],
    "bad_words": [((5, VOCAB),), ((),)],
    "stop_token_ids": [(VOCAB,)],
    "masked_until_min": [(VOCAB,)],
    "max_tokens": [0, -1],
    "thinking": [FAR, ENDLESS],
    "grammar": [Grammar(text='start: "a"', think_end=VOCAB)],
}


@pytest.mark.parametrize("mesh", MESHES)
async def test_an_instance_refuses_what_it_cannot_compute_and_serves_on(mesh: dict[str, Any]) -> None:
    prompts = [(), (VOCAB,), (*PROMPT, 2**31), (-1, 5), (5, 2**70)]
    wrong = [replace(GREEDY, **{name: value}) for name, values in IMPOSSIBLE.items() for value in values]
    config = load(None, {}, {"model.path": "embedded", **SMALL, **mesh})
    async with LocalCluster.running(config) as cluster:
        want = await said(cluster, PROMPT, GREEDY)
        for prompt, sampling in [*((one, GREEDY) for one in prompts), *((PROMPT, one) for one in wrong)]:
            running = asyncio.create_task(said(cluster, PROMPT, GREEDY))
            with pytest.raises(RequestError):
                await said(cluster, prompt, sampling)
            assert await running == want
        assert all(instance.failure is None for instance in cluster.instances)


async def said(cluster: LocalCluster, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    frontend = cluster.frontend
    request = Request(
        id=frontend.new_request_id(), prompt=prompt, sampling=sampling, reply_to=frontend.address
    )
    return [token.token async for token in frontend.generate(request)]

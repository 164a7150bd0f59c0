"""Adapters behind the real scheduler, workers and hand-over: each request's tokens are those of PEFT's model with its adapter."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.ingress.model_card import read_model_card
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig
from core.errors import ConfigError, ReplicaLost
from core.types import Request, SamplingParams, TokenOut
from tests.models.checkpoints import FAMILIES, VOCAB, make
from tests.models.continuation import continuation
from tests.models.peft_adapters import LINEAR, make_adapter
from tests.parallel.test_served import settings

pytestmark = [pytest.mark.timeout(400), pytest.mark.turns(3)]
forked = pytest.mark.usefixtures("forked")
LENGTH = 10
SAMPLING = SamplingParams(temperature=0.0, max_tokens=LENGTH, min_tokens=LENGTH, masked_until_min=(1,))


@dataclass(frozen=True, slots=True)
class Served:
    folder: Path
    truths: Mapping[str, Any]
    """By name; that without an adapter has the empty one."""
    prompts: Sequence[tuple[int, ...]]

    def config(self, **keys: Any) -> ClusterConfig:
        paths = {name: str(self.folder / name) for name in self.truths if name}
        own = {
            "model.adapters": paths,
            "engine.num_threads": 1,
        }  # two that share busy cores are many times slower
        return settings(self.folder / "base", **own, **keys)

    def asked(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every prompt with each adapter and with none."""
        return [(name, prompt) for prompt in self.prompts for name in self.truths]

    def check(self, answers: Sequence[Sequence[TokenOut]]) -> None:
        for (name, prompt), out in zip(self.asked(), answers, strict=True):
            said = [token.token for token in out]
            assert said == continuation(self.truths[name], prompt, said, LENGTH, barred=[1]), name


def served(folder: Path, family: str, targets: Sequence[str] = LINEAR) -> Served:
    rng = random.Random(family)
    config = FAMILIES[family](rng, 0)
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    config.hidden_size, config.num_hidden_layers = 32, 3
    reference = make(folder / "base", config, seed=1)
    truths = {
        "": reference,
        "small": make_adapter(folder / "small", reference, 1, rank=2, targets=targets, lora_alpha=4),
        "large": make_adapter(folder / "large", reference, 2, rank=8, targets=targets, use_rslora=True),
    }
    shared = [rng.randrange(2, VOCAB) for _ in range(18)]
    prompts = [(*shared[:n], *(rng.randrange(2, VOCAB) for _ in range(k))) for n, k in ((18, 20), (18, 3))]
    return Served(folder, truths, prompts)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(tmp_path_factory.mktemp("adapters"), "llama")


async def answer(
    cluster: LocalCluster, config: ClusterConfig, name: str, prompt: tuple[int, ...]
) -> list[TokenOut]:
    frontend = cluster.frontend
    request = Request(
        id=frontend.new_request_id(),
        prompt=prompt,
        sampling=SAMPLING,
        reply_to=frontend.address,
        adapter=read_model_card(config).adapters[name].key if name else "",
    )
    return [token async for token in frontend.generate(request)]


async def answers(cluster: LocalCluster, config: ClusterConfig, model: Served) -> list[list[TokenOut]]:
    return await asyncio.gather(*(answer(cluster, config, name, prompt) for name, prompt in model.asked()))


ONE_PROCESS = [
    pytest.param({}, id="prefill to decode"),
    pytest.param({"prefill_instances": 0}, id="one instance"),
    pytest.param({"prefill_instances": 0, "engine.speculate": "ngram"}, id="drafts"),
    pytest.param({"engine.deterministic": True}, id="deterministic"),
    pytest.param({"prefill_instances": 0, "decode_instances": 2, "any_role": True}, id="any role"),
]


@pytest.mark.parametrize("keys", ONE_PROCESS)
async def test_tokens_are_those_of_peft_in_batches_of_all_adapters(
    keys: dict[str, Any], llama: Served
) -> None:
    config = llama.config(**keys)
    async with LocalCluster.running(config) as cluster:
        llama.check(await answers(cluster, config, llama))
        llama.check(await answers(cluster, config, llama))  # with prefixes cached
        for instance in cluster.instances:
            instance.check_integrity()


async def test_prefixes_are_shared_with_the_same_adapter_alone(llama: Served) -> None:
    config, prompt = llama.config(prefill_instances=0), llama.prompts[0]
    async with LocalCluster.running(config) as cluster:

        async def num_cached(name: str) -> int:
            return (await answer(cluster, config, name, prompt))[0].num_cached

        for name in llama.truths:
            assert await num_cached(name) == 0, "another adapter's KV is another model's"
        for name in llama.truths:
            assert await num_cached(name) > 0
        llama.check(await answers(cluster, config, llama))


async def test_tiers_below_the_pool_keep_adapters_apart(llama: Served) -> None:
    keys = {"prefill_instances": 0, "engine.num_blocks": 30, "engine.host_cache_bytes": 1 << 20}
    config = llama.config(**keys)
    async with LocalCluster.running(config) as cluster:
        for _ in range(3):  # the pool has no room for all of them
            found = [await answer(cluster, config, name, prompt) for name, prompt in llama.asked()]
            llama.check(found)


@pytest.mark.slow  # it pauses before it tries again
async def test_an_instance_without_the_adapter_does_not_answer_for_it(llama: Served) -> None:
    """As in a rollout, where the ingress has heard of an adapter that the instance has not, or has other weights of it."""
    plain = settings(llama.folder / "base", prefill_instances=0)
    async with LocalCluster.running(plain) as cluster:
        with pytest.raises(ReplicaLost):
            await answer(cluster, llama.config(), "small", llama.prompts[0])
        assert await answer(cluster, plain, "", llama.prompts[0])


def test_an_adapter_cannot_have_the_models_name(llama: Served) -> None:
    config = settings(llama.folder / "base", **{"model.adapters": {"base": str(llama.folder / "small")}})
    with pytest.raises(ConfigError, match="'base', which is the model's own name"):
        read_model_card(config)


MESHES = [
    pytest.param({"prefill.tp": 2, "decode.pp": 2}, id="tp2 to pp2"),
    pytest.param({"prefill.pp": 2, "decode.tp": 2}, id="pp2 to tp2"),
    pytest.param({"prefill.tp": 4, "engine.lookahead": False}, id="tp4 to tp1"),
]


@pytest.mark.slow
@forked
@pytest.mark.parametrize("keys", MESHES)
async def test_the_same_on_meshes(keys: dict[str, Any], llama: Served) -> None:
    config = llama.config(**keys)
    async with LocalCluster.running(config) as cluster:
        llama.check(await answers(cluster, config, llama))
        llama.check(await answers(cluster, config, llama))


@pytest.mark.slow
@forked
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"prefill.ep": 2, "decode.tp": 2}, id="ep2 to tp2"),
        pytest.param({"prefill.dp": 2, "decode.dp": 2}, id="dp2 to dp2"),
    ],
)
async def test_attention_beside_experts_on_meshes(keys: dict[str, Any], tmp_path: Path) -> None:
    model = served(tmp_path, "mixtral", LINEAR[:4])
    config = model.config(**keys)
    async with LocalCluster.running(config) as cluster:
        model.check(await answers(cluster, config, model))

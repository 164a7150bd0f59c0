"""Requests with adapters that move, lose their instance, come back from lower tiers or are proposed: tokens are those of PEFT."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from cluster.ingress.model_card import read_model_card
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig
from core.reports import InstanceStatus
from core.types import Request
from tests.models.continuation import continuation
from tests.models.eagle_checkpoints import make_right_eagle
from tests.models.peft_adapters import make_adapter
from tests.parallel.test_served_adapters import SAMPLING, Served, answer, answers, served
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.timeout(400)
LENGTH = 60
LONG = replace(SAMPLING, max_tokens=LENGTH, min_tokens=LENGTH)
HOST = {"engine.host_cache_bytes": 1 << 20}
PAIR = {"prefill_instances": 0, "decode_instances": 2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(tmp_path_factory.mktemp("moving"), "llama")


class Streams:
    """Long answers to every prompt, with each adapter and with none."""

    def __init__(self, cluster: LocalCluster, config: ClusterConfig, model: Served) -> None:
        self._cluster, self._model = cluster, model
        self._card, self._begun = read_model_card(config), asyncio.Semaphore(0)
        self.tasks = [asyncio.create_task(self._stream(name, prompt)) for name, prompt in model.asked()]

    async def begun(self) -> None:
        """Wait until each has had some tokens."""
        for _ in self.tasks:
            await self._begun.acquire()

    async def check(self) -> None:
        """Wait for all, and compare with PEFT."""
        for (name, prompt), said in zip(self._model.asked(), await asyncio.gather(*self.tasks), strict=True):
            assert said == continuation(self._model.truths[name], prompt, said, LENGTH, barred=[1]), name

    async def _stream(self, name: str, prompt: tuple[int, ...]) -> list[int]:
        frontend, tokens = self._cluster.frontend, list[int]()
        request = Request(
            id=frontend.new_request_id(),
            prompt=prompt,
            sampling=LONG,
            reply_to=frontend.address,
            adapter=self._card.adapters[name].key if name else "",
        )
        async for token in frontend.generate(request):
            tokens.append(token.token)
            if len(tokens) == 12:
                self._begun.release()
        return tokens


async def reported(cluster: LocalCluster, number: int, so: Callable[[InstanceStatus], bool]) -> None:
    """Wait until the instance has reported that it is so."""
    address = cluster.instances[number].address
    async with asyncio.timeout(PATIENCE_S):
        while not any(
            so(one) for one in (await cluster.frontend.status()).instances if one.address == address
        ):
            await asyncio.sleep(0.02)


async def test_they_leave_a_draining_instance_with_their_kv(llama: Served) -> None:
    config = llama.config(**PAIR)
    async with LocalCluster.running(config) as cluster:
        streams = Streams(cluster, config, llama)
        await streams.begun()
        leaving = cluster.instances[0]
        assert leaving.num_jobs, "nothing moves: the test shows nothing"
        await leaving.drain(30)
        assert not leaving.num_jobs
        await streams.check()
        await reported(cluster, 1, lambda one: one.work.grants > 0)  # or their KV was computed again


@pytest.mark.parametrize("keys", [{}, HOST | {"transfer.kv_replicas": 1}], ids=["alone", "buddies"])
async def test_they_go_on_elsewhere_when_their_instance_is_lost(keys: dict[str, Any], llama: Served) -> None:
    config = llama.config(**PAIR, **keys)
    async with LocalCluster.running(config) as cluster:
        streams = Streams(cluster, config, llama)
        await streams.begun()
        lost = cluster.instances[0]
        assert lost.num_jobs, "nothing is lost: the test shows nothing"
        await lost.close()
        await streams.check()
        if keys:
            await reported(cluster, 1, lambda one: one.tiers.host_hits > 0)  # or its KV was computed again


async def test_a_prefill_instance_that_is_lost_costs_no_token(llama: Served) -> None:
    config = llama.config(prefill_instances=2)
    async with LocalCluster.running(config) as cluster:
        asked = asyncio.gather(*(answer(cluster, config, name, prompt) for name, prompt in llama.asked()))
        while not cluster.instances[1].num_jobs:
            await asyncio.sleep(0.001)
        await cluster.instances[1].close()
        llama.check(await asked)


async def test_a_disk_below_gives_each_adapter_its_own_kv_also_after_a_restart(
    llama: Served, tmp_path: Path
) -> None:
    keys = {"engine.disk_cache_bytes": 1 << 22, "engine.disk_cache_path": str(tmp_path)}
    config = llama.config(prefill_instances=0, **keys)
    async with LocalCluster.running(config) as cluster:
        llama.check(await answers(cluster, config, llama))
    async with LocalCluster.running(config) as cluster:
        llama.check(await answers(cluster, config, llama))
        await reported(cluster, 0, lambda one: one.tiers.disk_hits > 0)  # or the test shows nothing


@pytest.mark.parametrize("source", ["ngram", "draft", "eagle"])
async def test_draft_tokens_are_made_without_adapters_and_checked_with_them(
    source: str, llama: Served, tmp_path: Path
) -> None:
    """How many are made is up to the machine; `tests/engine/execution/drafting/test_draft_model.py` makes them all."""
    model = of_an_eagle(tmp_path, llama.prompts) if source == "eagle" else llama
    where = {"draft": f"draft:{model.folder / 'base'}", "eagle": f"eagle:{tmp_path / 'head'}"}
    config = model.config(prefill_instances=0, **{"engine.speculate": where.get(source, source)})
    async with LocalCluster.running(config) as cluster:
        for _ in range(2):
            await Streams(cluster, config, model).check()


def of_an_eagle(folder: Path, prompts: Sequence[tuple[int, ...]]) -> Served:
    """Return a model for which there is a head, with adapters."""
    make_right_eagle(folder / "head", folder / "base", num_heads=2)
    reference = AutoModelForCausalLM.from_pretrained(folder / "base")
    truths = {"": reference, "small": make_adapter(folder / "small", reference, 1, rank=2)}
    return Served(folder, truths, prompts)

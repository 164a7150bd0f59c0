"""Three models share memory that holds two of them: each answers as it does alone, and no request is lost or waits for ever."""

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import pytest

from cluster.local import LocalCluster
from cluster.local_group import local_groups
from core.config.cluster_config import ClusterConfig, load
from core.errors import ModelAsleep, Overloaded
from core.types import FinishReason, Request, SamplingParams
from tests.cluster.test_local_models import checkpoint
from tests.patience import until

MODELS: dict[str, dict[str, Any]] = {
    "whole": {"path": "embedded"},
    "eights": {"path": "embedded", "model": {"quantization": "int8"}},
    "halves": {"path": "embedded", "model": {"dtype": "bfloat16"}},
}
RESIDENCY = {"mode": "on_demand", "least_awake_s": 0.2}


def configured(*, shared: bool = True, awake_models: int = 2, level: int = 1, **more: Any) -> ClusterConfig:
    """`more`: further rows."""
    rows = {name: dict(row) for name, row in (MODELS | more).items()}
    values: dict[str, Any] = {"models": rows, "prefill_instances": 0, "engine": {"num_blocks": 200}}
    if shared:
        values["residency_groups"] = {"card": {"awake_models": awake_models}}
        values["schedule"] = {"residency": {**RESIDENCY, "group": "card", "level": level}}
    return load(values, {})


Clusters = dict[str, LocalCluster]


@contextlib.asynccontextmanager
async def running(config: ClusterConfig) -> AsyncGenerator[Clusters]:
    async with contextlib.AsyncExitStack() as stack:
        groups = await stack.enter_async_context(local_groups(config))
        found: Clusters = {}
        for row in config.rows:
            group = groups.get(row.schedule.residency.group)
            cluster = LocalCluster.running(
                row, replaces_instances=True, prefix=f"{row.model.name}/", group=group
            )
            found[row.model.name] = await stack.enter_async_context(cluster)
        yield found


async def said(cluster: LocalCluster, first: int = 5, num_tokens: int = 24) -> list[int]:
    request = Request(
        id=cluster.frontend.new_request_id(),
        prompt=tuple(range(first, first + 40)),
        sampling=SamplingParams(temperature=1.0, seed=7, max_tokens=num_tokens),
        reply_to=cluster.frontend.address,
    )
    tokens = [token async for token in cluster.frontend.generate(request)]
    assert tokens[-1].finish is FinishReason.LENGTH
    return [token.token for token in tokens]


async def refusal(cluster: LocalCluster) -> str:
    """Return why a model stays asleep, once it does. Before, a busy machine may find no instance in time."""
    while True:
        try:
            await said(cluster)
        except ModelAsleep as error:
            return str(error)
        except Overloaded:
            continue


def awake(clusters: Clusters) -> list[str]:
    return [name for name, cluster in clusters.items() if cluster.instances]


@contextlib.asynccontextmanager
async def never_more_than(num_models: int, clusters: Clusters) -> AsyncGenerator[set[str]]:
    """Look at each turn of the loop. Yield those that were awake."""
    seen = set[str]()

    async def look() -> None:
        while True:
            assert len(awake(clusters)) <= num_models
            seen.update(awake(clusters))
            await asyncio.sleep(0.001)

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        assert not looking.done(), looking.exception()
        looking.cancel()


async def wanted(names: Iterable[str]) -> dict[str, list[list[int]]]:
    """Return what each model says alone, to two prompts."""
    async with running(configured(shared=False)) as alone:
        return {name: [await said(alone[name], first) for first in (5, 9)] for name in names}


async def test_answers_are_those_of_each_model_alone_and_all_have_their_turn() -> None:
    want = await wanted(MODELS)
    assert want["whole"] != want["halves"], "they differ, so that a mistake would be seen"
    num_files = len(os.listdir("/proc/self/fd"))
    async with running(configured()) as clusters, never_more_than(2, clusters) as seen:
        for _ in range(2):
            for name, answers in want.items():
                assert await said(clusters[name]) == answers[0]
        at_once = [(name, first) for first in (5, 9) for name in MODELS]
        answers = await asyncio.gather(*(said(clusters[name], first) for name, first in at_once))
        assert answers == [want[name][first == 9] for name, first in at_once]
        assert seen == set(MODELS)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_files, "nothing is left behind"


async def test_a_group_starts_with_the_first_models_that_fit() -> None:
    async with running(configured()) as clusters, never_more_than(2, clusters):
        await until(lambda: len(awake(clusters)) == 2)
        assert awake(clusters) == ["whole", "eights"]
        status = await clusters["halves"].frontend.status()
        assert [one.state for one in status.sleepers] == ["asleep"]
        assert (await clusters["halves"].frontend.ready())[0], "a request would wake it"


async def test_a_damaged_model_rests_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.instance.kept_instances.MAX_FAILURES", 2)
    folder = checkpoint(tmp_path / "llama", "llama")
    whole = (file := folder / "model.safetensors").read_bytes()
    config = configured(awake_models=1, level=2, damaged={"path": str(folder)})
    want = await wanted(["whole", "eights"])
    async with running(config) as clusters, never_more_than(1, clusters):
        assert len(await said(clusters["damaged"])) == 24
        file.unlink()  # the one that is mapped stays as it is
        file.write_bytes(b"nothing")
        assert await said(clusters["whole"]) == want["whole"][0]
        asked = asyncio.create_task(refusal(clusters["damaged"]))
        for name in ("whole", "eights", "whole"):
            assert await said(clusters[name]) == want[name][0]
        assert "has failed 2 times in a row" in await asked
        with pytest.raises(ModelAsleep, match="has failed 2 times in a row"):
            await said(clusters["damaged"])
        file.write_bytes(whole)
        await clusters["damaged"].frontend.model_sleep.wake()
        assert len(await said(clusters["damaged"])) == 24
        assert await said(clusters["eights"]) == want["eights"][0]


async def test_a_model_under_load_makes_way_and_its_streams_go_on() -> None:
    async with running(configured()) as clusters, never_more_than(2, clusters):
        want = [await said(clusters[name], num_tokens=400) for name in ("whole", "eights")]
        streams = [
            asyncio.create_task(said(clusters[name], num_tokens=400))
            for name in ("whole", "eights", "whole", "eights")
        ]
        await until(lambda: all(clusters[name].instances[0].num_used_blocks for name in ("whole", "eights")))
        await said(clusters["halves"])
        assert await asyncio.gather(*streams) == want * 2

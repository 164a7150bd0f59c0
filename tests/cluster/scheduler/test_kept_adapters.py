"""Which adapters are loaded outlives the cluster where a store keeps it: each test starts schedulers anew, and knows nobody else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from cluster.scheduler.adapter_registry import SETTLE_S, AdapterRegistry
from cluster.scheduler.kept_adapters import KeptAdapters
from cluster.store.sql_store import DOWN_S, SqlStore
from core.adapter_messages import (
    EMPTY_LIST,
    AdapterChanged,
    AdapterList,
    AdaptersHeld,
    AdaptersUsed,
    ListedAdapter,
    ListVersion,
    LoadAdapter,
    UnloadAdapter,
)
from core.config.cluster_config import ScheduleConfig
from tests.cluster.scheduler.test_scheduler_node import Net, Peer
from tests.patience import PATIENCE_S

NOBODY_ELSE = ()


class Cluster:
    """A scheduler, an instance that has whatever is listed, and who asks."""

    def __init__(self, net: Net) -> None:
        self.instance, self.asker = Peer(net, "decode"), Peer(net, "ingress")

    async def load(self, key: str, *, in_place: bool = False) -> AdapterChanged:
        self.instance.tell(AdaptersHeld(EMPTY_LIST.version))
        self.asker.tell(LoadAdapter(1, key, f"/adapters/{key}", in_place))
        return await self._answer()

    async def unload(self, name: str) -> AdapterChanged:
        self.asker.tell(UnloadAdapter(1, name))
        return await self._answer()

    async def _answer(self) -> AdapterChanged:
        """Follow the list, as an instance does, until the answer is there."""
        following = asyncio.create_task(self._follow())
        try:
            answer = await self.asker.hears()
        finally:
            following.cancel()
        assert isinstance(answer, AdapterChanged)
        return answer

    async def _follow(self) -> None:
        while True:
            listed = await self.instance.hears()
            assert isinstance(listed, AdapterList)
            self.instance.tell(AdaptersHeld(listed.version))


@asynccontextmanager
async def cluster(folder: Path, list_file: Path | str = "", model: str = "m") -> AsyncIterator[Cluster]:
    """A cluster whose store is in a folder."""
    store = SqlStore(lambda: f"sqlite:///{folder / 'store.db'}", PATIENCE_S)
    kept = await KeptAdapters.read(store, model, str(list_file))
    async with Net(ScheduleConfig(), kept).running() as net:
        yield Cluster(net)
    store.close()


async def listed_after_a_restart(
    folder: Path, list_file: Path | str = "", model: str = "m"
) -> dict[str, str]:
    """By key, the folders of what the first instance of a new cluster is told to load."""
    async with cluster(folder, list_file, model) as anew:
        anew.instance.tell(AdaptersHeld(EMPTY_LIST.version))
        listed = await anew.instance.hears()
        assert isinstance(listed, AdapterList)
        return {each.key: each.folder for each in listed.adapters}


async def test_what_is_loaded_is_loaded_again_after_a_restart_of_everything(tmp_path: Path) -> None:
    async with cluster(tmp_path) as first:
        assert await first.load("sql@1") == AdapterChanged(1)
        assert await first.load("poet@1") == AdapterChanged(1)
    for _ in range(2):
        assert await listed_after_a_restart(tmp_path) == {
            "sql@1": "/adapters/sql@1",
            "poet@1": "/adapters/poet@1",
        }


async def test_what_was_unloaded_is_not(tmp_path: Path) -> None:
    async with cluster(tmp_path) as first:
        assert await first.load("sql@1") == AdapterChanged(1)
        assert await first.load("poet@1") == AdapterChanged(1)
        assert await first.unload("sql") == AdapterChanged(1)
    assert await listed_after_a_restart(tmp_path) == {"poet@1": "/adapters/poet@1"}


async def test_clusters_of_other_models_that_share_the_store_have_lists_of_their_own(tmp_path: Path) -> None:
    async with cluster(tmp_path) as first:
        await first.load("sql@1")
    async with cluster(tmp_path, model="other") as other:
        await other.load("poet@1")
    assert await listed_after_a_restart(tmp_path) == {"sql@1": "/adapters/sql@1"}


async def test_who_asks_is_told_that_the_list_cannot_be_stored_and_may_ask_again(tmp_path: Path) -> None:
    folder = tmp_path / "not a folder"
    folder.write_text("")
    async with cluster(folder) as first:
        answer = await first.load("sql@1")
        assert (answer.status, "the list of adapters could not be stored" in answer.why) == (500, True)
        folder.unlink()
        await asyncio.sleep(DOWN_S)
        assert await first.load("sql@1", in_place=True) == AdapterChanged(1)
    assert await listed_after_a_restart(folder) == {"sql@1": "/adapters/sql@1"}


async def test_an_earlier_releases_file_is_read_until_the_store_has_a_list(tmp_path: Path) -> None:
    file = tmp_path / "loaded.json"
    earlier = AdapterList(ListVersion(3, "s1"), (ListedAdapter("sql@1", "/adapters/sql@1", "serving"),))
    file.write_bytes(TypeAdapter(AdapterList).dump_json(earlier))
    assert await listed_after_a_restart(tmp_path, file) == {"sql@1": "/adapters/sql@1"}
    async with cluster(tmp_path, file) as first:
        assert await first.load("poet@1") == AdapterChanged(1)
    file.write_bytes(TypeAdapter(AdapterList).dump_json(replace(earlier, adapters=())))
    assert (await listed_after_a_restart(tmp_path, file)).keys() == {"sql@1", "poet@1"}


async def test_a_file_that_cannot_be_read_is_said_and_keeps_nobody_from_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "adapters.json"
    file.write_text('{"version": 3, "adap')
    async with cluster(tmp_path, file) as first:
        assert "has no list of adapters that can be read" in caplog.text
        assert await first.load("sql@1") == AdapterChanged(1)
    assert await listed_after_a_restart(tmp_path, file) == {"sql@1": "/adapters/sql@1"}


def test_what_was_on_its_way_when_everything_ended_is_not_loaded_again() -> None:
    states = {"sql@1": "serving", "poet@1": "loading", "old@1": "retiring"}
    kept = [ListedAdapter(key, "/x", state) for key, state in states.items()]  # type: ignore[arg-type]
    registry = AdapterRegistry("s2")
    registry.restore(AdapterList(ListVersion(7, "s1"), tuple(kept)), now=100.0)
    registry.on("in1", AdaptersUsed(ListVersion(7, "s1")), NOBODY_ELSE, 100.0)
    assert {each.key for each in registry.listed.adapters} == {"sql@1", "old@1"}
    registry.on("in1", AdaptersUsed(registry.listed.version), NOBODY_ELSE, 100.0)
    registry.tick(100.0 + SETTLE_S)
    assert {each.key for each in registry.listed.adapters} == {"sql@1"}

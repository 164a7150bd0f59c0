"""How an instance follows the list of adapters: what its ranks are asked to hold, and what it says of that."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.instance.instance_adapters import InstanceAdapters
from core.adapter_messages import AdapterList, AdaptersHeld, ListedAdapter, ListVersion
from core.clock import WallClock
from core.config.adapter_config import AdapterConfig, HoldAdapters
from tests.patience import until

CONFIG = AdapterConfig(folders=("/adapters",), slots=2, max_rank=8)


class Ranks:
    def __init__(self, config: AdapterConfig = CONFIG) -> None:
        self.asked: list[HoldAdapters] = []
        self.refuse: dict[str, str] = {}
        self.in_use = set[str]()
        self.said: list[AdaptersHeld] = []
        self.adapters = InstanceAdapters(
            config,
            frozenset({"fixed@0"}),
            hold=self._hold,
            in_use=lambda: self.in_use,
            tell=self.said.append,
            clock=WallClock(),
        )

    async def _hold(self, asked: HoldAdapters) -> dict[str, str]:
        self.asked.append(asked)
        keys = {place.key for place in asked.adapters}
        return {key: why for key, why in self.refuse.items() if key in keys}

    def held(self) -> list[str]:
        """What the ranks have now."""
        return [place.key for place in self.asked[-1].adapters]

    def hear(self, number: int, *keys: str) -> None:
        adapters = tuple(ListedAdapter(key, f"/adapters/{key}", "serving") for key in keys)
        self.adapters.hear(AdapterList(ListVersion(number, "s"), adapters))

    async def says(self, number: int, *failed: tuple[str, str]) -> None:
        wanted = AdaptersHeld(ListVersion(number, "s"), failed)
        await until(lambda: bool(self.said) and self.said[-1].version == wanted.version)
        assert self.said[-1] == wanted


@pytest.fixture
async def ranks() -> AsyncIterator[Ranks]:
    ranks = Ranks()
    running = asyncio.create_task(ranks.adapters.run())
    yield ranks
    running.cancel()


async def test_its_ranks_have_what_is_listed(ranks: Ranks) -> None:
    assert "fixed@0" in ranks.adapters
    assert "a@1" not in ranks.adapters
    ranks.hear(1, "a@1", "b@1")
    await ranks.says(1)
    assert ranks.held() == ["a@1", "b@1"]
    assert ranks.asked[-1].folders == ("/adapters",)
    assert ranks.asked[-1].max_rank == 8
    assert "a@1" in ranks.adapters
    ranks.hear(1)
    ranks.hear(2, "b@1")
    await ranks.says(2)
    assert ranks.held() == ["b@1"]
    assert "a@1" not in ranks.adapters
    assert "fixed@0" in ranks.adapters


async def test_what_one_rank_refuses_none_keeps(ranks: Ranks) -> None:
    ranks.refuse = {"b@1": "rank 1: no such folder"}
    ranks.hear(1, "a@1", "b@1")
    await ranks.says(1, ("b@1", "rank 1: no such folder"))
    assert ranks.held() == ["a@1"]
    assert "b@1" not in ranks.adapters
    ranks.refuse = {}
    ranks.hear(2, "a@1", "b@1")
    await ranks.says(2)
    assert "b@1" in ranks.adapters


async def test_what_has_no_slot_is_refused_and_the_others_stay(ranks: Ranks) -> None:
    ranks.hear(1, "b@1", "c@1")
    await ranks.says(1)
    ranks.hear(2, "a@1", "b@1", "c@1")
    await ranks.says(2, ("a@1", "all of its 2 slots are taken (adapters.slots)"))
    assert ranks.held() == ["b@1", "c@1"]
    ranks.hear(3, "a@1", "c@1")
    await ranks.says(3)
    assert ranks.held() == ["a@1", "c@1"]


async def test_nothing_is_given_up_that_a_sequence_here_has(ranks: Ranks) -> None:
    ranks.hear(1, "a@1")
    await ranks.says(1)
    ranks.in_use = {"a@1", ""}
    ranks.hear(2)
    await until(lambda: "a@1" not in ranks.adapters)  # no new request comes
    await asyncio.sleep(0)
    assert ranks.held() == ["a@1"]
    ranks.in_use = {""}
    await ranks.says(2)
    assert ranks.held() == []


async def test_a_scheduler_is_told_nothing_where_nothing_can_be_loaded(ranks: Ranks) -> None:
    assert Ranks(AdapterConfig()).adapters.introduction() == ()
    ranks.hear(1, "a@1")
    await ranks.says(1)
    assert [word.version for word in ranks.adapters.introduction()] == [ListVersion(1, "s")] * 2

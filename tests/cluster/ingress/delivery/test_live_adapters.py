"""What an ingress says of adapters, and what it does with the list that it is told: against a scripted scheduler."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cluster.ingress.delivery.frontend import Frontend
from core.adapter_messages import (
    EMPTY_LIST,
    AdapterChanged,
    AdapterList,
    AdaptersUsed,
    ListedAdapter,
    ListVersion,
    LoadAdapter,
)
from core.clock import WallClock
from core.config.cluster_config import ScheduleConfig
from core.errors import ReplicaLost, RequestError
from core.messages import Message, Submit
from tests.cluster.ingress.delivery.test_frontend import TIMEOUT_S, Peer, World
from tests.patience import until


class Adapted(World):
    """A frontend that hears of adapters, and a decode instance that answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.runner.cancel()
        self.frontend = Frontend(
            self.network.join("frontend2"),
            WallClock(),
            ScheduleConfig(),
            4,
            resolve_schedulers=self._resolve,
            request_timeout_s=TIMEOUT_S,
            loads_adapters=True,
        )
        self.runner = asyncio.create_task(self.frontend.run())
        self.go_on = asyncio.Event()
        self.asked: list[str] = []
        """The adapters of what has come to the instance."""
        self.tasks: list[asyncio.Task[None]] = []
        self.decode(self._act)
        self.version = 0

    def _act(self, peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            self.asked.append(message.request.adapter)
            self.tasks.append(asyncio.create_task(self._answer(peer, sender, message)))

    async def _answer(self, peer: Peer, sender: str, message: Submit) -> None:
        await self.go_on.wait()
        peer.tokens(sender, message.request, list(range(message.request.sampling.max_tokens)))

    async def tell(self, **states: str) -> ListVersion:
        """Tell a list, by key with _ for @, and wait until the frontend says that it goes by it."""
        self.version += 1
        version = ListVersion(self.version, "s")
        adapters = tuple(
            ListedAdapter(key.replace("_", "@"), "/x", state)  # type: ignore[arg-type]
            for key, state in states.items()
        )
        self.scheduler.mail.send(self.frontend.address, AdapterList(version, adapters))
        await until(lambda: self.said().version == version)
        return version

    def said(self) -> AdaptersUsed:
        used = [message for message in self.scheduler.got if isinstance(message, AdaptersUsed)]
        return used[-1] if used else AdaptersUsed(ListVersion(-1))


@pytest.fixture
async def world() -> AsyncIterator[Adapted]:
    world = Adapted()
    await until(lambda: world.said().version == EMPTY_LIST.version)
    yield world
    world.runner.cancel()
    await world.frontend.close()


def adapted(world: Adapted, key: str) -> asyncio.Task[list[int]]:
    return asyncio.create_task(world.run(replace(world.request(), adapter=key)))


async def test_it_is_not_ready_before_it_knows_the_list(world: Adapted) -> None:
    assert await world.frontend.ready() == (False, "the list of adapters is not known yet")
    await world.tell()
    assert await world.frontend.ready() == (True, "")


async def test_requests_may_name_what_serves_and_nothing_else(world: Adapted) -> None:
    await world.tell(sql_1="serving", poet_1="loading", old_1="retiring")
    served = world.frontend.adapters.served
    assert {name: adapter.key for name, adapter in served.items()} == {"sql": "sql@1"}
    await world.tell(sql_2="serving", sql_1="retiring", poet_1="serving")
    assert {name: adapter.key for name, adapter in served.items()} == {"sql": "sql@2", "poet": "poet@1"}
    world.scheduler.mail.send(world.frontend.address, AdapterList(ListVersion(1, "s"), ()))
    await world.tell(sql_2="serving")
    assert list(served) == ["sql"]


async def test_what_retires_is_in_use_until_its_last_request_is_over(world: Adapted) -> None:
    await world.tell(sql_1="serving")
    running = adapted(world, "sql@1")
    await until(lambda: world.asked == ["sql@1"])
    version = await world.tell(sql_1="retiring")
    assert world.said() == AdaptersUsed(version, ("sql@1",))
    world.go_on.set()
    await running
    await until(lambda: world.said() == AdaptersUsed(version, ()))


async def test_adapters_are_in_use_while_requests_have_them(world: Adapted) -> None:
    adapters = world.frontend.adapters
    await world.tell(sql_1="serving", poet_1="serving")
    running = [adapted(world, key) for key in ("sql@1", "poet@1", "sql@1", "")]
    await until(lambda: len(world.asked) == 4)
    await world.tell(sql_1="retiring", sql_2="serving", poet_1="serving")
    running.append(adapted(world, "sql@2"))
    await until(lambda: len(world.asked) == 5)
    assert adapters.in_use == ("poet", "sql")
    world.go_on.set()
    await asyncio.gather(*running)
    assert adapters.in_use == ()


async def test_a_request_that_was_read_before_gets_the_later_revision_or_none(world: Adapted) -> None:
    world.go_on.set()
    await world.tell(sql_1="serving", poet_1="serving", fixed_0="serving")
    await world.tell(sql_1="retiring", sql_2="serving", poet_1="retiring", fixed_0="serving")
    for key in ("sql@1", "fixed@0", "of the configuration@7", ""):
        await adapted(world, key)
    assert world.asked == ["sql@2", "fixed@0", "of the configuration@7", ""]
    with pytest.raises(RequestError, match="was unloaded") as refused:
        await adapted(world, "poet@1")
    assert refused.value.status == 404


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (AdapterChanged(0, "instance i: no", 400), RequestError, "instance i: no"),
        (AdapterChanged(0, "another scheduler leads", 503), ReplicaLost, "another scheduler leads"),
    ],
)
async def test_a_refusal_is_the_schedulers(
    answer: AdapterChanged, error: type[Exception], said: str, world: Adapted
) -> None:
    loading = asyncio.create_task(world.frontend.adapters.load("sql@1", "/x", in_place=True))
    await until(lambda: isinstance(world.scheduler.got[-1], LoadAdapter))
    asked = world.scheduler.got[-1]
    assert isinstance(asked, LoadAdapter)
    assert (asked.key, asked.folder, asked.in_place) == ("sql@1", "/x", True)
    world.scheduler.mail.send(world.frontend.address, replace(answer, nonce=asked.nonce))
    with pytest.raises(error, match=said):
        await loading


async def test_a_scheduler_that_is_lost_is_not_waited_for(world: Adapted) -> None:
    unloading = asyncio.create_task(world.frontend.adapters.unload("sql"))
    await until(lambda: not isinstance(world.scheduler.got[-1], AdaptersUsed))
    await world.scheduler.mail.close()
    with pytest.raises(ReplicaLost, match="was lost before it answered"):
        await unloading

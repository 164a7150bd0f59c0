"""An instance of one process whose engine fails is replaced, until it fails too often."""

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cluster.instance.instance import Instance
from cluster.instance.instance_parts import InstanceParts
from cluster.instance.kept_instances import MAX_FAILURES, STEADY_S, KeptInstances
from cluster.instance.real_parts import local_parts
from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.errors import ConfigError, ReplicaLost
from core.types import Request, SamplingParams
from kvtransfer.transport.loopback_transport import LoopbackFabric
from models.files.hub import resolve
from net.loopback_mail import LoopbackNetwork
from sim.virtual_loop import LoopClock, run_virtual
from tests.cluster.instance.instance_world import Breakable
from tests.patience import PATIENCE_S, until


class Fake:
    def __init__(self, address: str, lives_s: float | None) -> None:
        self.address, self._lives_s = address, lives_s
        self.is_closed = False
        self.fails_to_close = False

    async def failed(self) -> BaseException:
        await asyncio.sleep(1e9 if self._lives_s is None else self._lives_s)
        return RuntimeError(f"the device of {self.address} is broken")

    async def close(self) -> None:
        self.is_closed = True
        if self.fails_to_close:
            raise RuntimeError("the handler is closed")


class World:
    """Instances that live for so many seconds each (None: for ever), or cannot be made."""

    def __init__(self, *lives: float | Exception | None, rests: bool = False) -> None:
        self._lives = list(lives)
        self.made: list[tuple[float, Fake]] = []
        self.troubles: list[str] = []
        self.resting: list[tuple[Fake, str]] = []
        rest = self._make_resting if rests else None
        self.kept = KeptInstances(self._make, LoopClock(), self.troubles.append, replaces=True, rest=rest)

    async def _make_resting(self, role: Any, why: str) -> Fake:
        self.resting.append((await self._make(role), why))
        return self.resting[-1][0]

    async def _make(self, role: Any) -> Fake:
        assert all(fake.is_closed for _, fake in self.made), "two of them have memory at once"
        lives_s = self._lives.pop(0)
        if isinstance(lives_s, Exception):
            raise lives_s
        fake = Fake(f"{role}-{len(self.made)}", lives_s)
        self.made.append((asyncio.get_running_loop().time(), fake))
        return fake


def after(seconds: float, *lives: float | Exception | None, rests: bool = False) -> World:
    async def main() -> World:
        world = World(*lives, rests=rests)
        await world.kept.start("both")
        await asyncio.sleep(seconds)
        return world

    return run_virtual(main())


@pytest.fixture
def _no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection takes long in a process of tests."""
    monkeypatch.setattr("cluster.instance.kept_instances.collect", lambda: 0)


without_garbage = pytest.mark.usefixtures("_no_garbage")


@without_garbage
def test_another_instance_takes_the_place_of_one_that_has_failed() -> None:
    world = after(100, 10.0, None)
    assert [fake.address for fake in world.kept.running] == ["both-1"]
    assert [at for at, _ in world.made] == [0.0, 10.5]
    assert "both-0 is broken" in world.troubles[0]
    assert world.troubles[-1] == ""
    assert not world.kept.given_up


@without_garbage
def test_pauses_grow_and_a_failure_loop_ends_with_its_reason() -> None:
    world = after(3600, *[0.0] * MAX_FAILURES)
    times = [at for at, _ in world.made]
    assert [late - soon for soon, late in pairwise(times)] == [0.5, 1, 2, 4, 8, 16, 30]
    assert not any(fake is not world.made[-1][1] for fake in world.kept.running)
    assert f"failed {MAX_FAILURES} times in a row: RuntimeError: the device of both-7" in world.kept.given_up
    assert world.troubles[-1] == world.kept.given_up


@without_garbage
def test_where_others_need_its_place_one_that_keeps_failing_rests_and_fails_again_only_when_woken() -> None:
    world = after(3600, *[0.0] * MAX_FAILURES, 3000.0, None, rests=True)
    times = [at for at, _ in world.made]
    assert [late - soon for soon, late in pairwise(times)] == [0.5] * MAX_FAILURES + [3000.5]
    [(resting, why)] = world.resting
    assert resting.address == "both-8"
    assert why.startswith(f"the both instance has failed {MAX_FAILURES} times in a row: RuntimeError")
    assert not world.kept.given_up
    assert [fake.address for fake in world.kept.running] == ["both-9"], "an operator woke it, and it was new"


@without_garbage
def test_one_that_cannot_be_started_counts_as_a_failure() -> None:
    world = after(100, 1.0, ConfigError("the weights are gone"), None)
    assert len(world.made) == 2
    assert "the weights are gone" in world.troubles[2]
    assert (
        "the weights are gone" in after(3600, 1.0, *[ConfigError("the weights are gone")] * 9).kept.given_up
    )


@without_garbage
def test_one_that_cannot_be_closed_is_replaced_all_the_same() -> None:
    async def main() -> World:
        world = World(10.0, None)
        await world.kept.start("both")
        world.made[0][1].fails_to_close = True
        await asyncio.sleep(100)
        return world

    assert [fake.address for fake in run_virtual(main()).kept.running] == ["both-1"]


@without_garbage
def test_failures_far_apart_are_no_loop() -> None:
    world = after(1e5, *[STEADY_S] * (2 * MAX_FAILURES), None)
    assert len(world.made) == 2 * MAX_FAILURES + 1
    assert not world.kept.given_up


class Breaking:
    """A cluster of one instance in this process, whose next engines fail as the test says."""

    def __init__(self) -> None:
        self.config = load(
            None, {}, {"model.path": "embedded", "prefill_instances": 0, "engine.num_blocks": 200}
        )
        self._fabric = LoopbackFabric()
        self.groups: list[Breakable] = []
        self.is_broken = False
        self.may_load = threading.Event()
        self.may_load.set()
        self.old: Callable[[], Instance | None] = lambda: None
        """The instance that must be gone before another one is made."""

    def running(self) -> Any:
        return LocalCluster.assembled(
            self.config, LoopbackNetwork().join, self._parts, replaces_instances=True
        )

    def _parts(self, role: Any, mail: Any) -> InstanceParts:
        if self.is_broken:
            raise ConfigError("the disk is gone")
        assert self.may_load.wait(PATIENCE_S)
        assert self.old() is None, "its weights and its pool take memory still"
        parts = local_parts(self.config, resolve("embedded"), role, mail, self._fabric)

        def make_group(sink: Any) -> Any:
            assert self.may_load.wait(PATIENCE_S)
            self.groups.append(Breakable(parts.make_group(sink)))
            return self.groups[-1]

        return replace(parts, make_group=make_group)


async def said(cluster: LocalCluster) -> list[int]:
    request = Request(
        id=cluster.frontend.new_request_id(),
        prompt=(5, 6, 7),
        sampling=SamplingParams(temperature=0.0, max_tokens=5),
        reply_to=cluster.frontend.address,
    )
    return [token.token async for token in cluster.frontend.generate(request)]


@pytest.mark.slow
async def test_a_process_that_lost_its_only_instance_is_not_ready_until_another_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # pytest keeps what is logged, and with an error the frames that it came through.
    monkeypatch.setattr(logging.getLogger("cluster.instance.instance"), "disabled", True)
    world = Breaking()
    async with world.running() as cluster:
        want = await said(cluster)
        world.old = old = weakref.ref(cluster.instances[0])
        world.may_load.clear()  # a loaded machine may look again only after the pause
        world.groups.pop().error = RuntimeError("CUDA error: an illegal memory access was encountered")
        running = asyncio.create_task(said(cluster))
        await until(lambda: old() is None or old().failure is not None)
        why_not = "no decode instance is alive"
        while why_not == "no decode instance is alive":  # at once, and soon with the cause
            ready, why_not = await cluster.frontend.ready()
            assert not ready
        assert why_not.startswith(
            "no decode instance is alive: the decode instance has failed (RuntimeError: CUDA"
        )
        world.may_load.set()
        assert await running == want
        assert await cluster.frontend.ready() == (True, "")
        assert old() is None


@without_garbage
@pytest.mark.slow
async def test_a_process_answers_while_another_instance_loads_its_model() -> None:
    world = Breaking()
    async with world.running() as cluster:
        want = await said(cluster)
        world.may_load.clear()
        world.groups[0].error = RuntimeError("the device is gone")
        running = asyncio.create_task(said(cluster))
        await until(lambda: not cluster.instances)
        assert not (await cluster.frontend.ready())[0]
        world.may_load.set()
        assert await running == want


@without_garbage
@pytest.mark.slow
async def test_a_process_whose_instances_all_fail_says_so_and_stays_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.instance.kept_instances.FIRST_PAUSE_S", 0.01)
    world = Breaking()
    async with world.running() as cluster:
        world.is_broken, world.groups[0].error = True, RuntimeError("the device is gone")
        running = asyncio.create_task(said(cluster))
        await until(lambda: not cluster.instances)
        with pytest.raises(
            ReplicaLost, match="no decode instance is alive: the decode instance has failed 8 "
        ):
            await cluster.serving()
        running.cancel()
        ready, why_not = await cluster.frontend.ready()
        assert not ready
        assert "the disk is gone" in why_not
        assert why_not.endswith("restart this process")

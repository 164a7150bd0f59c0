"""Pools follow the load that the scheduler sees: sizes are set where they differ, once, and with a reason."""

import asyncio

import pytest

from cluster.scheduler.fleet.context_forecast import even
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.fleet.reservation import PlacementReservation
from cluster.scheduler.scaling.autoscaler import Autoscaler
from cluster.scheduler.scaling.pool_loads import UseMeter
from cluster.scheduler.scaling.pool_watch import PERIOD_S, PoolWatch
from cluster.scheduler.scaling.scaler import PoolName
from core.config.cluster_config import ScalingConfig, load
from core.cost.steps import StepModel, StepModels
from core.errors import ConfigError
from core.reports import PoolStatus, WorkCounts
from core.scheduler_tuning import DEFAULT_TUNING as TUNING
from tests.cluster.scheduler.routing_world import instance, report


class World:
    """The scheduler's facts, Serve's sizes and the clock, all in the test's hand."""

    def __init__(self, *members: Member) -> None:
        self.members = members
        self.leads = True
        self.queued_tokens = 0
        self.sizes: dict[PoolName, int] = {"decode": len(members)}
        self.set_to: list[tuple[PoolName, int]] = []
        self.said: tuple[PoolStatus, ...] = ()
        self.broken = False
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep(self, delay_s: float) -> None:
        self._now += delay_s
        await asyncio.sleep(0)

    async def get(self) -> dict[PoolName, int]:
        if self.broken:
            raise ConnectionError("the controller restarts")
        return dict(self.sizes)

    async def set(self, pool: PoolName, num_instances: int) -> None:
        self.sizes[pool] = num_instances
        self.set_to.append((pool, num_instances))

    def told(self, pools: tuple[PoolStatus, ...]) -> None:
        self.said = pools

    async def pass_s(self, seconds: float, task: "asyncio.Task[None]") -> None:
        ends_at = self._now + seconds
        while self._now < ends_at:
            assert not task.done()
            await asyncio.sleep(0)


def started(world: World, **changes: object) -> "asyncio.Task[None]":
    config = ScalingConfig(enabled=True, interval_s=5, calm_s=60, cold_start_s=30, decode_max=4, **changes)  # type: ignore[arg-type]
    return asyncio.create_task(Autoscaler(config, world, world, world, world.told).run())


def busy(address: str, num_running: int) -> Member:
    """An instance with 16 slots."""
    member = Member(instance(address))
    member.report(report(address, num_running=num_running), 0.0)
    return member


async def test_a_full_pool_grows_and_a_calm_one_shrinks_after_a_while() -> None:
    world = World(busy("d0", 16))
    task = started(world)
    await world.pass_s(6, task)
    assert world.set_to == [("decode", 2)]
    await world.pass_s(50, task)
    assert world.set_to == [("decode", 2)], "while it starts nothing more is asked for"
    world.members = (busy("d0", 2), busy("d1", 2))
    await world.pass_s(200, task)
    assert world.set_to == [("decode", 2), ("decode", 1)]
    (status,) = world.said
    assert (status.wanted, status.num_grown, status.num_shrunk) == (1, 1, 1)
    assert "load is" in status.reason
    assert 30 < status.cold_start_s < 60, "the new one took about 55 s"
    task.cancel()


async def test_what_waits_in_the_queue_is_load_and_what_leaves_is_no_instance() -> None:
    leaving = busy("d1", 0)
    leaving.leave()
    world = World(busy("d0", 0), leaving)
    world.sizes["decode"] = 1
    world.queued_tokens = int(2 * 4000 * TUNING.scaling_wait_s)
    task = started(world)
    await world.pass_s(6, task)
    assert world.set_to == [("decode", 3)]
    task.cancel()


async def test_limits_hold_and_trouble_passes() -> None:
    world = World(busy("d0", 16), busy("d1", 16), busy("d2", 16))
    world.queued_tokens, world.broken = 10_000_000, True
    task = started(world)
    await world.pass_s(30, task)
    assert world.set_to == []
    world.broken = False
    await world.pass_s(6, task)
    assert world.set_to == [("decode", 4)]
    task.cancel()


def test_prompts_count_by_time_and_decoding_by_the_target() -> None:
    meter, prefill, decode = UseMeter(), Member(instance("p", "p")), Member(instance("d"))
    targets: dict[PoolName, int] = {"prefill": 2, "decode": 1}
    steps = StepModels(StepModel(fixed_s=0.01, seq_s=0.01, num_steps=99))
    meter.loads([prefill, decode], 0, targets, 10.0)
    prefill.report(report("p", work=WorkCounts(computed_tokens=10_000)), 0.0)
    decode.report(report("d", steps=steps), 0.0)
    for number in range(4):
        decode.reserve(
            f"r{number}", PlacementReservation(10.0, 1, 1, 0, hashes=(), contexts=even(100.0), tpot_s=0.0625)
        )
    prompts, decoding = meter.loads([prefill, decode], 0, targets, 15.0)
    assert prompts.instances[0].use == pytest.approx(10_000 / 4000 / 5)
    assert prompts.num_starting == 1
    assert decoding.instances[0].use == pytest.approx(0.05 / (0.8 * 0.0625))


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode_instances is 5, outside"):
        load({"decode_instances": 5}, {}, {"scaling.enabled": True, "scaling.decode_max": 4})
    with pytest.raises(ConfigError, match="shrink_below must be less"):
        load({}, {}, {"scaling.enabled": True, "scaling.shrink_below": 0.9})


async def test_sizes_are_told_where_nobody_changes_them() -> None:
    world = World(busy("d0", 16))
    world.sizes = {"prefill": 1, "decode": 4}
    task = asyncio.create_task(PoolWatch(world, world, world, world.told).run())
    await world.pass_s(PERIOD_S + 1, task)
    assert {pool.pool: pool.wanted for pool in world.said} == {"prefill": 1, "decode": 4}
    assert not any(pool.cold_start_s for pool in world.said)
    world.broken = True
    await world.pass_s(2 * PERIOD_S, task)
    world.broken, world.sizes["decode"] = False, 2
    await world.pass_s(2 * PERIOD_S, task)
    assert {pool.pool: pool.wanted for pool in world.said} == {"prefill": 1, "decode": 2}
    assert world.set_to == []
    task.cancel()

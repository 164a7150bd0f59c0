"""Sleeps, wakings, requests, clients that leave and failures in any order: no token is lost and nothing is left behind."""

import asyncio
import logging
import random
from contextlib import suppress

import pytest

from cluster.local import LocalCluster
from core.errors import Overloaded, ReplicaLost
from tests.cluster.instance.test_sleeping import PROMPT, running, said
from tests.patience import PATIENCE_S, until

LENGTHS = (3, 40, 120)


async def insisted(cluster: LocalCluster, length: int) -> list[int]:
    """Retry what is refused, as clients do. A new request waits 5 s for an instance, which may take longer to start."""
    while True:
        try:
            return await said(cluster, length)
        except Overloaded as refused:
            await asyncio.sleep(refused.retry_after_s / 10)


class Walk:
    """Random steps on one cluster."""

    def __init__(self, cluster: LocalCluster, want: list[int], seed: int) -> None:
        self._cluster, self._want, self._rng = cluster, want, random.Random(seed)
        self._asked: list[tuple[int, asyncio.Task[list[int]]]] = []
        self._orders: list[asyncio.Task[None]] = []

    async def step(self) -> None:
        model, rng = self._cluster.frontend.model_sleep, self._rng
        match rng.choice(("ask", "ask", "ask", "leave", "sleep", "pause", "wake", "fail", "wait")):
            case "ask":
                length = rng.choice(LENGTHS)
                self._asked.append((length, asyncio.create_task(insisted(self._cluster, length))))
            case "leave" if self._asked:
                _, task = self._asked.pop(rng.randrange(len(self._asked)))
                task.cancel()
            case "sleep" | "pause" as kind:
                order = model.sleep(rng.choice((1, 2)), pauses=kind == "pause", timeout_s=0.5, drops=False)
                self._orders.append(asyncio.create_task(order))
            case "wake":
                self._orders.append(asyncio.create_task(model.wake()))
            case "fail" if self._cluster.instances:
                rng.choice(self._cluster.instances).on_error(RuntimeError("the device is gone"))
            case _:
                await asyncio.sleep(rng.random() / 10)
        await asyncio.sleep(rng.random() / 50)

    async def end(self) -> None:
        """Every request that was not given up gets all of its tokens, and every order an answer."""
        async with asyncio.timeout(2 * PATIENCE_S):
            for length, task in self._asked:
                assert await task == self._want[:length]
            for order in self._orders:
                order.cancel()
                with suppress(asyncio.CancelledError, ReplicaLost):
                    await order


@pytest.mark.slow
@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_random_walk_loses_no_token_and_leaves_nothing_behind(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.instance.kept_instances.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("cluster.instance.kept_instances.STEADY_S", 0.0)  # failures are no loop here
    monkeypatch.setattr(logging.getLogger("cluster.instance.instance"), "disabled", True)
    quick = {"schedule.residency.idle_s": 0.05, "schedule.residency.least_awake_s": 0.0}
    async with running(mode="on_demand", engine__host_cache_bytes=1 << 23, **quick) as cluster:
        walk = Walk(cluster, await said(cluster, max(LENGTHS)), seed)
        for _ in range(60):
            await walk.step()
        await walk.end()
        assert await said(cluster, 3, PROMPT[:5])
        await until(lambda: all(not one.num_jobs for one in cluster.instances))
        for instance in cluster.instances:
            instance.check_integrity()
            assert (instance.num_grants, instance.num_used_blocks) == (0, 0)
        assert not (await cluster.frontend.status()).num_queued

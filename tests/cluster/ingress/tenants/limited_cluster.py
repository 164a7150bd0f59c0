"""Ingresses whose limits are kept by schedulers, under virtual time."""

import asyncio
import contextlib
import random
from bisect import bisect_left
from collections.abc import Coroutine
from itertools import accumulate
from typing import Any

from pydantic import SecretStr

from cluster.ingress.delivery.frontend import Frontend
from cluster.ingress.tenants.access import Access, KeyHolder, Rules, TenantRules
from cluster.ingress.tenants.use_limits import UseLimits
from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.scheduler_node import SchedulerNode
from core.config.cluster_config import ScheduleConfig
from core.errors import Overloaded
from core.types import Slo
from net.loopback_mail import LoopbackNetwork
from sim.virtual_loop import LoopClock

LATENCY_S = 0.002
WARM_S = 3.0
"""Until schedulers that have all just come answer."""


class Part:
    """A process that can be killed."""

    def __init__(self, mail: Any) -> None:
        self.mail, self._tasks = mail, list[asyncio.Task[Any]]()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    async def kill(self) -> None:
        await self.mail.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class LimitedCluster:
    def __init__(self, rules: Rules, num_ingresses: int, num_schedulers: int) -> None:
        self.clock, self._rules = LoopClock(), rules
        self._network, self._num_schedulers = LoopbackNetwork(LATENCY_S), num_schedulers
        self.schedulers = [self.new_scheduler(f"s{n}") for n in range(num_schedulers)]
        self.ingresses = [self._new_ingress(f"i{n}") for n in range(num_ingresses)]

    def new_scheduler(self, name: str) -> Part:
        mail = self._network.join(name)
        scheduler, count = GlobalScheduler(ScheduleConfig()), self._num_schedulers
        resolve = self._resolve if count > 1 else None
        part = Part(mail)
        part.spawn(SchedulerNode(mail, self.clock, scheduler, resolve, count).run())
        return part

    def _new_ingress(self, name: str) -> "Ingress":
        return Ingress(self._network.join(name), self.clock, self._rules, self._resolve, self._num_schedulers)

    async def _resolve(self) -> list[str]:
        return [part.mail.address for part in self.schedulers]

    async def kill_scheduler(self, number: int) -> None:
        part = self.schedulers.pop(number)
        await part.kill()

    async def close(self) -> None:
        for part in (*self.ingresses, *self.schedulers):
            await part.kill()


class Ingress(Part):
    def __init__(self, mail: Any, clock: LoopClock, rules: Rules, resolve: Any, num_schedulers: int) -> None:
        super().__init__(mail)
        self.frontend = Frontend(
            mail, clock, ScheduleConfig(), 16, resolve_schedulers=resolve, request_timeout_s=60.0,
            num_schedulers=num_schedulers,
        )  # fmt: skip
        self.access = Access(rules, clock.now)
        self.access.lease_from(self.frontend.ask_shares)
        self.spawn(self.frontend.run())

    def holder(self, key: str) -> KeyHolder:
        return self.access.holder_of(f"Bearer {key}")


class Clients:
    """Ask an ingress as often as they may, and write down when they got what."""

    def __init__(self, clock: LoopClock, holder: KeyHolder, seed: int) -> None:
        self._clock, self._holder, self._random = clock, holder, random.Random(seed)
        self.requests: list[tuple[float, int]] = []
        self.tokens: list[tuple[float, int]] = []
        self.num_running = self.num_refused = 0
        self.longest_wait_s = 0.0

    async def ask_often(self, per_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._ask())
                await self._clock.sleep(1 / per_s)

    async def _ask(self) -> None:
        num_prompt, num_output = self._random.randint(10, 100), self._random.randint(5, 100)
        began_at = self._clock.now()
        with contextlib.suppress(Overloaded):
            await self._holder.account.count_request()
            self.requests.append((self._clock.now(), 1))
            likely = self._holder.tenant.likely_output
            async with self._holder.account.running(1, num_prompt, likely.of(200), "m") as use:
                self.longest_wait_s = max(self.longest_wait_s, self._clock.now() - began_at)
                self.num_running += 1
                self.tokens.append((self._clock.now(), num_prompt))
                try:
                    for num_left in range(num_output, 0, -20):
                        await self._clock.sleep(0.4)
                        use.spend(min(20, num_left))
                        self.tokens.append((self._clock.now(), min(20, num_left)))
                finally:
                    self.num_running -= 1
                likely.ended(num_output)
            return
        self.num_refused += 1


def rules_of(limits: UseLimits, **more: Any) -> Rules:
    return Rules(
        {"standard": Slo()}, {"": TenantRules(), "acme": TenantRules((SecretStr("k"),), (), limits, **more)}
    )


def in_minutes(uses: list[tuple[float, int]], begin: float, end: float) -> list[int]:
    """Return what was used in each minute that begins at a second from `begin` on and ends by `end`."""
    uses = sorted(uses)
    totals = [0, *accumulate(n for _, n in uses)]

    def upto(at: float) -> int:
        return totals[bisect_left(uses, (at, 0))]

    return [upto(first + 60.0) - upto(first) for first in range(round(begin), round(end - 60.0) + 1)]

"""Instances that are lost, and pools whose sizes follow the load, in the full simulation.

The autoscaler is the production one (cluster/scheduler/scaling); what Ray Serve does in production is here: it starts instances,
which serve a cold start later, drains the newest where there are too many, and replaces those that were lost."""

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, cast, get_args

from cluster.instance.instance_parts import Role
from cluster.scheduler.scaling.autoscaler import Autoscaler, Facts
from cluster.scheduler.scaling.scaler import PoolName
from core.config.cluster_config import ScalingConfig
from core.errors import ConfigError
from core.ports import Clock

_FAILURE = re.compile(r"(prefill|decode|both)-([1-9]\d*)@(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The `number`-th instance of a role, from 1 on in order of their starts, is lost `at` seconds after the start. Another one
    takes its place at `back_at`."""

    role: Role
    number: int
    at: float
    back_at: float = inf


def read_failure(text: str) -> Failure:
    """Parse `decode-1@120` or `decode-1@120-180`. Raises ConfigError."""
    found = _FAILURE.fullmatch(text.strip())
    failure = found and Failure(
        role=cast(Role, found[1]),
        number=int(found[2]),
        at=float(found[3]),
        back_at=float(found[4] or inf),
    )
    if failure is None or failure.back_at <= failure.at:
        raise ConfigError(
            f"--fail {text}: say which instance is lost after how many seconds, and perhaps when another takes its place, as in "
            f"decode-1@120 or decode-1@120-180; roles: {', '.join(get_args(Role))}"
        )
    return failure


@dataclass(slots=True)
class InstanceLife:
    """Seconds after the start. An instance costs money from `asked_at` on, and serves from `serving_at` on."""

    role: Role
    asked_at: float
    serving_at: float = inf
    ended_at: float = inf


class ChangingFleet(Protocol):
    """What changes ask of the cluster."""

    def start_instance(self, life: InstanceLife) -> None: ...
    def living(self, role: Role) -> list[InstanceLife]:
        """Return those that serve and do not drain, in order of their starts."""
        ...

    def nth(self, role: Role, number: int) -> InstanceLife | None:
        """Return one that was ever started, unless it has ended."""
        ...

    async def lose(self, life: InstanceLife) -> None: ...
    async def drain(self, life: InstanceLife) -> None: ...


Spawn = Callable[[Coroutine[Any, Any, None]], None]


async def carry_out(
    failure: Failure, fleet: ChangingFleet, clock: Clock, start_at: float, replace: Callable[[Role], None]
) -> None:
    """Lose an instance, if it is there then. `replace` is called where no time says when another one takes its place."""
    await clock.sleep(start_at + failure.at - clock.now())
    life = fleet.nth(failure.role, failure.number)
    if life is None:
        return
    await fleet.lose(life)
    if failure.back_at == inf:
        replace(failure.role)
        return
    await clock.sleep(start_at + failure.back_at - clock.now())
    fleet.start_instance(InstanceLife(failure.role, failure.back_at))


def pool_roles(num_prefill: int, num_both: int) -> dict[PoolName, Role]:
    """Return what the instances of each pool do. Those of any role are the decode pool, as in production."""
    roles: dict[PoolName, Role] = {"decode": "both" if num_both else "decode"}
    if num_prefill:
        roles["prefill"] = "prefill"
    return roles


class SimulatedPools:
    """cluster.scheduler.scaling.autoscaler.PoolSizes. `roles` are those of a pool's instances."""

    def __init__(
        self,
        fleet: ChangingFleet,
        clock: Clock,
        *,
        roles: dict[PoolName, Role],
        cold_start_s: float,
        spawn: Spawn,
    ) -> None:
        self._fleet, self._clock, self._spawn = fleet, clock, spawn
        self._roles, self._cold_start_s = roles, cold_start_s
        self._sizes: dict[PoolName, int] = {pool: len(fleet.living(role)) for pool, role in roles.items()}
        self._starting: dict[PoolName, list[InstanceLife]] = {pool: [] for pool in roles}
        self._start_at = clock.now()

    async def get(self) -> dict[PoolName, int]:
        return dict(self._sizes)

    async def set(self, pool: PoolName, num_instances: int) -> None:
        self._sizes[pool] = num_instances
        starting = self._starting[pool]
        living = self._fleet.living(self._roles[pool])
        for _ in range(num_instances - len(starting) - len(living)):
            self._begin(pool)
        too_many = max(0, len(living) - num_instances)
        for life in living[len(living) - too_many :]:
            self._spawn(self._fleet.drain(life))

    def replace(self, role: Role) -> None:
        """Start another instance for one that was lost."""
        self._begin(next(pool for pool, own in self._roles.items() if own == role))

    def autoscaler(self, config: ScalingConfig, facts: Facts) -> Coroutine[Any, Any, None]:
        return Autoscaler(config, facts, self, self._clock, lambda _: None).run()

    def _begin(self, pool: PoolName) -> None:
        life = InstanceLife(self._roles[pool], self._clock.now() - self._start_at)
        self._starting[pool].append(life)
        self._spawn(self._start(pool, life))

    async def _start(self, pool: PoolName, life: InstanceLife) -> None:
        await self._clock.sleep(self._cold_start_s)
        self._starting[pool] = [one for one in self._starting[pool] if one is not life]
        self._fleet.start_instance(life)

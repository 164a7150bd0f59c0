"""Carries out what `scaler` decides: every few seconds each pool gets the size that its load asks for.

It sets sizes and nothing else. What runs the pools (`PoolSizes`; Ray Serve in production) starts and ends instances. An instance
that is ended drains first, so that no request fails of it. A new scheduler can learn all of its state again."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.scaling.pool_loads import UseMeter, pool_of
from cluster.scheduler.scaling.scaler import PoolLimits, PoolName, Resize, Scaler, ScalingRules
from core.config.cluster_config import ScalingConfig
from core.ports import Clock
from core.reports import PoolStatus
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning

log = logging.getLogger(__name__)


class PoolSizes(Protocol):
    async def get(self) -> dict[PoolName, int]:
        """Return how many instances each pool shall have now, whatever has set it."""
        ...

    async def set(self, pool: PoolName, num_instances: int) -> None: ...


class Facts(Protocol):
    """What the autoscaler reads of a scheduler (cluster.scheduler.scheduler_node.SchedulerNode)."""

    @property
    def leads(self) -> bool:
        """Whether this scheduler is the one of several that sizes pools."""
        ...

    @property
    def members(self) -> tuple[Member, ...]: ...
    @property
    def queued_tokens(self) -> int: ...


class Autoscaler:
    """Sizes pools while `run` runs. `told` is called with the pools' state each time."""

    def __init__(
        self,
        config: ScalingConfig,
        facts: Facts,
        sizes: PoolSizes,
        clock: Clock,
        told: Callable[[tuple[PoolStatus, ...]], None],
        tuning: SchedulerTuning = DEFAULT_TUNING,
    ) -> None:
        self._config, self._facts, self._sizes, self._clock, self._told = config, facts, sizes, clock, told
        self._scaler = Scaler(rules_of(config))
        self._meter, self._tuning = UseMeter(tuning), tuning
        self._status: dict[PoolName, PoolStatus] = {}
        self._grown: dict[PoolName, tuple[float, int]] = {}
        """When a pool was last made larger, and how many served then, until one more serves."""

    async def run(self) -> None:
        """Run for as long as the scheduler lives, until cancelled. Failures are logged and tried again."""
        while True:
            await self._clock.sleep(self._config.interval_s)
            try:
                if self._facts.leads:
                    await self._step()
            except Exception:
                log.exception("pools cannot be sized")

    async def _step(self) -> None:
        targets = await self._sizes.get()
        now, members = self._clock.now(), self._facts.members
        self._learn_cold_start(members, now)
        loads = self._meter.loads(members, self._facts.queued_tokens, targets, now)
        resized = {resize.pool: resize for resize in self._scaler.on(loads, now)}
        for load in loads:
            size, serving = targets[load.name], len(load.instances)
            resize = resized.get(load.name)
            if resize is not None and resize.num_instances != size:
                log.info("%s: %d -> %d instances, %s", load.name, size, resize.num_instances, resize.reason)
                await self._sizes.set(load.name, resize.num_instances)
                if resize.num_instances > size:
                    self._grown.setdefault(load.name, (now, serving))
            self._note(load.name, size, serving, resize)
        self._told(tuple(self._status.values()))

    def _note(self, pool: PoolName, size: int, serving: int, resize: Resize | None) -> None:
        old = self._status.get(pool, PoolStatus(pool=pool))
        wanted = size if resize is None else resize.num_instances
        self._status[pool] = PoolStatus(
            pool=pool,
            wanted=wanted,
            serving=serving,
            num_grown=old.num_grown + (wanted > size),
            num_shrunk=old.num_shrunk + (wanted < size),
            cold_start_s=self._scaler.cold_start_s,
            reason=old.reason if resize is None else resize.reason,
        )

    def _learn_cold_start(self, members: Sequence[Member], now: float) -> None:
        """Learn the time from a decision until the first new instance has registered."""
        for pool, (since, had) in list(self._grown.items()):
            if sum(pool_of(m) == pool and not m.leaving for m in members) > had:
                took_s = now - since
                self._scaler.cold_start_s += self._tuning.cold_start_share * (
                    took_s - self._scaler.cold_start_s
                )
                del self._grown[pool]


def rules_of(config: ScalingConfig) -> ScalingRules:
    return ScalingRules(
        target=config.target,
        shrink_below=config.shrink_below,
        calm_s=config.calm_s,
        cold_start_s=config.cold_start_s,
        prefill=PoolLimits(config.prefill_min, config.prefill_max),
        decode=PoolLimits(config.decode_min, config.decode_max),
    )

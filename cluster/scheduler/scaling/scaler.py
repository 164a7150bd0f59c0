"""How many prefill and decode instances there should be, decided every few seconds.

Each pool is sized by its own use: prefill by the share of time that prompts take, decode by the fuller of its blocks and its
sequence slots. It grows at once, by what is missing for TARGET and by what the load will add while an instance starts. It shrinks
only after it could have been smaller for `calm_s`, one instance at a time and never while any is starting, so that it does not
flap. The instance to be drained is named, the least used first.

Invariants: sizes stay within their limits; between a growth and the next shrinking of a pool at least `calm_s` pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

PoolName = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class PoolLimits:
    at_least: int = 1
    at_most: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    target: float = 0.7
    """The use that a pool is sized for."""
    shrink_below: float = 0.5
    """The largest use of the smaller pool at which a pool shrinks."""
    calm_s: float = 60.0
    cold_start_s: float = 60.0
    """Seconds from the decision until a new instance serves."""
    prefill: PoolLimits = PoolLimits()
    decode: PoolLimits = PoolLimits()


@dataclass(frozen=True, slots=True)
class InstanceUse:
    address: str
    use: float
    """1 when all of it is taken, and more when work waits."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    name: PoolName
    instances: tuple[InstanceUse, ...]
    """The instances that serve and do not drain."""
    num_starting: int = 0


@dataclass(frozen=True, slots=True)
class Resize:
    """A pool's new size, `num_instances`, with those that start. The instances `drain` are to end once nothing runs there."""

    pool: PoolName
    num_instances: int
    drain: tuple[str, ...] = ()
    reason: str = field(default="", compare=False)


@dataclass(slots=True)
class _Trend:
    load: float
    at: float
    slope_per_s: float = 0.0
    calm_since: float | None = None


class Scaler:
    """Decides on sizes. Feed it each pool's load every few seconds, with `now` never going back."""

    def __init__(self, rules: ScalingRules) -> None:
        self._rules = rules
        self.cold_start_s = rules.cold_start_s
        """It may be learned."""
        self._trends: dict[PoolName, _Trend] = {}

    def on(self, pools: Sequence[PoolLoad], now: float) -> list[Resize]:
        found = [self._resize(pool, now) for pool in pools]
        return [resize for resize in found if resize is not None]

    def _resize(self, pool: PoolLoad, now: float) -> Resize | None:
        rules, limits = self._rules, self._rules.prefill if pool.name == "prefill" else self._rules.decode
        load = sum(instance.use for instance in pool.instances)
        trend = self._follow(pool.name, load, now)
        size = len(pool.instances) + pool.num_starting
        ahead = load + max(0.0, trend.slope_per_s) * self.cold_start_s
        reason = f"whose load is {load:.2f} and {ahead:.2f} in {self.cold_start_s:.0f} s"
        wanted = min(limits.at_most, max(limits.at_least, ceil(ahead / rules.target - 1e-9)))
        if wanted > size:
            trend.calm_since = None
            return Resize(pool.name, wanted, reason=reason)
        if size <= limits.at_least or pool.num_starting or ahead > rules.shrink_below * (size - 1):
            trend.calm_since = None
            return None
        if trend.calm_since is None:
            trend.calm_since = now
        if now - trend.calm_since < rules.calm_s:
            return None
        trend.calm_since = now
        idlest = min(pool.instances, key=lambda instance: instance.use)
        return Resize(pool.name, size - 1, (idlest.address,), reason)

    def _follow(self, name: PoolName, load: float, now: float) -> _Trend:
        """Follow the load's slope, smoothed over about one cold start."""
        trend = self._trends.setdefault(name, _Trend(load, now))
        if (elapsed_s := now - trend.at) > 0:
            share = min(1.0, elapsed_s / self.cold_start_s)
            slope = (load - trend.load) / elapsed_s
            trend.slope_per_s += share * (slope - trend.slope_per_s)
            trend.load, trend.at = load, now
        return trend

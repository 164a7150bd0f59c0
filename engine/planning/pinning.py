"""Which prefixes stay in the pool because their clients asked for it, and for how long. Owned by Sessions.

A pin never keeps a sequence that runs from getting blocks: pinned blocks go last, but they go. All tenants together may pin a
share of the pool. Each tenant has a part of it by weight, beside those that were served here lately, whether they pin or not.
Whoever has more loses the pins that end soonest."""

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as SeqOf
from dataclasses import dataclass
from math import inf

from engine.cache.prefix_run import Pin, Run
from engine.cache.radix_cache import RadixCache
from engine.planning.deadlines import Deadlines

_LATELY_S = 600.0
"""For how long a tenant counts after a request of its was served."""


@dataclass(slots=True, eq=False)
class _Pinned:
    tenant: str
    pin: Pin


class Pinning:
    def __init__(self, cache: RadixCache, most_blocks: int) -> None:
        """`most_blocks`: of all tenants together."""
        self._cache, self._most_blocks = cache, most_blocks
        self._all: dict[Hashable, _Pinned] = {}
        self._ends = Deadlines[Hashable]()
        self._served: dict[str, tuple[float, float]] = {}
        """By tenant, its weight and when it was last served here."""
        self._now = 0.0
        self.num_cut = 0
        """The number of pins so far that ended early, for a tenant's or its neighbours' sake."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks that are pinned."""
        return _num_blocks({run for one in self._all.values() for run in one.pin.runs})

    @property
    def num_idle(self) -> int:
        """The number of pinned blocks that nobody refers to."""
        return self._cache.num_idle_of(one.pin for one in self._all.values())

    def served(self, tenant: str, weight: float) -> None:
        """Note that a request of a tenant was served here."""
        self._served[tenant] = weight, self._now

    def pin(
        self,
        key: Hashable,
        ends_at: float,
        blocks: SeqOf[int],
        twins: SeqOf[int] = (),
        *,
        tenant: str,
        weight: float,
    ) -> None:
        """Pin the first of these cached blocks, as many as the tenant may, in place of what `key` has pinned so far. `twins` are
        as in `RadixCache.insert`."""
        self.served(tenant, weight)
        before = self._all.pop(key, None)
        self._all[key] = new = _Pinned(tenant, Pin(ends_at))
        parts = self._parts()
        self._cache.pin(new.pin, parts[tenant], blocks, twins)
        self._ends.set(key, ends_at)
        if before is not None:  # not sooner, or what stays pinned could be given up in between
            self._cache.unpin(before.pin)
        for name in {one.tenant for one in self._all.values()}:
            self._cut(name, parts[name])

    def ends_at(self, key: Hashable) -> float:
        """When its pin ends; in the endless past where it has none."""
        one = self._all.get(key)
        return one.pin.ends_at if one is not None else -inf

    def unpin(self, key: Hashable) -> None:
        """End a pin, if there is one."""
        self._ends.drop(key)
        if (one := self._all.pop(key, None)) is not None:
            self._cache.unpin(one.pin)

    def pass_by(self, now: float) -> None:
        """Note the time, and end the pins whose time is over."""
        self._now = now
        for key in self._ends.take(now):
            self.unpin(key)

    def _parts(self) -> dict[str, int]:
        """Return how many blocks each tenant may pin, of those that were served here lately or have pins."""
        pinning = {one.tenant for one in self._all.values()}
        for name in [name for name, (_, last_at) in self._served.items() if last_at < self._now - _LATELY_S]:
            if name not in pinning:
                del self._served[name]
        whole = sum(weight for weight, _ in self._served.values())
        return {name: int(self._most_blocks * weight / whole) for name, (weight, _) in self._served.items()}

    def _cut(self, tenant: str, most: int) -> None:
        """End the pins of a tenant that end soonest, so that the others are of `most` blocks together."""
        own = [(key, one.pin) for key, one in self._all.items() if one.tenant == tenant]
        left: set[Run] = set()
        num_left = 0
        for key, pin in sorted(own, key=lambda pair: -pair[1].ends_at):
            more = pin.runs.keys() - left
            count = _num_blocks(more)
            if num_left + count <= most:
                num_left += count
                left |= more
            else:
                self.unpin(key)
                self.num_cut += 1


def _num_blocks(runs: Iterable[Run]) -> int:
    return sum(len(run.blocks) for run in runs)

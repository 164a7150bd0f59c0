"""Pool sizes under loads that stay, jump, swing and fall, with instances that take a minute to start."""

import itertools
import math
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.scaling.scaler import InstanceUse, PoolLimits, PoolLoad, Resize, Scaler, ScalingRules

RULES = ScalingRules(decode=PoolLimits(1, 20))
STEP_S = 5.0


class Pool:
    """One decode pool that carries out what it is told."""

    def __init__(self, size: int, cold_start_s: float = 60.0) -> None:
        self.scaler, self.now, self._cold_start_s = Scaler(RULES), 0.0, cold_start_s
        self.serving = [f"d{i}" for i in range(size)]
        self.starting: list[float] = []
        self.told: list[tuple[float, Resize]] = []
        self._count = size

    @property
    def size(self) -> int:
        return len(self.serving) + len(self.starting)

    def step(self, load: float) -> None:
        self.now += STEP_S
        for _ in [at for at in self.starting if at <= self.now]:
            self._count += 1
            self.serving.append(f"d{self._count}")
        self.starting = [at for at in self.starting if at > self.now]
        uses = tuple(InstanceUse(name, load / len(self.serving)) for name in self.serving)
        for resize in self.scaler.on([PoolLoad("decode", uses, len(self.starting))], self.now):
            self.told.append((self.now, resize))
            for name in resize.drain:
                self.serving.remove(name)
            self.starting += [self.now + self._cold_start_s] * (resize.num_instances - self.size)
            assert self.size == resize.num_instances

    def run(self, seconds: float, load: Callable[[float], float]) -> None:
        for _ in range(int(seconds / STEP_S)):
            self.step(load(self.now))


def test_a_steady_load_gets_its_size_and_keeps_it() -> None:
    pool = Pool(2)
    pool.run(600, lambda _: 4.0)
    assert pool.size == math.ceil(4.0 / RULES.target)
    assert len(pool.told) == 1


def test_a_load_that_grows_is_met_before_it_comes() -> None:
    pool = Pool(3)
    pool.run(120, lambda _: 1.5)
    pool.run(130, lambda now: 1.5 + (now - 120) / 20)
    assert len(pool.serving) >= 1.5 + 130 / 20


def test_a_load_that_swings_does_not_make_it_flap() -> None:
    pool = Pool(6)
    pool.run(1800, lambda now: 3.4 + 0.5 * math.sin(now / 8))
    changes = [resize.num_instances for _, resize in pool.told]
    assert len(changes) <= 3


def test_a_load_that_is_gone_is_left_one_drained_instance_at_a_time() -> None:
    pool = Pool(6)
    pool.run(900, lambda _: 0.2)
    assert pool.size == 1
    assert all(len(resize.drain) == 1 for _, resize in pool.told)
    times = [at for at, _ in pool.told]
    assert min(b - a for a, b in itertools.pairwise(times)) >= RULES.calm_s


def test_the_least_used_is_drained() -> None:
    scaler = Scaler(RULES)
    uses = (InstanceUse("a", 0.3), InstanceUse("b", 0.05), InstanceUse("c", 0.2))
    scaler.on([PoolLoad("decode", uses)], 0.0)
    (resize,) = scaler.on([PoolLoad("decode", uses)], 61.0)
    assert resize == Resize("decode", 2, ("b",))


@given(st.lists(st.floats(0, 40), min_size=1, max_size=80))
@settings(max_examples=100, deadline=None)
def test_whatever_the_load_limits_hold_and_it_shrinks_late(loads: list[float]) -> None:
    pool = Pool(4)
    for load in loads:
        pool.step(load)
        assert 1 <= pool.size <= 20
    grown_s = -math.inf
    for at, resize in pool.told:
        if resize.drain:
            assert at - grown_s >= RULES.calm_s
        else:
            grown_s = at

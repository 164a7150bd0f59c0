"""A scheduler, a rank and lower tiers that are not real, with a clock that goes on with each step."""

import random
from collections.abc import Callable

from core.config.cluster_config import EngineConfig
from core.plan import StepPlan, StepResult
from core.types import Request, SamplingParams, Slo
from engine.planning.dp_scheduler import DpScheduler
from engine.planning.planner_protocol import Planner
from engine.planning.prefixes import PrefixPlace, Restore
from engine.planning.speculation.speculator import Speculator
from engine.planning.step_scheduler import StepScheduler
from tests.engine.fifo_policy import FifoPolicy
from tests.property.fake_rank import FakeRank
from tests.property.half_right import HalfRight
from tests.property.test_engine_accounting import expected

SIZE, NUM_BLOCKS = 4, 8


class Tiers:
    """Have every full block that was ever computed, or none."""

    def __init__(self, scheduler: Planner, rank: FakeRank) -> None:
        self.scheduler, self.rank, self.is_empty = scheduler, rank, False
        self.asked: list[Request] = []
        self.under_way: list[tuple[Restore, Callable[[bool], None]]] = []
        scheduler.prefixes.on_return(self.read)

    def read(self, place: PrefixPlace, request: Request, then: Callable[[bool], None]) -> int:
        self.asked.append(request)
        num_full = (len(request.tokens) - 1) // SIZE
        if self.is_empty or place.cached_prefix(request).num_usable >= num_full:
            return 0
        restore = place.begin_restore(request, num_full)
        assert restore is not None, "asked where there is no room"
        for number, block in enumerate(restore.blocks, len(restore.prefix)):
            self.rank.slots[block] = [*request.tokens[number * SIZE : (number + 1) * SIZE]]
        self.under_way.append((restore, then))
        return num_full

    def end(self, *, fails: bool = False) -> None:
        """End the restore that began first."""
        restore, then = self.under_way.pop(0)
        self.scheduler.prefixes.publish_restore(restore, 0 if fails else len(restore.fresh))
        then(not fails)
        self.scheduler.prefixes.end_restore(restore)
        self.scheduler.check_integrity()


class World:
    def __init__(
        self,
        num_blocks: int = NUM_BLOCKS,
        *,
        depth: int = 1,
        drafts: bool = False,
        num_groups: int = 1,
        step_s: float = 0.0,
        **config: object,
    ) -> None:
        values = {"block_size": SIZE, "max_batch_tokens": 64, "longest_pause_s": 0, **config}
        settings = EngineConfig.model_validate(values)
        self.scheduler: StepScheduler | DpScheduler
        if num_groups > 1:
            self.scheduler = DpScheduler(settings, num_blocks, 1000, FifoPolicy(), num_groups)
        else:
            speculator = Speculator(HalfRight(random.Random(0)), settings, 1000) if drafts else None
            self.scheduler = StepScheduler(settings, num_blocks, 1000, FifoPolicy(), speculator=speculator)
        self.rank = FakeRank(num_blocks, SIZE, random.Random(0), put_off=0.0)
        self.tiers, self.depth = Tiers(self.scheduler, self.rank), depth
        self.flight: list[tuple[StepPlan, StepResult]] = []
        self.out: dict[str, list[int]] = {}
        self.begun: dict[str, list[int]] = {}
        """Behind how many tokens each sequence was begun, each time that it was."""
        self.num_computed = 0
        self.now, self.step_s = 0.0, step_s
        self.times: dict[str, list[float]] = {}
        """When each token of each sequence was known."""

    def turn(self) -> bool:
        while len(self.flight) < self.depth and (plan := self.scheduler.plan(self.now)) is not None:
            self.scheduler.check_integrity()
            for new in plan.new:
                work = next(work for work in plan.work if work.key == new.key)
                self.begun.setdefault(new.key, []).append(work.start)
            self.num_computed += plan.num_tokens
            self.flight.append((plan, self.rank.step(plan)))
        if not self.flight:
            return False
        self.now += self.step_s
        for token in self.scheduler.commit(*self.flight.pop(0), self.now):
            self.out.setdefault(token.key, []).append(token.token)
            self.times.setdefault(token.key, []).append(self.now)
        self.scheduler.check_integrity()
        return True

    def until(self, is_so: Callable[[], object]) -> None:
        for _ in range(5000):
            if is_so():
                return
            self.turn()
        raise AssertionError("it never comes to that")

    def finish(self, *, fails: bool = False) -> None:
        """Compute all that is here, and end restores one turn after they have begun."""
        for _ in range(5000):
            if self.tiers.under_way:
                self.tiers.end(fails=fails)
            if not self.turn() and not self.tiers.under_way:
                return
        raise AssertionError("it never ends")


def request(name: str, length: int = 8, max_tokens: int = 16, priority: int = 0, **sampling: int) -> Request:
    return Request(
        id=name,
        prompt=tuple(range(100 * ord(name[0]), 100 * ord(name[0]) + length)),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        reply_to="f",
        slo=Slo(priority=priority),
    )


def check(w: World, *requests: Request) -> None:
    for one in requests:
        assert w.out[one.key] == expected(one), one.key
    assert w.scheduler.load().num_used_blocks == w.scheduler.load().num_waiting == 0

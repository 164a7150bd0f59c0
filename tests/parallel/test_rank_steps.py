"""A rank launches a step while the one before it computes, but for what ranks would otherwise meet over in different orders."""

import threading
from collections.abc import Callable, Iterable, Iterator
from unittest.mock import Mock

import pytest

from core.plan import StepPlan, StepResult
from device.poller import Poller
from engine.execution.runner import LaunchedStep
from engine.ranks.rank_messages import Relocate
from engine.ranks.rank_steps import StepsAhead, StepsInTurn, Word
from tests.patience import PATIENCE_S

RELOCATE = Relocate(())


class End:
    """An Event of work that is done when the test says so."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()


class Rank:
    """A Launcher whose steps end when the test says so, and what is done with it, in order."""

    def __init__(self, meeting: Iterable[int] = (), fails: int = -1) -> None:
        """`meeting`: the steps over whose samples ranks meet. `fails`: one that cannot be launched."""
        self.log: list[str] = []
        self.ends = [End() for _ in range(3)]
        self._meeting, self._fails = set(meeting), fails
        self._changed = threading.Condition()

    def note(self, what: str) -> None:
        with self._changed:
            self.log.append(what)
            self._changed.notify_all()

    def until(self, what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: what in self.log, PATIENCE_S), what

    def awaits(self, plan: StepPlan) -> dict[str, str]:
        return {}

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if plan.step == self._fails:
            raise ValueError(f"step {plan.step} cannot be launched")
        self.note(f"launch {plan.step}")
        return LaunchedStep(
            number=plan.step,
            started_at=0.0,
            io=Mock(),
            samples=Mock(),
            replayed=False,
            ends_first=plan.step in self._meeting,
            over=self.ends[plan.step],
            drafted=None,
            failed=(),
        )

    def finish(self, launched: LaunchedStep) -> StepResult:
        self.note(f"finish {launched.number}")
        return StepResult(step=launched.number, sampled=(), duration_s=0.0)

    def mark(self) -> End:
        raise AssertionError("there is memory")

    def close(self) -> None:
        self.note("close")

    def serve(self, words: Callable[[], Iterator[Word]]) -> list[str]:
        steps = StepsAhead(self, self.finish, Poller())
        steps.serve(words(), lambda _: self.note("move"), lambda result: self.note(f"answer {result.step}"))
        return self.log


def share(step: int) -> StepPlan:
    return StepPlan(step=step, new=(), copies=(), work=(), drop=())


def test_a_step_is_launched_while_the_one_before_it_computes() -> None:
    rank = Rank()

    def words() -> Iterator[Word]:
        yield share(0)
        yield share(1)
        rank.until("launch 1")
        rank.ends[0].done.set()
        rank.until("answer 0")
        yield RELOCATE
        yield share(2)
        rank.until("launch 2")
        for end in rank.ends:
            end.done.set()

    assert rank.serve(words) == [
        *("launch 0", "launch 1", "finish 0", "answer 0"),
        *("move", "launch 2", "finish 1", "answer 1", "finish 2", "answer 2", "close"),
    ]


def test_nothing_is_launched_behind_a_step_over_whose_samples_ranks_meet_before_it_has_ended() -> None:
    """It makes no difference which rank hears first that the step is over: all finish it before the next one's meetings."""
    rank = Rank(meeting=[0])

    def words() -> Iterator[Word]:
        yield share(0)
        yield share(1)
        rank.until("launch 0")
        for end in rank.ends:
            end.done.set()

    assert rank.serve(words)[:4] == ["launch 0", "finish 0", "answer 0", "launch 1"]


def test_what_cannot_be_launched_ends_the_rank() -> None:
    rank = Rank(fails=1)
    rank.ends[0].done.set()

    def words() -> Iterator[Word]:
        yield share(0)
        yield share(1)
        yield share(2)

    with pytest.raises(ValueError, match="step 1 cannot be launched"):
        rank.serve(words)
    assert "launch 2" not in rank.log


def test_a_broken_line_to_the_instance_ends_the_rank() -> None:
    def words() -> Iterator[Word]:
        raise ConnectionResetError("gone")
        yield share(0)

    with pytest.raises(ConnectionResetError):
        Rank().serve(words)


def test_in_turn_each_word_is_done_before_the_next_is_read() -> None:
    log: list[str] = []

    def step(share: StepPlan) -> StepResult:
        log.append(f"step {share.step}")
        return StepResult(step=share.step, sampled=(), duration_s=0.0)

    def words() -> Iterator[Word]:
        for word in (share(0), RELOCATE, share(1)):
            log.append("read")
            yield word

    StepsInTurn(step).serve(words(), lambda _: log.append("move"), lambda result: log.append("answer"))
    assert log == ["read", "step 0", "answer", "read", "move", "read", "step 1", "answer"]

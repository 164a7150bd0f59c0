"""Giving up requests: as few as any choice can, by trying all choices; what decoding takes is learned from a busy fleet."""

from dataclasses import dataclass
from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.queue.overload import Spending, dearest


@dataclass(frozen=True)
class Job:
    number: int
    work_s: float
    due_at: float
    level: int = 0

    @property
    def start_by(self) -> float:
        return self.due_at - self.work_s


def all_in_time(jobs: tuple[Job, ...]) -> bool:
    now = 0.0
    for job in sorted(jobs, key=lambda job: job.due_at):
        now += job.work_s
        if now > job.due_at:
            return False
    return True


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 25)), max_size=8))
def test_no_choice_keeps_more_requests_in_time(pairs: list[tuple[int, int]]) -> None:
    jobs = [
        Job(i, float(work), float(due)) for i, (work, due) in enumerate(sorted(pairs, key=lambda p: p[1]))
    ]
    given_up = dearest(jobs, 1.0, 0.0, 0.0)
    kept = tuple(job for job in jobs if job not in given_up)
    assert all_in_time(kept)
    best = max(n for n in range(len(jobs) + 1) if any(map(all_in_time, combinations(jobs, n))))
    assert len(kept) == best


def test_the_lowest_level_is_given_up_first_and_never_what_has_no_deadline() -> None:
    jobs = [
        Job(0, 1.0, 2.0, level=-1),
        Job(1, 3.0, 4.0),
        Job(2, 1.0, 4.5, level=1),
        Job(3, 50.0, inf, level=-2),
    ]
    assert dearest(jobs, 1.0, 0.0, 0.0) == [jobs[0]]


def test_more_instances_and_cheaper_decoding_leave_more_time() -> None:
    jobs = [Job(i, 1.0, 3.0) for i in range(12)]
    assert len(dearest(jobs, 1.0, 0.0, 0.0)) == 9
    assert len(dearest(jobs, 4.0, 0.0, 0.0)) == 3
    assert len(dearest(jobs, 4.0, 1.0, 0.0)) == 7
    assert len(dearest(jobs, 4.0, 0.0, 2.5)) == 12


def test_what_decoding_takes_is_learned_only_while_requests_wait() -> None:
    """Four instances place a prompt of 0.1 s every 0.1 s: each takes 0.3 s more. An idle hour says nothing."""
    spending = Spending()
    now = 0.0
    for _ in range(100):
        spending.observe(4.0, now, some_wait=True)
        now += 0.1
        spending.observe(4.0, now, some_wait=True)
        spending.placed(0.1)
    assert spending.beside_s == pytest.approx(0.3, rel=0.05)
    spending.observe(4.0, now, some_wait=False)
    spending.observe(4.0, now + 3600, some_wait=False)
    assert spending.beside_s == pytest.approx(0.3, rel=0.05)

"""The rules of `core.pacing.overcommit`: by how much a sequence is ahead, which sequences pause, and how long one rests."""

from dataclasses import dataclass
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from core.pacing.overcommit import ahead_s, pausable, rests
from core.scheduler_tuning import DEFAULT_TUNING as TUNING
from core.types import Request, SamplingParams, Slo

NOW = 100.0


@dataclass(eq=False)
class Served:
    arrival: int = 0
    first_token_at: float = NOW
    num_after_first: int = 0
    tpot_s: float = 0.1
    priority: int = 0
    tokens: tuple[int, ...] = (1, 2)
    num_output: int = 1
    num_computed: int = 1

    @property
    def request(self) -> Request:
        slo = Slo(tpot_s=self.tpot_s, priority=self.priority)
        return Request(id="r", prompt=(1,), sampling=SamplingParams(), reply_to="f", slo=slo)


served = st.builds(
    Served,
    arrival=st.integers(0, 5),
    first_token_at=st.sampled_from([NOW - 20, NOW - 5.0, NOW, inf]),
    num_after_first=st.integers(0, 300),
    tpot_s=st.sampled_from([0.04, 0.1, 10.0, inf]),
    priority=st.integers(-1, 1),
)


def test_a_sequence_is_ahead_by_what_it_got_early() -> None:
    assert ahead_s(Served(num_after_first=30), NOW) == 3.0
    assert ahead_s(Served(num_after_first=30), NOW + 1) == 2.0
    assert ahead_s(Served(num_after_first=30), NOW + 4) == -1.0


def test_nothing_is_ahead_without_a_first_token_or_a_pace() -> None:
    assert ahead_s(Served(first_token_at=inf), NOW) == 0
    assert ahead_s(Served(first_token_at=inf, tpot_s=10.0), NOW) == 0
    assert ahead_s(Served(tpot_s=inf, num_after_first=30), NOW) == 0


def test_what_is_furthest_ahead_pauses_first_and_of_equals_what_came_last() -> None:
    seqs = [Served(number, num_after_first=count) for number, count in enumerate((20, 40, 10, 40, 11))]
    assert [seq.arrival for seq in pausable(seqs, 0, NOW, TUNING)] == [3, 1, 0, 4]


@given(seqs=st.lists(served, max_size=8), priority=st.integers(-1, 1))
def test_only_what_is_ahead_by_enough_pauses_and_to_no_lower_class(seqs: list[Served], priority: int) -> None:
    chosen = pausable(seqs, priority, NOW, TUNING)
    for seq in seqs:
        pauses = ahead_s(seq, NOW) > TUNING.pauses_s and seq.priority <= priority
        assert chosen.count(seq) == pauses
    ahead = [ahead_s(seq, NOW) for seq in chosen]
    assert ahead == sorted(ahead, reverse=True)


@given(seq=served, pause_s=st.floats(0, 60), passed_s=st.floats(0, 100))
def test_one_rests_until_its_token_is_due_or_its_pause_is_over(
    seq: Served, pause_s: float, passed_s: float
) -> None:
    ends_at, now = NOW + pause_s, NOW + passed_s
    assert rests(seq, ends_at, now, TUNING) == (now < ends_at and ahead_s(seq, now) > TUNING.returns_s)
    if rests(seq, ends_at, now, TUNING):
        due_at = seq.first_token_at + (seq.num_after_first + 1) * seq.tpot_s
        assert now + TUNING.returns_s < due_at, "it comes back too late"


def test_one_that_pauses_rests_for_a_while_at_least() -> None:
    """Otherwise two would take turns with each step."""
    assert TUNING.returns_s + 0.3 < TUNING.pauses_s < TUNING.counts_s
    seq = Served(num_after_first=11)
    assert pausable([seq], 0, NOW, TUNING) == [seq]
    assert rests(seq, inf, NOW, TUNING)
    assert rests(seq, inf, NOW + 0.5, TUNING)
    assert not rests(seq, inf, NOW + 0.7, TUNING)
    assert not rests(seq, NOW + 0.2, NOW + 0.2, TUNING)
    assert not rests(seq, -inf, NOW, TUNING)

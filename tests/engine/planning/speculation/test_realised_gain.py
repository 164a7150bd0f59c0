"""What draft tokens gain and cost on devices of several kinds, in virtual time: the planner learns all it knows of them from its
steps."""

import random
from collections.abc import Callable
from collections.abc import Sequence as SeqOf
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from core.config.cluster_config import EngineConfig
from core.plan import PROPOSED, Sampled, SampledToken, SeqWork, StepPlan, StepResult
from core.types import Request, SamplingParams
from engine.planning.sequence import Sequence
from engine.planning.speculation.drafter import Draft, Drafter
from engine.planning.speculation.proposals import Proposals
from engine.planning.speculation.speculator import Speculator
from engine.planning.step_scheduler import StepScheduler
from engine.planning.step_time_fit import StepFits
from tests.engine.fifo_policy import FifoPolicy

Device = Callable[[int], float]
"""How long a step of so many tokens takes, in seconds."""
DEVICES: dict[str, Device] = {
    "bound by memory": lambda tokens: 0.010 + 0.00005 * tokens,
    "bound by computing": lambda tokens: 0.002 + 0.0013 * tokens,
    "both": lambda tokens: max(0.010, 0.0003 * tokens),
    "in tiles of 8": lambda tokens: 0.004 + 0.006 * -(-tokens // 8),
}
WAIT_S = 0.0008
"""How long the device waits for a step that is not planned ahead."""


class DraftSource:
    """A drafter that finds something for a share of the sequences, of which a share of the tokens are right."""

    def __init__(self, found: float, right: float, rng: random.Random) -> None:
        self._found, self._right, self._rng = found, right, rng

    def draft(self, seqs: SeqOf[Sequence], most: int) -> list[Draft | None]:
        return [
            Draft(tuple(7 if self._rng.random() < self._right else 8 for _ in range(most)), "", 4)
            if self._rng.random() < self._found
            else None
            for _ in seqs
        ]

    def verified(self, seq: Sequence, proposed: int, right: int) -> None: ...

    def left(self, seq: Sequence) -> None: ...


def sampled(work: SeqWork) -> Sampled:
    """What a rank samples for which token 7 follows everything."""
    right = next((at for at, token in enumerate(work.drafts) if token != 7), len(work.drafts))
    return Sampled(work.key, 7, more=(SampledToken(7),) * right)


@dataclass(frozen=True)
class DraftModel:
    """On the rank: as often right as it says, at the price of so long for one more draft token of all sequences. Before it
    proposes it has to read each sequence, which takes so long, too, and then each token that it has missed since, up to 512 in a
    step, which takes `missed_s`."""

    right: float
    each_s: float
    reading_s: float
    missed_s: float = 0.0
    known: dict[str, int] = field(default_factory=dict[str, int])
    """The tokens of each sequence that it has read."""

    def propose(self, plan: StepPlan, rng: random.Random) -> tuple[StepPlan, float, float]:
        """Return the plan with draft tokens, how long it took to make them, and how long to read before."""
        asked = [work for work in plan.work if PROPOSED in work.drafts]
        num_new = sum(work.key not in self.known for work in asked)
        missed = [work.start - self.known.get(work.key, work.start) for work in asked]
        num_missed = min(512, sum(count for count in missed if count > 16))  # fewer are its own draft tokens
        self.known.update((work.key, work.known_end) for work in asked)
        work = tuple(
            replace(work, drafts=tuple(7 if rng.random() < self.right else 8 for _ in work.drafts))
            for work in plan.work
        )
        longest = max((len(work.drafts) for work in asked), default=0)
        reading_s = num_new * self.reading_s + num_missed * self.missed_s
        return replace(plan, work=work), longest * self.each_s, reading_s


def pace(
    num_seqs: int, device: Device, drafter: Drafter | None, length: int, model: DraftModel | None = None
) -> float:
    """Return tokens a second while all sequences decode. Two steps are in flight, and each is disturbed a little. `model`: who
    proposes what Proposals ask for."""
    config = EngineConfig(max_num_seqs=64, max_batch_tokens=512)
    speculator = Speculator(drafter, config, 2000) if drafter is not None else None
    scheduler = StepScheduler(config, 5000, 2000, FifoPolicy(), speculator=speculator)
    for i in range(num_seqs):
        sampling = SamplingParams(max_tokens=length)
        scheduler.sequences.add(Request(id=str(i), prompt=(i, 5), sampling=sampling, reply_to="f"))
    fits, rng = StepFits(), random.Random(1)
    flight: list[tuple[StepPlan, float, StepResult]] = []
    now, free_at, started_at, num_sampled = 0.0, 0.0, -1.0, 0
    while scheduler.load().num_running == num_seqs or started_at < 0:
        while len(flight) < 2 and (plan := scheduler.plan(now, fits.models)):
            took_s = device(plan.num_tokens) * (1 + abs(rng.gauss(0, 0.2)))
            proposed, proposing_s, reading_s = (
                model.propose(plan, rng) if model is not None else (plan, 0.0, 0.0)
            )
            free_at = max(now + WAIT_S, free_at) + took_s + proposing_s + reading_s
            result = StepResult(
                step=plan.step,
                sampled=tuple(sampled(work) for work in proposed.work if work.samples),
                duration_s=took_s,
                proposing_s=0.0 if reading_s else proposing_s,
                reading_s=reading_s and reading_s + proposing_s,
            )
            flight.append((plan, free_at, result))
        plan, now, result = flight.pop(0)
        fits.observe(plan, result.duration_s)
        tokens = scheduler.commit(plan, result, now)
        if started_at >= 0:
            num_sampled += len(tokens)
        elif scheduler.load().num_decoding == num_seqs:
            started_at = now
    return num_sampled / (now - started_at)


@cache
def pace_without(num_seqs: int, name: str, length: int) -> float:
    """The pace without draft tokens."""
    return pace(num_seqs, DEVICES[name], None, length)


def gain(num_seqs: int, name: str, found: float, right: float, length: int = 400) -> float:
    drafter = DraftSource(found, right, random.Random(2))
    return pace(num_seqs, DEVICES[name], drafter, length) / pace_without(num_seqs, name, length)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("found", "right"), [(1.0, 0.0), (1.0, 0.3), (0.3, 0.6), (0.5, 0.9)])
def test_at_batch_32_draft_tokens_never_cost_two_percent(name: str, found: float, right: float) -> None:
    assert gain(32, name, found, right) > 0.98


@pytest.mark.parametrize("name", DEVICES)
def test_at_batch_8_draft_tokens_cost_next_to_nothing_once_that_is_learned(name: str) -> None:
    assert gain(8, name, 1.0, 0.0, length=1200) > 0.98


@pytest.mark.parametrize(
    ("num_seqs", "name", "least"),
    [
        (1, "bound by memory", 1.6),
        (8, "bound by memory", 2.0),
        (32, "bound by memory", 1.3),
        (8, "both", 1.8),
    ],
)
def test_where_a_device_has_time_to_spare_draft_tokens_gain_what_they_can(
    num_seqs: int, name: str, least: float
) -> None:
    assert gain(num_seqs, name, 0.5, 0.9) > least


def gain_of_model(
    num_seqs: int, name: str, right: float, each: float, length: int = 400, missed: float = 0.0
) -> float:
    """`each`: what one more draft token of a sequence takes, by a step of one token; `missed`: the same for a token that it has
    to read since it was not asked for long."""
    device = DEVICES[name]
    model = DraftModel(right, each * device(1), reading_s=each * device(1), missed_s=missed * device(1))
    return pace(num_seqs, device, Proposals(), length, model) / pace_without(num_seqs, name, length)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("right", "each"), [(0.0, 0.1), (0.6, 0.3), (0.9, 0.5), (0.3, 1.0)])
def test_at_batch_32_a_draft_model_never_costs_three_percent(name: str, right: float, each: float) -> None:
    """With the reading of all sequences, once, before it is known what its draft tokens are worth."""
    assert gain_of_model(32, name, right, each, length=1200) > 0.97


@pytest.mark.parametrize(("right", "each", "least"), [(0.7, 0.1, 1.6), (0.9, 0.2, 1.8), (0.6, 0.4, 1.05)])
def test_a_draft_model_proposes_as_far_ahead_as_it_gains(right: float, each: float, least: float) -> None:
    assert gain_of_model(1, "bound by memory", right, each) > least


def test_a_draft_model_that_costs_more_than_it_gains_is_asked_next_to_never() -> None:
    assert gain_of_model(1, "bound by memory", 0.9, 2.0, length=1200) > 0.98


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("right", "each"), [(0.3, 0.2), (0.9, 1.0)])
def test_reading_what_was_said_since_the_last_trial_takes_a_small_share_of_the_time(
    name: str, right: float, each: float
) -> None:
    """What 64 steps have said takes as long to read as some steps."""
    assert gain_of_model(8, name, right, each, length=1900, missed=0.02) > 0.98

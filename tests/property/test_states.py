"""Recurrent states in the engine's accounting, against a rank that knows which tokens each state has taken in."""

import random
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.config.cluster_config import EngineConfig
from core.messages import Grant
from core.plan import StepPlan, StepResult
from core.types import Request
from engine.planning.planned_reservations import Reservation
from engine.planning.speculation.speculator import Speculator
from engine.planning.step_scheduler import StepScheduler
from tests.engine.fifo_policy import FifoPolicy
from tests.property.below import Below
from tests.property.fake_rank import NONSENSE, FakeRank
from tests.property.half_right import HalfRight
from tests.property.some_requests import some_requests
from tests.property.test_engine_accounting import Drive, Moves, check_output


class RankWithStates(FakeRank):
    """Refuses to add a token to a state that has not taken in exactly those before it, or that anybody else has written. States take
    in draft tokens that were right when a step is over."""

    def __init__(
        self, num_blocks: int, block_size: int, rng: random.Random, num_states: int, forced: float
    ) -> None:
        super().__init__(num_blocks, block_size, rng, put_off=0.0, forced=forced)
        self.num_states = num_states
        self.taken_in: dict[int, list[int]] = {}
        """By block: the tokens that its part of a state has taken in."""
        self.num_copies = 0
        self.sent_states: list[str] = []
        self.sent_tokens: dict[str, list[int]] = {}

    def step(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            assert copy.num_tokens == self.size, "a block of keys and values was copied"
            self.taken_in[copy.dst] = list(self.taken_in[copy.src])
            self.slots[copy.dst] = [None] * self.size
        self.num_copies += len(plan.copies)
        for work in plan.work:
            for block in work.block_ids[self.num_states + work.start // self.size :]:
                self.taken_in.pop(block, None)
        rest = [replace(w, block_ids=w.block_ids[self.num_states :], push=None) for w in plan.work]
        result = super().step(replace(plan, work=tuple(rest), copies=()))
        right = {one.key: len(one.more) for one in result.sampled}
        for work in plan.work:
            end = work.known_end + right.get(work.key, 0)
            tokens = self.seqs[work.key]
            for block in work.block_ids[: self.num_states]:
                held = self.taken_in.get(block) if work.start else []
                assert held == tokens[: work.start], f"{work.key} goes on from another state than its own"
                self.taken_in[block] = tokens[:end]
                self.slots[block] = [None] * self.size
            if work.push:
                shift, push = self.num_states * self.size, work.push
                first = push.start - shift
                self.sent_tokens.setdefault(work.key, []).extend(range(first, first + push.count))
                assert push.state_tokens == (shift if work.samples else 0)
                self.sent_states += [work.key] * work.samples
        return result

    def run_out(self, plan: StepPlan) -> None:
        rest = [replace(w, block_ids=w.block_ids[self.num_states :], push=None) for w in plan.work]
        super().run_out(replace(plan, work=tuple(rest), copies=()))
        states = [block for work in plan.work for block in work.block_ids[: self.num_states]]
        states += [copy.dst for copy in plan.copies]
        self.taken_in |= {block: [NONSENSE] for block in states if self.rng.random() < 0.7}

    def receive(self, request: Request, reservation: Reservation) -> None:
        blocks = reservation.block_ids
        super().receive(request, replace(reservation, block_ids=blocks[self.num_states :]))
        for block in blocks[self.num_states :]:
            self.taken_in.pop(block, None)
        self.taken_in |= {block: list(request.tokens) for block in blocks[: self.num_states]}


class MovesWithStates(Moves):
    def place_one(self) -> None:
        if self.below is not None and self.todo and len(self.below.under_way) < 3:
            self.below.restore(self.rng.choice(self.todo[-6:]))
        super().place_one()

    def push(self, request: Request) -> None:
        shift = self.drive.rank.num_states * self.drive.rank.size  # type: ignore[attr-defined]
        grant = Grant(
            id="g" + request.key,
            key=request.key,
            epoch=0,
            holder="d",
            incarnation="i",
            regions=(),
            block_ids=(),
            first_token=0,
            num_tokens=shift + len(request.prompt),
            ttl_s=1.0,
            room_tokens=self.rng.randrange(6),
        )
        self.drive.limits[request.key] = 9
        self.drive.scheduler.sequences.add(request, grant)
        self.held.add(request.key)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    seed=st.integers(0, 2**32),
    num_states=st.integers(1, 5),
    more_blocks=st.integers(6, 80),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 24),
    depth=st.sampled_from([1, 2]),
    no_memory=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    drafts=st.booleans(),
    forced=st.sampled_from([0.0, 0.3]),
)
def test_every_state_takes_in_each_token_once_and_every_block_comes_back(
    seed: int,
    num_states: int,
    more_blocks: int,
    block_size: int,
    budget: int,
    *,
    depth: int,
    no_memory: float,
    drafts: bool,
    forced: float,
) -> None:
    rng = random.Random(seed)
    num_blocks = num_states + more_blocks
    config = EngineConfig(
        block_size=block_size,
        max_batch_tokens=budget,
        max_num_seqs=rng.randint(1, 8),
        speculate_tokens=rng.randint(1, 6),
    )
    drive = Drive(config, num_blocks, depth, rng, 1, 0.0, no_memory=no_memory)
    speculator = Speculator(HalfRight(rng) if drafts else None, config, 10_000)
    drive.scheduler = StepScheduler(
        config, num_blocks, 10_000, FifoPolicy(), speculator=speculator, num_state_blocks=num_states
    )
    drive.rank = rank = RankWithStates(num_blocks, block_size, rng, num_states, forced)
    play(drive, rank, MovesWithStates(drive, rng, some_requests(rng, more_blocks * block_size)))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    seed=st.integers(0, 2**32),
    num_states=st.integers(1, 5),
    depth=st.sampled_from([1, 2]),
    no_memory=st.sampled_from([0.0, 0.0, 0.05]),
)
def test_prefixes_come_back_from_below_with_the_states_behind_them(
    seed: int, num_states: int, depth: int, no_memory: float
) -> None:
    serve_with_tiers(seed, num_states, depth, no_memory)


def test_states_do_come_back_from_below() -> None:
    served = [serve_with_tiers(seed, 4, 2, 0.0) for seed in range(4)]
    assert sum(below.num_restored for below in served) > 0, "the property shows nothing"
    assert sum(below.scheduler.load().num_returned for below in served) > 0, "nor of preempted sequences"


def serve_with_tiers(seed: int, num_states: int, depth: int, no_memory: float) -> Below:
    rng = random.Random(seed)
    more_blocks = rng.randint(60, 120)
    num_blocks, config = num_states + more_blocks, EngineConfig(block_size=1, max_num_seqs=2)
    drive = Drive(config, num_blocks, depth, rng, 1, 0.0, no_memory=no_memory)
    drive.scheduler = StepScheduler(config, num_blocks, 10_000, FifoPolicy(), num_state_blocks=num_states)
    drive.rank = rank = RankWithStates(num_blocks, 1, rng, num_states, forced=0.0)
    requests = some_requests(rng, more_blocks) + some_requests(rng, more_blocks)
    again = [replace(one, id=f"{n}", sibling="") for n, one in enumerate(requests * 2)]
    moves = MovesWithStates(drive, rng, again)
    moves.below = below = Below(drive.scheduler, rank, rng, rank.taken_in, num_states, forgets=0.05)
    play(drive, rank, moves)
    return below


def play(drive: Drive, rank: RankWithStates, moves: MovesWithStates) -> None:
    """Make moves until all requests have been served."""
    for _ in range(8000):
        moves.place_one()
        moves.abort_one()
        moves.release_held()
        if moves.below is not None and moves.rng.random() < 0.1:
            moves.below.check_reports(moves.ends)
        if not drive.turn() and moves.are_over:
            break
    else:
        raise AssertionError("it never ends")
    for request in moves.requests:
        if request.key in drive.limits and request.key not in moves.aborted:
            # One more token would have changed the state while it was being sent.
            assert len(drive.out[request.key]) == 1
            assert rank.sent_tokens[request.key] == list(range(len(request.prompt)))
            assert rank.sent_states.count(request.key) == 1
        else:
            check_output(drive, request, request.key in moves.aborted)
    assert drive.scheduler.load().num_used_blocks == 0
    drive.scheduler.check_integrity()

"""The engine's accounting against a rank that knows which token every KV slot holds."""

import random
from dataclasses import replace
from itertools import chain
from typing import Literal

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from core.config.cluster_config import EngineConfig
from core.kv import KVLayout, KVShard, lay_out
from core.messages import Grant
from core.plan import StepPlan, StepResult
from core.types import FinishReason, Request, TokenOut
from engine.planning.dp_scheduler import make_planner
from engine.planning.speculation.speculator import Speculator
from engine.planning.step_scheduler import StepScheduler
from engine.ranks.rank_share import share_of
from tests.engine.fifo_policy import FifoPolicy
from tests.property.below import Below
from tests.property.fake_rank import FakeRank, next_token
from tests.property.half_right import HalfRight
from tests.property.some_requests import some_requests


def expected(request: Request) -> list[int]:
    tokens = list(request.tokens)
    out = len(request.emitted)
    while out < request.sampling.max_tokens:
        tokens.append(next_token(tokens))
        out += 1
        if tokens[-1] in request.sampling.stop_token_ids and out > request.sampling.min_tokens:
            break
    return tokens[len(request.tokens) :]


class Drive:
    """Runs a scheduler with `depth` steps in flight and checks its accounting after every move."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        depth: int,
        rng: random.Random,
        num_groups: int,
        put_off: float,
        *,
        no_memory: float = 0.0,
        step_s: float = 0.0,
    ) -> None:
        """`num_groups` serve sequences of their own, each in `num_blocks`. `put_off`: a share of the samples. `no_memory`: of the
        steps, until 20 have found none. `step_s`: how long a step takes."""
        total = num_blocks * num_groups
        self.scheduler = (
            StepScheduler(
                config, total, 10_000, FifoPolicy(), speculator=Speculator(HalfRight(rng), config, 10_000)
            )
            if config.speculate != "none" and num_groups == 1
            else make_planner(config, total, 10_000, FifoPolicy(), num_groups)
        )
        self.rank = FakeRank(total, config.block_size, rng, put_off)
        shard = KVShard.whole(
            KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=config.block_size, dtype="float32")
        )
        self.pools = lay_out([shard] * num_groups, num_blocks, range(num_groups))
        self.depth, self.rng = depth, rng
        self.now, self.step_s = 0.0, step_s
        self.flight: list[tuple[StepPlan, StepResult | None]] = []
        """Without a result: no memory was found for the step, or for one before it."""
        self.no_memory, self.num_to_fail = no_memory, 20
        self.paused: list[str] = []
        self.lost: list[str] = []
        """Pushed sequences of steps that were taken back."""
        self.again: int | None = None
        """The number of the step that was taken back last, if none was planned since then."""
        self.out: dict[str, list[TokenOut]] = {}
        self.limits: dict[str, int] = {}
        """Pushed sequences, and how many tokens each may sample before it is held."""

    def is_held(self, key: str) -> bool:
        sampled = self.out.get(key, [])
        full = bool(sampled) and not self.scheduler.sequences.has_room(key)
        return len(sampled) >= self.limits[key] or bool(sampled and sampled[-1].finish) or full

    def check_shares(self, plan: StepPlan) -> None:
        """Each group's ranks get what is in their blocks, in their own numbers, and together all of it. Each knows of all."""
        shares = [share_of(plan, self.pools, rank) for rank in range(len(self.pools))]
        assert [work.key for share in shares for work in share.work] == [work.key for work in plan.work]
        assert sorted(new.key for share in shares for new in share.new) == sorted(n.key for n in plan.new)
        assert sum(len(share.copies) for share in shares) == len(plan.copies)
        for rank, share in enumerate(shares):
            blocks = [block for work in share.work for block in work.block_ids]
            blocks += [block for copy in share.copies for block in (copy.src, copy.dst)]
            assert all(0 <= block < self.pools[0].num_blocks for block in blocks)
            own, *others = [
                [(work.key, work.start, work.count) for work in group]
                for group in share.groups or (share.work,)
            ]
            assert own == [(work.key, work.start, work.count) for work in share.work]
            others.insert(rank, own)
            assert list(chain(*others)) == [(work.key, work.start, work.count) for work in plan.work]

    def make_masks(self, share: float) -> bool:
        """Make the masks of some of the late sequences."""
        made = [key for key in self.rank.late if self.rng.random() < share]
        for key in made:
            self.scheduler.sequences.mask_ready(key, self.rank.late.pop(key))
        return bool(made)

    def execute(self, plan: StepPlan) -> StepResult | None:
        if self.flight and self.flight[-1][1] is None:
            return None
        if not self.num_to_fail or self.rng.random() >= self.no_memory:
            return self.rank.step(plan)
        self.num_to_fail -= 1
        self.rank.run_out(plan)
        return None

    def take_back(self, first: StepPlan) -> None:
        self.flight.clear()
        back = self.scheduler.take_back()
        self.paused += back.paused
        self.lost += back.lost
        self.again = first.step
        self.scheduler.check_integrity()

    def go_on(self) -> None:
        """Some of the paused sequences are read no more."""
        for key in [key for key in self.paused if self.rng.random() < 0.5]:
            self.paused.remove(key)
            self.scheduler.sequences.go_on(key)

    def turn(self) -> bool:
        self.go_on()
        self.scheduler.sessions.read_due(self.now)
        while len(self.flight) < self.depth and (plan := self.scheduler.plan(self.now)):
            assert self.again in (None, plan.step)
            self.again = None
            self.flight.append((plan, self.execute(plan)))
            self.check_shares(plan)
            self.scheduler.check_integrity()
            if len(self.flight) == self.depth:
                self.make_masks(0.3)  # heard of before its lateness is known
        if not self.flight:
            return self.make_masks(1.0)
        plan, result = self.flight.pop(0)
        if result is None:
            self.take_back(plan)
            return True
        self.now += self.step_s
        for token in self.scheduler.commit(plan, result, self.now):
            self.out.setdefault(token.key, []).append(token)
            if token.key in self.limits and self.is_held(token.key):
                self.scheduler.sequences.hold(token.key)
        self.scheduler.check_integrity()
        return True


class Moves:
    """What an instance may be asked to do with requests, at random."""

    def __init__(self, drive: Drive, rng: random.Random, requests: list[Request]) -> None:
        self.drive, self.rng, self.requests = drive, rng, requests
        self.todo, self.drops = requests[::-1], random.Random(0)
        self.aborted: set[str] = set()
        self.held: set[str] = set()
        """Pushed sequences that are still to be released."""
        self.below: Below | None = None
        self.ends = [replace(request, emitted=(*request.emitted, *expected(request))) for request in requests]

    @property
    def are_over(self) -> bool:
        return not self.todo and not self.held and (self.below is None or self.below.is_idle)

    def run(self) -> None:
        for _ in range(8000):
            self.place_one()
            self.abort_one()
            self.drop_cache()
            self.release_held()
            if self.below is not None and self.rng.random() < 0.2:
                self.below.check_reports(self.ends)
            if not self.drive.turn() and self.are_over:
                return
        raise AssertionError("it never ends")

    def place_one(self) -> None:
        """Compute a request here, push it, or take it over."""
        if self.below is not None:
            self.below.turn()
        if not self.todo or self.rng.random() >= 0.5:
            return
        request, kind = self.todo.pop(), self.rng.random()
        self.drive.scheduler.sessions.begins(request, self.drive.now)
        if kind < 0.5:
            self.drive.scheduler.sequences.add(request)
        elif kind < 0.75:
            self.push(request)
        elif (reservation := self.drive.scheduler.reservations.reserve(request)) is None:
            self.todo.append(request)
        elif not reservation.block_ids:
            self.drive.scheduler.reservations.compute(request.key)
        else:
            self.drive.rank.receive(request, reservation)
            self.take_over(request)

    def push(self, request: Request) -> None:
        room = self.rng.randrange(6)
        grant = Grant(
            id="g" + request.key,
            key=request.key,
            epoch=0,
            holder="d",
            incarnation="i",
            regions=(),
            block_ids=(),
            first_token=0,
            num_tokens=len(request.prompt),
            ttl_s=1.0,
            room_tokens=room,
        )
        self.drive.limits[request.key] = 1 + self.rng.randint(0, room)
        self.drive.scheduler.sequences.add(request, grant)
        self.held.add(request.key)

    def take_over(self, request: Request) -> None:
        """Give the reservation back, compute what is missing, or go on with the first token."""
        first = next_token(list(request.tokens))
        if self.rng.random() < 0.3:
            self.drive.scheduler.reservations.release(request.key)
            self.aborted.add(request.key)
        elif self.rng.random() < 0.5:
            self.drive.scheduler.reservations.compute(request.key)
        else:
            done = request.sampling.max_tokens == 1 or (
                first in request.sampling.stop_token_ids and not request.sampling.min_tokens
            )
            token = TokenOut(
                request_id=request.id,
                attempt=0,
                index=0,
                token=first,
                finish=FinishReason.STOP if done else None,
            )
            self.drive.out.setdefault(request.key, []).append(token)
            self.drive.scheduler.reservations.activate(request.key, [token], self.drive.now)

    def abort_one(self) -> None:
        if self.rng.random() >= 0.05:
            return
        victim = self.rng.choice(self.requests).key
        if victim not in {request.key for request in self.todo} and victim not in self.held:
            self.drive.scheduler.sequences.abort(victim)
            self.aborted.add(victim)

    def drop_cache(self) -> None:
        if self.drops.random() < 0.02:
            num_available = self.drive.scheduler.load().num_available_blocks
            assert self.drive.scheduler.prefixes.drop_cache() <= num_available
            assert self.drive.scheduler.load().num_available_blocks == num_available
            self.drive.scheduler.check_integrity()
        if self.drops.random() < 0.02:
            tell = self.drops.choice(
                (self.drive.scheduler.sessions.release, self.drive.scheduler.sessions.prefetch)
            )
            tell(self.drops.choice(("", "t")), "a")
            self.drive.scheduler.check_integrity()

    def release_held(self) -> None:
        for key in self.drive.lost:
            self.drive.scheduler.sequences.abort(key)
            self.drive.scheduler.reservations.release(key)
            self.held.discard(key)
            self.aborted.add(key)
        self.drive.lost.clear()
        for key in list(self.held):
            if self.rng.random() < 0.1 and key not in self.drive.paused and self.drive.is_held(key):
                self.drive.scheduler.reservations.release(key)
                self.held.discard(key)


def check_end(moves: "Moves", num_blocks: int) -> None:
    """Check that every request has its tokens, and that all blocks are free."""
    drive = moves.drive
    for request in moves.requests:
        check_output(drive, request, request.key in moves.aborted)
    assert drive.scheduler.load().num_used_blocks == 0
    assert drive.scheduler.load().num_available_blocks == num_blocks
    drive.scheduler.check_integrity()


def check_output(drive: Drive, request: Request, aborted: bool) -> None:
    tokens = [token.token for token in drive.out.get(request.key, [])]
    full = expected(request)
    if aborted:
        assert tokens == full[: len(tokens)]
    elif request.key in drive.limits:
        assert 1 <= len(tokens) <= drive.limits[request.key]
        assert tokens == full[: len(tokens)]
        num_pushed = len(request.prompt) + len(tokens) - 1  # no step computes the last one's KV
        assert drive.rank.pushed[request.key] == list(range(num_pushed))
    else:
        assert tokens == full, request.key
        assert [token.index for token in drive.out[request.key]] == list(range(len(full)))
        assert drive.out[request.key][-1].finish is not None


@settings(
    max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(6, 40),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 24),
    depth=st.sampled_from([1, 2]),
    cache=st.booleans(),
    num_groups=st.sampled_from([1, 1, 2, 3]),
    put_off=st.sampled_from([0.0, 0.0, 0.2, 0.7]),
    speculate=st.sampled_from(["none", "ngram"]),
    no_memory=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    tiers=st.booleans(),
)
@example(  # a sibling that was given blocks which the step that is taken back was to compute
    seed=2635237701, num_blocks=6, block_size=4, budget=6, depth=2, cache=False, num_groups=1, put_off=0.0,
    speculate="none", no_memory=0.3, tiers=False,
)  # fmt: skip
def test_every_sequence_gets_its_tokens_and_every_block_comes_back(
    seed: int,
    num_blocks: int,
    block_size: int,
    budget: int,
    *,
    depth: int,
    cache: bool,
    num_groups: int,
    put_off: float,
    speculate: Literal["none", "ngram"],
    no_memory: float,
    tiers: bool,
) -> None:
    rng = random.Random(seed)
    config = EngineConfig(
        block_size=block_size,
        max_batch_tokens=budget,
        max_num_seqs=rng.randint(1, 8),
        prefix_cache=cache,
        speculate=speculate,
        speculate_tokens=rng.randint(1, 6),
    )
    drive = Drive(config, num_blocks, depth, rng, num_groups, put_off, no_memory=no_memory)
    requests = some_requests(rng, num_blocks * block_size)
    moves = Moves(drive, rng, requests)
    if tiers:
        moves.below = Below(drive.scheduler, drive.rank, rng, forgets=0.1)
    moves.run()
    check_end(moves, num_blocks * num_groups)

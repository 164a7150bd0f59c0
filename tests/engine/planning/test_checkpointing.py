"""Where sequences leave checkpoints of their recurrent states, and what a request that goes on makes of one."""

import random

import pytest

from core.config.cluster_config import EngineConfig
from core.types import FinishReason, Request, SamplingParams, TokenOut
from engine.planning.step_scheduler import StepScheduler
from tests.engine.fifo_policy import FifoPolicy
from tests.property.fake_rank import next_token
from tests.property.test_states import RankWithStates

SIZE, STATE, BLOCKS = 2, 5, 400
APART = 16 * SIZE
"""The tokens between the checkpoints of a sequence that generates."""


class Served:
    def __init__(self, num_blocks: int = BLOCKS) -> None:
        config = EngineConfig(block_size=SIZE, max_batch_tokens=64)
        self.scheduler = StepScheduler(config, num_blocks, 1000, FifoPolicy(), num_state_blocks=STATE)
        self.rank = RankWithStates(num_blocks, SIZE, random.Random(0), STATE, forced=0.0)
        self.num_computed = 0
        self.left: list[int] = []
        """The blocks of tokens behind which checkpoints have left the pool."""
        self._depth = {-1: 0}
        self.scheduler.prefixes.on_kept(self._kept, lambda block, _, __: self.left.append(self._depth[block]))

    def _kept(self, salt: str, parent: int, tokens: tuple[int, ...], block: int, _: int) -> None:
        self._depth[block] = self._depth[parent] + 1

    def run(self) -> None:
        while (plan := self.scheduler.plan(0.0)) is not None:
            self.num_computed += plan.num_tokens
            self.scheduler.commit(plan, self.rank.step(plan), 0.0)
            self.scheduler.check_integrity()

    def hand_over(self, one: Request) -> None:
        """Another instance computes the request's prompt and samples the first token."""
        reservation = self.scheduler.reservations.reserve(one)
        assert reservation is not None
        assert reservation.block_ids
        self.rank.receive(one, reservation)
        is_over = len(one.emitted) + 1 == one.sampling.max_tokens
        first = TokenOut(
            request_id=one.id,
            attempt=0,
            index=len(one.emitted),
            token=next_token([*one.tokens]),
            finish=FinishReason.LENGTH if is_over else None,
        )
        self.scheduler.reservations.activate(one.key, [first], 0.0)
        self.run()

    def num_usable(self, tokens: tuple[int, ...]) -> int:
        """The number of blocks that a request with these tokens could go on from."""
        return self.scheduler.prefixes.cached_prefix(request("other", (*tokens, 0), 1)).num_usable


def request(name: str, prompt: tuple[int, ...], count: int, emitted: tuple[int, ...] = ()) -> Request:
    sampling = SamplingParams(max_tokens=len(emitted) + count)
    return Request(id=name, prompt=prompt, sampling=sampling, reply_to="f", emitted=emitted)


def longer(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`tokens` and the `count` that are said behind them."""
    said = list(tokens)
    for _ in range(count):
        said.append(next_token(said))
    return tuple(said)


def test_a_sequence_that_generates_leaves_a_checkpoint_now_and_then_which_the_next_one_replaces() -> None:
    served, prompt = Served(), (1, 2, 3)
    tokens = longer(prompt, 3 * APART)
    served.scheduler.sequences.add(request("a", prompt, 3 * APART))
    served.run()
    assert [served.num_usable(tokens[:count]) * SIZE for count in (APART, 2 * APART, 3 * APART + 3)] == [
        0, 0, 2 * APART + 2
    ]  # fmt: skip


def test_what_another_instance_has_begun_leaves_its_first_where_a_block_ends() -> None:
    served, prompt = Served(), tuple(range(2 * APART + 1))
    served.hand_over(request("a", prompt, 6))
    assert served.num_usable(longer(prompt, 6)) * SIZE == 2 * APART + 2


def test_a_copy_that_ends_with_a_block_leaves_its_state_as_it_came() -> None:
    served, tokens = Served(), longer((1, 2, 3), 2 * APART - 3)
    served.hand_over(request("copy", (1, 2, 3), 1, tokens[3:]))
    assert served.num_usable(tokens) * SIZE == 2 * APART
    more = longer(tokens, 3)
    reservation = served.scheduler.reservations.reserve(request("moved", (1, 2, 3), 20, more[3:]))
    assert reservation is not None
    assert reservation.computes_rest
    assert reservation.matched_tokens == 2 * APART
    before = served.num_computed
    served.scheduler.reservations.compute("moved#0")
    served.run()
    assert served.num_computed - before == 3 + 19
    assert served.scheduler.load().num_used_blocks == 0


@pytest.mark.parametrize(("num_missing", "is_near"), [(APART, True), (2 * APART, False)])
def test_a_request_that_goes_on_is_computed_here_if_a_checkpoint_is_near(
    num_missing: int, is_near: bool
) -> None:
    served, tokens = Served(), longer((1, 2, 3), APART - 3)
    served.hand_over(request("copy", (1, 2, 3), 1, tokens[3:]))
    more = longer(tokens, num_missing)
    reservation = served.scheduler.reservations.reserve(request("again", (1, 2, 3), 20, more[3:]))
    assert reservation is not None
    assert reservation.computes_rest == is_near
    assert bool(reservation.block_ids) != is_near, "a state is written with all tokens that it has taken in"


def test_only_checkpoints_that_are_far_apart_leave_the_pool() -> None:
    served, prompt = Served(), tuple(range(100, 160))
    served.scheduler.sequences.add(request("a", prompt, 1))
    served.run()
    assert served.left == [29]
    served.scheduler.sequences.add(request("b", (*prompt, *range(20)), 1))
    served.run()
    assert served.num_usable((*prompt, *range(20))) == 39
    assert served.left == [29], "it has a few tokens more"
    served.scheduler.sequences.add(request("c", (*prompt, *range(34)), 1))
    served.run()
    assert served.left == [29, 46]

"""The hand-over tables under every order of facts: no release while a writer may write, and every run ends."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.handoff import (
    DECODE_OVER,
    DECODE_TABLE,
    MAY_BE_WRITTEN,
    PUSH_TABLE,
    Action,
    DecodeHandoff,
    DecodeState,
    Fact,
    PushAction,
    PushFact,
    PushHandoff,
    PushState,
)

GIVES_BLOCKS_AWAY = {Action.RELEASE, Action.COMPUTE, Action.ACTIVATE}
WRITER_IS_OUT = {Fact.COMPLETE, Fact.WRITER_FAILED, Fact.DRAINED, Fact.FENCED}


class World:
    """Tracks what is true outside: may the current writer still write?"""

    def __init__(self) -> None:
        self.handoff = DecodeHandoff()
        self.writer_may_write = False
        self.ended = 0

    def possible(self) -> list[Fact]:
        """Facts that can be true now. Those about a writer's end need a writer; late ones are tried apart."""
        always = [
            Fact.CANCELLED,
            Fact.TIMEOUT,
            Fact.ASSIGNED,
            Fact.NOBODY,
            Fact.RESERVED,
            Fact.RESERVED_LOCAL,
        ]
        return always + ([*WRITER_IS_OUT, Fact.WRITER_LOST] if self.writer_may_write else [Fact.WRITER_LOST])

    def step(self, fact: Fact) -> None:
        before = self.handoff.state
        action = self.handoff.on(fact)
        if fact in WRITER_IS_OUT and before in MAY_BE_WRITTEN:
            self.writer_may_write = False
        assert not (action in GIVES_BLOCKS_AWAY and self.writer_may_write), (before, fact, action)
        if action is Action.GRANT:
            assert not self.writer_may_write, "two writers"
            self.writer_may_write = True
        if self.handoff.state in DECODE_OVER and before not in DECODE_OVER:
            self.ended += 1


def explore(depth: int) -> int:
    """All interleavings of possible facts up to `depth`. Returns how many were tried."""
    tried = 0
    stack: list[tuple[Fact, ...]] = [()]
    while stack:
        path = stack.pop()
        world = World()
        for fact in path:
            world.step(fact)
        tried += 1
        if len(path) < depth and world.handoff.state not in DECODE_OVER:
            stack += [(*path, fact) for fact in world.possible()]
    return tried


def test_no_block_is_given_away_while_a_writer_may_write_it_in_all_orders_up_to_depth_5() -> None:
    assert explore(5) > 10_000


@given(st.lists(st.sampled_from(Fact), max_size=60), st.randoms(use_true_random=False))
def test_long_random_lives_end_at_most_once(facts: list[Fact], rng: object) -> None:
    world = World()
    for fact in facts:
        if fact in world.possible():
            world.step(fact)
    assert world.ended <= 1


def test_every_state_can_end() -> None:
    """From each state some facts lead to the end: nothing is stuck for good."""
    ends = set(DECODE_OVER)
    for _ in range(len(DecodeState)):
        ends |= {state for (state, _), (after, _) in DECODE_TABLE.items() if after in ends}
    assert ends == set(DecodeState)
    for state in set(DecodeState) - DECODE_OVER:
        assert any((state, fact) in DECODE_TABLE for fact in (Fact.CANCELLED, Fact.FENCED, Fact.TIMEOUT)), (
            state
        )


@given(st.lists(st.sampled_from(PushFact), max_size=30))
def test_the_writer_releases_once_and_only_when_it_is_quiet_or_delivered(facts: list[PushFact]) -> None:
    handoff, released = PushHandoff(), 0
    for fact in facts:
        state = handoff.state
        if handoff.on(fact) is PushAction.RELEASE:
            released += 1
            assert (state, fact) in {
                (PushState.SENDING, PushFact.DELIVERED),
                (PushState.STOPPING, PushFact.QUIET),
            }
    assert released <= 1
    assert (handoff.state is PushState.DONE) == (released == 1)


def test_doubled_facts_change_nothing() -> None:
    for (state, fact), (after, _) in itertools.chain(DECODE_TABLE.items(), PUSH_TABLE.items()):  # type: ignore[arg-type]
        again = DECODE_TABLE.get((after, fact)) or PUSH_TABLE.get((after, fact))  # type: ignore[arg-type]
        assert again is None or fact is Fact.TIMEOUT, (state, fact)

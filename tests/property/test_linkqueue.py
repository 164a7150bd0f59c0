"""The link's order under any sequence of arrivals and completions."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.linkqueue import LinkQueue, Turn

MAX_ACTIVE, DEPTH = 2, 2
HOLDERS = ["h0", "h1", "h2"]
Item = tuple[str, int, int]
"""(grant, number, how many may go out with it): each grant belongs to one holder and has one deadline."""


def take(items: deque[Item]) -> list[Item]:
    return [items.popleft() for _ in range(min(items[0][2], len(items)))]


class LinkQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: LinkQueue[Item] = LinkQueue(MAX_ACTIVE, DEPTH, take)
        self.waiting: dict[str, deque[Item]] = {}
        self.active: list[Turn[Item]] = []
        self.made = 0

    @staticmethod
    def holder(grant: str) -> str:
        return HOLDERS[int(grant) % 3]

    @staticmethod
    def urgency(grant: str) -> tuple[float, float]:
        return (0.0, float(int(grant) * 7 % 10))

    def may_start(self, grant: str) -> bool:
        at_holder = [turn for turn in self.active if turn.holder == self.holder(grant)]
        stalled = {turn.holder for turn in self.active if turn.slow}
        others = {turn.holder for turn in self.active} - stalled
        free = bool(at_holder) or len(others) < MAX_ACTIVE
        return bool(self.waiting[grant]) and len(at_holder) < DEPTH and free

    @rule(grant=st.integers(0, 8).map(str), together=st.integers(1, 3))
    def add(self, grant: str, together: int) -> None:
        self.made += 1
        item = (grant, self.made, together)
        self.queue.add(grant, self.holder(grant), self.urgency(grant), item)
        self.waiting.setdefault(grant, deque()).append(item)

    @rule()
    def serve(self) -> None:
        free = [grant for grant in self.waiting if self.may_start(grant)]
        turn = self.queue.next()
        if turn is None:
            assert not free
            return
        assert turn.holder == self.holder(turn.grant_id)
        assert self.urgency(turn.grant_id) == min(map(self.urgency, free)), "somebody more urgent was passed"
        assert turn.items == take(self.waiting[turn.grant_id]), "a grant's items keep their order"
        self.active.append(turn)

    @rule(grant=st.integers(0, 8).map(str))
    def drop(self, grant: str) -> None:
        assert list(self.queue.drop(grant)) == list(self.waiting.pop(grant, ()))

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.active) - 1))
        self.queue.done(self.active.pop(number))

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def stall(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.active)).slow = True

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.queue) == sum(map(len, self.waiting.values()))
        assert all(sum(turn.holder == holder for turn in self.active) <= DEPTH for holder in HOLDERS)


TestLinkQueue = LinkQueueMachine.TestCase


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=40))
def test_to_one_holder_everything_goes_out_by_deadline(arrivals: list[tuple[int, int]]) -> None:
    queue: LinkQueue[int] = LinkQueue(1, 1, lambda items: [items.popleft()])
    due = {grant: (0.0, float(deadline)) for grant, deadline in reversed(arrivals)}
    for number, (grant, _) in enumerate(arrivals):
        queue.add(str(grant), "h", due[grant], number)
    served: list[int] = []
    while turn := queue.next():
        served += turn.items
        queue.done(turn)
    deadlines = [due[arrivals[number][0]] for number in served]
    assert deadlines == sorted(deadlines)
    assert sorted(served) == list(range(len(arrivals)))
    assert len(queue) == 0

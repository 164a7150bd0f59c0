"""The link's order under any sequence of arrivals and completions."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.linkqueue import LinkQueue

MAX_ACTIVE = 2
HOLDERS = ["h0", "h1", "h2"]


class LinkQueueMachine(RuleBasedStateMachine):
    """Items are (grant, number): each grant belongs to one holder and has one deadline."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: LinkQueue[tuple[str, int]] = LinkQueue(MAX_ACTIVE)
        self.waiting: dict[str, list[int]] = {}
        self.active: dict[str, str] = {}
        self.slow: set[str] = set()
        self.made = 0

    @staticmethod
    def holder(grant: str) -> str:
        return HOLDERS[int(grant) % 3]

    @staticmethod
    def urgency(grant: str) -> tuple[float, float]:
        return (0.0, float(int(grant) * 7 % 10))

    @rule(grant=st.integers(0, 8).map(str))
    def add(self, grant: str) -> None:
        self.made += 1
        self.queue.add(grant, self.holder(grant), self.urgency(grant), (grant, self.made))
        self.waiting.setdefault(grant, []).append(self.made)

    @rule(num=st.integers(1, 3))
    def serve(self, num: int) -> None:
        found = self.queue.next()
        free = [g for g, items in self.waiting.items() if items and self.holder(g) not in self.active]
        if found is None:
            assert not free or len(set(self.active) - self.slow) >= MAX_ACTIVE
            return
        grant, holder, items = found
        assert holder == self.holder(grant)
        assert self.urgency(grant) == min(map(self.urgency, free)), "somebody more urgent was passed over"
        for _ in range(min(num, len(items))):
            assert items.popleft() == (grant, self.waiting[grant].pop(0)), "a grant's items keep their order"
        self.active[holder] = grant

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.active)))
        self.queue.done(holder, self.active.pop(holder))
        self.slow.discard(holder)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def stall(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.active)))
        self.queue.slow(holder)
        self.slow.add(holder)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.queue) == sum(map(len, self.waiting.values()))
        assert len(set(self.active) - self.slow) <= MAX_ACTIVE + len(self.slow)


TestLinkQueue = LinkQueueMachine.TestCase


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=40))
def test_to_one_holder_everything_goes_out_by_deadline(arrivals: list[tuple[int, int]]) -> None:
    queue: LinkQueue[int] = LinkQueue(1)
    due = {grant: (0.0, float(deadline)) for grant, deadline in reversed(arrivals)}
    for number, (grant, _) in enumerate(arrivals):
        queue.add(str(grant), "h", due[grant], number)
    served: list[int] = []
    while found := queue.next():
        grant_id, holder, items = found
        served.append(items.popleft())
        queue.done(holder, grant_id)
    deadlines = [due[arrivals[number][0]] for number in served]
    assert deadlines == sorted(deadlines)
    assert sorted(served) == list(range(len(arrivals)))
    assert len(queue) == 0

"""The sequences that an instance computes (`engine.planning.planner_protocol.Sequences`), in whichever group of ranks each is."""

from core.messages import Grant
from core.types import Request
from engine.planning.rank_groups import RankGroups
from engine.planning.sequence import State

_IDLE = {State.WAITING, State.RESERVED}


class PlannedSequences:
    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups

    @property
    def stuck_pushes(self) -> list[str]:
        stuck: list[str] = []
        for group in self._groups.every:
            states = {seq.state for seq in group.table.all.values()}
            if states <= _IDLE and not group.prefixes.held_blocks:
                stuck += [seq.key for seq in group.table.waiting if seq.push is not None]
        return stuck

    def check_fits(self, request: Request) -> None:
        self._groups.check_fits(request)

    def add(self, request: Request, push: Grant | None = None) -> None:
        self.check_fits(request)
        table = self._groups.by_cost(request)[0].table
        table.waiting.append(table.new(request, push))

    def abort(self, key: str) -> None:
        if found := self._groups.find(key):
            group, seq = found
            group.lifecycle.abort(seq)

    def has_room(self, key: str) -> bool:
        group, seq = self._groups.of(key)
        # One more token would change a recurrent state while it is being sent.
        may_go_on = seq.state is State.RUNNING and not seq.state_tokens
        return may_go_on and group.ledger.capacity(seq) >= len(seq.tokens)

    def hold(self, key: str) -> None:
        group, seq = self._groups.of(key)
        if seq.state is State.RUNNING:
            group.lifecycle.finish(seq)

    def go_on(self, key: str) -> None:
        if (found := self._groups.find(key)) and found[1].state is State.PAUSED:
            group, seq = found
            group.lifecycle.run(seq)

    def mask_ready(self, key: str, num_tokens: int) -> None:
        if found := self._groups.find(key):
            _, seq = found
            seq.num_masked = max(seq.num_masked, num_tokens)

"""Blocks that other instances write or read (`engine.planning.planner_protocol.Reservations`), in whichever group of ranks. A
sequence whose blocks are reserved is changed here alone, until it runs, waits or leaves."""

from collections.abc import Sequence as SeqOf
from dataclasses import dataclass

from core.errors import Bug
from core.types import Request, TokenOut
from engine.cache.radix_cache import PrefixMatch
from engine.planning.block_ledger import BlockLedger
from engine.planning.rank_groups import RankGroup, RankGroups
from engine.planning.sequence import Sequence, State

REST_BLOCKS = 3
"""Where the beginning of a sequence is here, at most so many blocks behind it are computed here, too. The last is not full, and
copies of two more may have been on their way when an instance was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Blocks for a request's known tokens. The first `matched_tokens` (whole blocks) are in the cache already."""

    key: str
    block_ids: tuple[int, ...]
    matched_tokens: int
    num_tokens: int
    computes_rest: bool = False
    """Whether the rest is so short that it is to be computed here. Where sequences have states, blocks are found for it then."""


class PlannedReservations:
    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups

    def reserve(self, request: Request) -> Reservation | None:
        self._groups.check_fits(request)
        for group in self._groups.by_cost(request):
            if (reservation := _reserve(group, request)) is not None:
                return reservation
        return None

    def make_room(self, request: Request, now: float) -> bool:
        group = self._groups.by_cost(request)[0]
        return group.preemption.make_room(request, len(request.tokens) + 1, now)

    def activate(self, key: str, sampled: SeqOf[TokenOut], now: float) -> None:
        group, seq = self._reserved(key)
        seq.know((token.token for token in sampled), now)
        seq.num_computed = len(seq.tokens) - 1
        group.ledger.has_come(seq)
        if sampled[-1].finish is not None:
            group.ledger.checkpointing.leave_state(seq)
            group.lifecycle.forget(seq)
        else:
            group.lifecycle.run(seq)

    def compute(self, key: str) -> None:
        group, seq = self._reserved(key)
        if seq.block_ids:
            group.lifecycle.run(seq)
        else:
            group.lifecycle.wait(seq)

    def release(self, key: str) -> None:
        if found := self._groups.find(key):
            group, seq = found
            group.lifecycle.release(seq)

    def _reserved(self, key: str) -> tuple[RankGroup, Sequence]:
        group, seq = self._groups.of(key)
        if seq.state is not State.RESERVED:
            raise Bug(f"{key} holds no reservation (it is {seq.state.name})")
        return group, seq


def _reserve(group: RankGroup, request: Request) -> Reservation | None:
    ledger, table = group.ledger, group.table
    match = ledger.find(request, request.tokens, partial=False)
    is_near = _begins_near(ledger, request, match)
    seq = table.new(request, None)
    num_matched = len(match.blocks) * ledger.block_size
    if not (match.state and is_near):
        if ledger.num_state_blocks:
            # A state is written as a whole, and with it all tokens that it has taken in.
            match = PrefixMatch(blocks=())
        # One block more than is known: the prefill instance may generate while it sends.
        least, most = len(seq.tokens) + 1, seq.num_prompt + request.sampling.max_tokens
        wanted = max(least, min(least + ledger.block_size, most))
        if not any(ledger.admit(seq, match, count, table.headroom) for count in (wanted, least)):
            group.lifecycle.disown(seq)
            return None
        num_matched = seq.num_computed
    # Otherwise it finds blocks, and has its state copied, as others do that are computed here.
    seq.state = State.RESERVED
    return Reservation(
        key=seq.key,
        block_ids=seq.table,
        matched_tokens=num_matched,
        num_tokens=len(seq.tokens),
        computes_rest=is_near,
    )


def _begins_near(ledger: BlockLedger, request: Request, match: PrefixMatch) -> bool:
    """Return whether what a request lacks of its KV is so little that it is to be computed here, whoever else could."""
    num_blocks = REST_BLOCKS if match.blocks else 1
    if match.state and request.emitted:  # nobody who is asked for it has more of what was generated
        num_blocks += ledger.checkpointing.num_apart
    return len(request.tokens) <= (len(match.blocks) + num_blocks) * ledger.block_size

"""A placement policy that hands every prompt over, so that a test of hand-overs has them whatever computing would cost."""

from collections.abc import Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement import Placement
from cluster.scheduler.placement.placement_policy import PlacementChoice, PlacementQuery


class ApartPolicy:
    """A PlacementPolicy: the decode instance with the fewest sequences, the prefill instance with the shortest queue. Without a
    prefill instance the decode instance computes the prompt."""

    def choose(
        self, ask: PlacementQuery, decodes: Sequence[Member], prefills: Sequence[Member], now: float
    ) -> PlacementChoice | None:
        decode = min(decodes, key=lambda m: m.num_seqs, default=None)
        return None if decode is None else self.choose_prefill(ask, decode, prefills, now)

    def choose_prefill(
        self, ask: PlacementQuery, decode: Member, prefills: Sequence[Member], now: float
    ) -> PlacementChoice:
        others = [m for m in prefills if m is not decode]
        return PlacementChoice(decode, min(others, key=lambda m: m.queued_tokens, default=None), 0.0)

    def has_prompt_room(self, member: Member, *, late: bool, timed: bool) -> bool:
        return member.tokens_before(late=late) < 4 * member.max_batch_tokens

    def least_work_s(self, ask: PlacementQuery, members: Sequence[Member]) -> float:
        return 0.0

    def placed(self, placed: Placement, computes: Member, num_decoding: int, now: float) -> None:
        pass

    def measured(self, member: Member) -> None:
        pass

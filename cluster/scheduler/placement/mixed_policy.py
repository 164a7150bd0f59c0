"""Chooses the policy that decides.

Where every instance registers for both roles, the scheduler says which does what: `slo_policy` decides by the targets, once the
instances have learned how long their steps take. Where pools have roles, their sizes say it, and a request goes where its
predicted seconds are fewest (`cost_policy`)."""

from collections.abc import Sequence

from cluster.scheduler.fleet.link_model import LinkModel
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.cost_policy import CostModel, CostPolicy
from cluster.scheduler.placement.outlook import LEARNED_STEPS
from cluster.scheduler.placement.placement_policy import PlacementChoice, PlacementQuery
from cluster.scheduler.placement.slo_policy import SloPolicy


class MixedPolicy:
    """A PlacementPolicy of two others."""

    def __init__(self, local_threshold_tokens: int, links: LinkModel) -> None:
        """`links` is what is assumed of links until they are measured."""
        costs = CostModel(links=links)
        self._by_cost = CostPolicy(local_threshold_tokens, costs)
        self._by_slo = SloPolicy(local_threshold_tokens, links=costs)

    def choose(
        self, ask: PlacementQuery, decodes: Sequence[Member], prefills: Sequence[Member], now: float
    ) -> PlacementChoice | None:
        free = all(_is_free(member) for member in decodes)
        policy = self._by_slo if free else self._by_cost
        return policy.choose(ask, decodes, prefills, now)

    def choose_prefill(
        self, ask: PlacementQuery, decode: Member, prefills: Sequence[Member], now: float
    ) -> PlacementChoice:
        policy = self._by_slo if _is_free(decode) else self._by_cost
        return policy.choose_prefill(ask, decode, prefills, now)

    def tokens_per_s(self, member: Member) -> float:
        return self._by_cost.tokens_per_s(member)

    def has_prompt_room(self, member: Member, *, late: bool) -> bool:
        policy = self._by_slo if _is_free(member) else self._by_cost
        return policy.has_prompt_room(member, late=late)

    def least_work_s(self, ask: PlacementQuery, members: Sequence[Member]) -> float:
        return self._by_slo.least_work_s(ask, members)

    def measured(self, member: Member) -> None:
        self._by_cost.measured(member)
        self._by_slo.measured(member)


def _is_free(member: Member) -> bool:
    """Return whether it does either role, and knows how long each of its steps takes."""
    if not (member.prefills and member.decodes):
        return False
    steps = member.steps
    return steps.decode.num_steps >= LEARNED_STEPS and steps.prompt.num_steps >= LEARNED_STEPS

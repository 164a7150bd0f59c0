"""Aggregated serving with chunked prefill (Sarathi-Serve, OSDI '24): every instance computes prompts and decodes, and prompts
ride in the room that decodes leave in a step of bounded size, so that they never stall them.

The bound is the token budget of the fleet's instances, chosen by the time-per-token target as the paper does (`token_budget`).
Between instances: the least predicted work, counting only what of the prompt is not cached there."""

from collections.abc import Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementChoice
from core.cost.steps import chunk_pairs
from sim.baselines.dispatch import Offer, decodes
from sim.catalogue.cost import ModelledStep

_BUDGETS = (4096, 2048, 1024, 512, 256, 128)


def token_budget(step: ModelledStep, tpot_s: float, num_seqs: int = 32, context_tokens: int = 65_536) -> int:
    """Return the largest usual budget whose step, with an ordinary decode batch in it, stays within the target; else the
    smallest."""
    for budget in _BUDGETS:
        chunk = budget - num_seqs
        pairs = context_tokens + chunk_pairs(2048, chunk)
        if step.step_s(budget, context_tokens + 2048 + chunk, pairs, num_seqs + 1) <= tpot_s:
            return budget
    return _BUDGETS[-1]


class Sarathi:
    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        def work(member: Member) -> float:
            return member.queued_tokens + offer.ask.uncached(member) + member.num_seqs

        return PlacementChoice(min(decodes(members), key=work), None, 0.0)

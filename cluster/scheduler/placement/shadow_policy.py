"""A policy that also says where another tuning would place each request, on the same state and without acting on it."""

from collections.abc import Sequence

from cluster.scheduler.fleet.link_model import LinkModel
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementChoice, PlacementPolicy, PlacementQuery
from cluster.scheduler.placement.slo_policy import SloPolicy
from core.config.cluster_config import ScheduleConfig
from core.scheduler_tuning import SchedulerTuning, tuned


class ShadowPolicy:
    """A PlacementPolicy that acts as `acting` does. Each of its choices names `shadow`'s as `instead`."""

    def __init__(self, acting: PlacementPolicy, shadow: PlacementPolicy) -> None:
        self._acting, self._shadow = acting, shadow

    def choose(
        self, ask: PlacementQuery, decodes: Sequence[Member], prefills: Sequence[Member], now: float
    ) -> PlacementChoice | None:
        choice = self._acting.choose(ask, decodes, prefills, now)
        if choice is not None:
            # What `acting` has worked out stays: to work it out again later would give another result.
            known = [(member, member.forecast) for member in (*decodes, *prefills)]
            choice.instead = self._shadow.choose(ask, decodes, prefills, now)
            for member, forecast in known:
                member.forecast = forecast
        return choice

    def choose_prefill(
        self, ask: PlacementQuery, decode: Member, prefills: Sequence[Member], now: float
    ) -> PlacementChoice:
        return self._acting.choose_prefill(ask, decode, prefills, now)

    def has_prompt_room(self, member: Member, *, late: bool, timed: bool) -> bool:
        return self._acting.has_prompt_room(member, late=late, timed=timed)

    def least_work_s(self, ask: PlacementQuery, members: Sequence[Member]) -> float:
        return self._acting.least_work_s(ask, members)

    def measured(self, member: Member) -> None:
        self._acting.measured(member)
        self._shadow.measured(member)


def policy_of(config: ScheduleConfig, tuning: SchedulerTuning) -> PlacementPolicy:
    """Return the policy of a scheduler, with a shadow where the configuration has one."""
    links = LinkModel(other_host_bytes_per_s=config.link_bytes_per_s)
    acting = SloPolicy(config.local_threshold_tokens, links, tuning)
    if not config.shadow_tuning:
        return acting
    other = tuned(config.shadow_tuning, tuning)
    return ShadowPolicy(acting, SloPolicy(config.local_threshold_tokens, links, other))

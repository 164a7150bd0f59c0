"""Data-parallel attention as the planner sees it: one StepScheduler for each group of ranks, which serves sequences of its own.

Blocks are numbered over all groups. Each group has a range of them, so a block's number says who holds it. A sequence belongs to
one group from its admission to its end, and is preempted, shared with and computed there. The plans of all groups make up one
plan: the ranks execute it together, since a layer's experts are spread over all of them."""

from dataclasses import replace

from core.config.cluster_config import EngineConfig
from core.cost.steps import UNKNOWN_STEPS, StepModels
from core.plan import StepPlan, StepResult
from core.ports import SchedulerPolicy
from core.types import TokenOut
from engine.planning.group_prefixes import GroupPrefixes
from engine.planning.group_sessions import GroupSessions
from engine.planning.planned_reservations import PlannedReservations
from engine.planning.planned_sequences import PlannedSequences
from engine.planning.planner_load import PlannerLoad, total_load
from engine.planning.planner_protocol import Planner
from engine.planning.rank_groups import RankGroups
from engine.planning.sequence import Sequence
from engine.planning.speculation.speculator import make_speculator
from engine.planning.step_scheduler import StepScheduler
from engine.planning.undoing import TakenBack


class DpScheduler:
    """A Planner over `num_groups` StepSchedulers. `num_blocks` counts all blocks and is a multiple of `num_groups`.
    `num_state_blocks` is as in StepScheduler."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_context_tokens: int,
        policy: SchedulerPolicy[Sequence],
        num_groups: int,
        num_state_blocks: int = 0,
    ) -> None:
        each = num_blocks // num_groups
        self._groups = [
            StepScheduler(
                config,
                each,
                max_context_tokens,
                policy,
                group * each,
                speculator=make_speculator(config, max_context_tokens),
                num_state_blocks=num_state_blocks,
            )
            for group in range(num_groups)
        ]
        groups = RankGroups([scheduler.group for scheduler in self._groups])
        self.sequences, self.reservations = PlannedSequences(groups), PlannedReservations(groups)
        self.prefixes = GroupPrefixes(groups, each)
        self.sessions = GroupSessions([group.sessions for group in self._groups])
        self._next_step = 0
        self._planned: dict[int, list[StepPlan | None]] = {}
        """By step, each group's part of the plan."""

    def load(self, now: float = 0.0, steps: StepModels = UNKNOWN_STEPS) -> PlannerLoad:
        return total_load([group.load(now, steps) for group in self._groups])

    def plan(self, now: float, steps: StepModels = UNKNOWN_STEPS) -> StepPlan | None:
        if any(group.awaits_tokens for group in self._groups):
            return None
        parts = [group.plan(now, steps) for group in self._groups]
        found = [part for part in parts if part is not None]
        if not found:
            return None
        step, self._next_step = self._next_step, self._next_step + 1
        self._planned[step] = parts
        return StepPlan(
            step=step,
            new=tuple(new for part in found for new in part.new),
            copies=tuple(copy for part in found for copy in part.copies),
            work=tuple(work for part in found for work in part.work),
            drop=tuple(key for part in found for key in part.drop),
        )

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenOut]:
        out: list[TokenOut] = []
        for group, part in zip(self._groups, self._planned.pop(plan.step), strict=True):
            if part is not None:
                keys = {work.key for work in part.work}
                own = tuple(sampled for sampled in result.sampled if sampled.key in keys)
                out += group.commit(part, replace(result, step=part.step, sampled=own), now)
        return out

    def take_back(self) -> TakenBack:
        self._next_step = min(self._planned)
        self._planned.clear()
        back = [group.take_back() for group in self._groups]
        return TakenBack(
            goes_on=any(one.goes_on for one in back),
            paused=[key for one in back for key in one.paused],
            lost=[key for one in back for key in one.lost],
        )

    def check_integrity(self) -> None:
        for group in self._groups:
            group.check_integrity()


def make_planner(
    config: EngineConfig,
    num_blocks: int,
    max_context_tokens: int,
    policy: SchedulerPolicy[Sequence],
    num_groups: int,
    *,
    whole_prompts: bool = False,
    num_state_blocks: int = 0,
) -> Planner:
    """`num_state_blocks` is as in StepScheduler."""
    if num_groups == 1:
        return StepScheduler(
            config,
            num_blocks,
            max_context_tokens,
            policy,
            whole_prompts=whole_prompts,
            speculator=make_speculator(config, max_context_tokens),
            num_state_blocks=num_state_blocks,
        )
    return DpScheduler(config, num_blocks, max_context_tokens, policy, num_groups, num_state_blocks)

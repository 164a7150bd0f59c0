"""Plans an engine's steps: continuous batching, chunked prefill, prefix sharing, preemption, lookahead.

There is no prefill phase and no decode phase, only tokens computed versus tokens known. `plan` advances counters; `commit`
only learns what was sampled, so the next step can be planned while one runs. Steps are committed in the order of their plans.

Invariant: a block is given back only when no planned, uncommitted step can write it and no grant or pusher uses it."""

from collections import deque

from core.config.cluster_config import EngineConfig
from core.cost.steps import UNKNOWN_STEPS, StepModels
from core.plan import StepPlan, StepResult
from core.ports import SchedulerPolicy
from core.types import TokenOut
from engine.cache.block_pool import BlockPool
from engine.cache.radix_cache import RadixCache
from engine.planning.block_ledger import BlockLedger
from engine.planning.committing import Committing
from engine.planning.lifecycle import Lifecycle
from engine.planning.pinning import Pinning
from engine.planning.planned_reservations import PlannedReservations
from engine.planning.planned_sequences import PlannedSequences
from engine.planning.planner_load import PlannerLoad
from engine.planning.preemption import Preemption
from engine.planning.prefixes import Prefixes
from engine.planning.rank_groups import RankGroup, RankGroups
from engine.planning.sequence import Sequence
from engine.planning.sequence_table import SequenceTable
from engine.planning.sessions import Sessions
from engine.planning.speculation.speculator import Speculator
from engine.planning.step_admission import StepAdmission
from engine.planning.step_builder import StepBuilder
from engine.planning.step_composer import StepComposer
from engine.planning.step_limits import StepLimits
from engine.planning.step_time_fit import expected_s
from engine.planning.undoing import TakenBack, Undoing


class StepScheduler:
    """The Planner of one group of ranks."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_context_tokens: int,
        policy: SchedulerPolicy[Sequence],
        first_block: int = 0,
        *,
        whole_prompts: bool = False,
        speculator: Speculator | None = None,
        num_state_blocks: int = 0,
    ) -> None:
        """`whole_prompts`: a prompt is computed in one step, for which `config` has room, and nothing decodes. `speculator`: who
        proposes what sequences sample next, if anybody. `num_state_blocks`: each sequence's first blocks, which have its
        recurrent state (ADR 102)."""
        self._config, self._speculator, size = config, speculator, config.block_size
        self._tuning = policy.tuning
        pool = BlockPool(num_blocks, first_block)
        cache = RadixCache(pool, size, enabled=config.prefix_cache, has_states=num_state_blocks > 0)
        ledger = BlockLedger(pool, cache, size, num_state_blocks)
        capacity = (num_blocks - num_state_blocks) * size
        table = SequenceTable(max_context_tokens, capacity, num_state_blocks * size, size)
        self.prefixes = Prefixes(cache, ledger, table)
        lifecycle = Lifecycle(table, ledger, self.prefixes, speculator)
        self._limits = StepLimits(config, whole_prompts=whole_prompts)
        preemption = Preemption(self._limits, policy, lifecycle, config.longest_pause_s)
        self._admission = StepAdmission(self._limits, policy, preemption)
        self._composer = StepComposer(
            self._limits, policy, preemption, self._admission, speculator, whole_prompts=whole_prompts
        )
        pinning = Pinning(cache, int(config.pinned_share * num_blocks))
        self.sessions = Sessions(cache, ledger, self.prefixes, pinning, config.longest_pin_s)
        lifecycle.on_left = self.sessions.ends
        self._committing, self._undoing = Committing(lifecycle, speculator), Undoing(lifecycle)
        self.group = RankGroup(table, ledger, lifecycle, preemption, self.prefixes)
        self.sequences = PlannedSequences(RankGroups([self.group]))
        self.reservations = PlannedReservations(RankGroups([self.group]))
        self._next_step = 0
        self._in_flight: deque[StepPlan] = deque()

    @property
    def awaits_tokens(self) -> bool:
        """Whether the next step is to be planned when those in flight are committed, since draft tokens follow what they
        sample."""
        return self._speculator is not None and self._speculator.awaits(self._in_flight, self.group.table)

    def load(self, now: float = 0.0, steps: StepModels = UNKNOWN_STEPS) -> PlannerLoad:
        table, ledger = self.group.table, self.group.ledger
        return PlannerLoad(
            num_used_blocks=ledger.pool.num_used,
            num_available_blocks=ledger.num_available,
            num_running=len(table.running),
            num_decoding=len(table.decoding),
            num_waiting=table.num_waiting,
            num_context_tokens=sum(len(seq.tokens) for seq in table.running),
            num_late_tokens=table.num_late_tokens(now, steps, self._tuning),
            pausable_blocks=self.group.preemption.pausable_blocks(now),
            waiting_by_priority=table.waiting_by_priority,
            num_preempted=self.group.lifecycle.num_preempted,
            num_returned=self._admission.num_returned,
            prefix_tokens=(ledger.num_queried_tokens, ledger.num_hit_tokens),
            draft_tokens=(0, 0) if self._speculator is None else self._speculator.counts,
        )

    def plan(self, now: float, steps: StepModels = UNKNOWN_STEPS) -> StepPlan | None:
        self.sessions.pass_by(now)
        if self.awaits_tokens:
            return None
        builder = self._composed(now, steps)
        if not builder.work:
            return None
        self._next_step += 1
        plan = builder.plan(self.group.lifecycle.take_dropped())
        self._in_flight.append(plan)
        return plan

    def _composed(self, now: float, steps: StepModels) -> StepBuilder:
        """Return the next step, without work where there is none. One whose sequences have all given way is composed anew: others
        have room now, and no event would say so."""
        # A step is planned when another has just ended or none is in flight, so the whole time of those in flight is to come.
        starts_at = now + sum(expected_s(plan, steps) for plan in self._in_flight)
        while True:
            num_preempted = self.group.lifecycle.num_preempted
            builder = StepBuilder(step=self._next_step, now=now, budget=self._config.max_batch_tokens)
            self._composer.compose(builder, now, steps, starts_at)
            if builder.work or self.group.lifecycle.num_preempted == num_preempted:
                return builder

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenOut]:
        self.sessions.pass_by(now)
        self._in_flight.popleft()
        self._limits.computed()
        return self._committing.commit(plan, result, now)

    def take_back(self) -> TakenBack:
        if not self._in_flight:
            return TakenBack(goes_on=False, paused=[], lost=[])
        first = self._in_flight[0]
        goes_on = self._shrink(first)
        seqs: dict[str, Sequence] = {}
        while self._in_flight:
            seqs |= {seq.key: seq for seq in self._undoing.undo(self._in_flight.pop())}
        self._next_step = first.step
        paused, lost = self._undoing.settle([*seqs.values()])
        self.group.preemption.fit_slots()
        return TakenBack(goes_on=goes_on, paused=paused, lost=lost)

    def check_integrity(self) -> None:
        group = self.group
        group.ledger.check_integrity(group.table.all.values(), group.prefixes.held_blocks)
        group.table.check_integrity()

    def _shrink(self, plan: StepPlan) -> bool:
        """Have the next step ask for less than `plan`. Returns False where it cannot."""
        if self._speculator is not None and any(work.drafts for work in plan.work):
            self._speculator.rest()
            return True
        return self._limits.shrink(plan)

"""Data-parallel attention as the planner sees it: one StepScheduler for each group of ranks, which serves sequences of its own.

Blocks are numbered over all groups. Each group has a range of them, so a block's number says who holds it. A sequence belongs to
one group from its admission to its end, and is preempted, shared with and computed there. The plans of all groups make up one
plan: the ranks execute it together, since a layer's experts are spread over all of them."""

from collections import Counter
from collections.abc import Sequence as SeqOf
from dataclasses import replace

from core.config.cluster_config import EngineConfig
from core.cost.steps import UNKNOWN_STEPS, StepModels
from core.messages import Grant
from core.plan import StepPlan, StepResult
from core.ports import SchedulerPolicy
from core.types import Request, TokenOut
from engine.cache.radix_cache import Kept
from engine.cache.state_checkpoints import CheckpointKept
from engine.planning.block_ledger import CachedPrefix, Reservation, Restore
from engine.planning.group_sessions import GroupSessions
from engine.planning.planner_protocol import Planner
from engine.planning.returning import Keep, ReadBack
from engine.planning.sequence import Sequence
from engine.planning.speculation.speculator import make_speculator
from engine.planning.step_scheduler import StepScheduler
from engine.planning.undoing import TakenBack

_READ_COST = 1 / 16
"""What a token of context costs a group in each step, where a prompt's token that must be computed costs 1."""


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
        self._block_size = config.block_size
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
        self.sessions = GroupSessions([group.sessions for group in self._groups])
        self.num_blocks, self._blocks_each = each * num_groups, each
        self._next_step = 0
        self._planned: dict[int, list[StepPlan | None]] = {}
        """By step, each group's part of the plan."""
        self._cached: Counter[int] = Counter()
        """By hash, the number of groups that keep the block."""

    @property
    def num_used_blocks(self) -> int:
        return sum(group.num_used_blocks for group in self._groups)

    @property
    def prefix_tokens(self) -> tuple[int, int]:
        both = [group.prefix_tokens for group in self._groups]
        return sum(queried for queried, _ in both), sum(hit for _, hit in both)

    @property
    def draft_tokens(self) -> tuple[int, int]:
        each = [group.draft_tokens for group in self._groups]
        return sum(guessed for guessed, _ in each), sum(right for _, right in each)

    @property
    def num_available_blocks(self) -> int:
        return sum(group.num_available_blocks for group in self._groups)

    @property
    def num_running(self) -> int:
        return sum(group.num_running for group in self._groups)

    @property
    def num_decoding(self) -> int:
        return sum(group.num_decoding for group in self._groups)

    @property
    def num_context_tokens(self) -> int:
        return sum(group.num_context_tokens for group in self._groups)

    @property
    def num_waiting(self) -> int:
        return sum(group.num_waiting for group in self._groups)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(group.num_waiting_tokens for group in self._groups)

    def num_late_tokens(self, now: float, steps: StepModels) -> int:
        return sum(group.num_late_tokens(now, steps) for group in self._groups)

    @property
    def waiting_by_priority(self) -> tuple[tuple[int, int], ...]:
        tokens: Counter[int] = Counter()
        for group in self._groups:
            for priority, count in group.waiting_by_priority:
                tokens[priority] += count
        return tuple(sorted(tokens.items()))

    @property
    def num_preempted(self) -> int:
        return sum(group.num_preempted for group in self._groups)

    def lendable_blocks(self, now: float) -> int:
        return sum(group.lendable_blocks(now) for group in self._groups)

    @property
    def num_returned(self) -> int:
        return sum(group.num_returned for group in self._groups)

    @property
    def stuck_pushes(self) -> list[str]:
        return [key for group in self._groups for key in group.stuck_pushes]

    def drain_cache_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the hashes of blocks kept and given up. A block counts as kept as long as any group keeps it."""
        before: dict[int, int] = {}
        for group in self._groups:
            added, removed = group.drain_cache_events()
            for hashes, change in ((added, 1), (removed, -1)):
                for block in hashes:
                    before.setdefault(block, self._cached[block])
                    self._cached[block] += change
        now_kept = tuple(block for block, count in before.items() if self._cached[block] and not count)
        now_gone = tuple(block for block, count in before.items() if count and not self._cached[block])
        for block in before:
            if not self._cached[block]:
                del self._cached[block]
        return now_kept, now_gone

    def replay_cache_events(self) -> None:
        self._cached.clear()
        for group in self._groups:
            group.replay_cache_events()

    def drop_cache(self) -> int:
        return sum(group.drop_cache() for group in self._groups)

    def check_fits(self, request: Request) -> None:
        for group in self._groups:
            group.check_fits(request)

    def add(self, request: Request, push: Grant | None = None) -> None:
        self.check_fits(request)
        self._by_cost(request)[0].add(request, push)

    def reserve(self, request: Request) -> Reservation | None:
        self.check_fits(request)
        for group in self._by_cost(request):
            if (reservation := group.reserve(request)) is not None:
                return reservation
        return None

    def make_room(self, request: Request, now: float) -> bool:
        return self._by_cost(request)[0].make_room(request, now)

    def abort(self, key: str) -> None:
        for group in self._of(key):
            group.abort(key)

    def release(self, key: str) -> None:
        for group in self._of(key):
            group.release(key)

    def has_room(self, key: str) -> bool:
        return all(group.has_room(key) for group in self._of(key))

    def hold(self, key: str) -> None:
        for group in self._of(key):
            group.hold(key)

    def activate(self, key: str, drawn: SeqOf[TokenOut], now: float) -> None:
        for group in self._of(key):
            group.activate(key, drawn, now)

    def compute(self, key: str) -> None:
        for group in self._of(key):
            group.compute(key)

    def on_kept(self, hear: Kept, hear_checkpoint: CheckpointKept) -> None:
        for group in self._groups:
            group.on_kept(hear, hear_checkpoint)

    def on_return(self, read: ReadBack, keep: Keep | None = None) -> None:
        for group in self._groups:
            group.on_return(read, keep)

    def cached_prefix(self, request: Request) -> CachedPrefix:
        return max((group.cached_prefix(request) for group in self._groups), key=_worth)

    def begin_restore(self, request: Request, num_full: int) -> Restore | None:
        """Restore behind the longest cached prefix. Among the groups that have as much of it, the one with the least to do is
        chosen."""
        most = self.cached_prefix(request)
        for group in self._by_cost(request):
            if group.cached_prefix(request) == most and (found := group.begin_restore(request, num_full)):
                return found
        return None

    def publish_restore(self, restore: Restore, count: int) -> None:
        self._groups[restore.fresh[0] // self._blocks_each].publish_restore(restore, count)

    def end_restore(self, restore: Restore) -> None:
        self._groups[restore.fresh[0] // self._blocks_each].end_restore(restore)

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
                own = tuple(drawn for drawn in result.sampled if drawn.key in keys)
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

    def go_on(self, key: str) -> None:
        for group in self._of(key):
            group.go_on(key)

    def mask_ready(self, key: str, num_tokens: int) -> None:
        for group in self._of(key):
            group.mask_ready(key, num_tokens)

    def check_integrity(self) -> None:
        for group in self._groups:
            group.check_integrity()

    def _of(self, key: str) -> list[StepScheduler]:
        """Return the group that has this sequence, or None when it is not here any more."""
        return [group for group in self._groups if group.knows(key)]

    def _by_cost(self, request: Request) -> list[StepScheduler]:
        """Order the groups by what they have to do, this request included, since a step lasts as long as the busiest group
        computes. What a group has cached of the prompt need not be computed. Groups that cannot take the request now come
        last."""
        size = self._block_size

        def cost(group: StepScheduler) -> tuple[bool, float]:
            missing = len(request.tokens) - group.cached_prefix(request).num_usable * size
            to_read = group.num_used_blocks * size * _READ_COST
            return missing > group.num_available_blocks * size, missing + group.num_waiting_tokens + to_read

        return sorted(self._groups, key=cost)


def _worth(prefix: CachedPrefix) -> tuple[int, int]:
    return prefix.num_usable, prefix.num_kept


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

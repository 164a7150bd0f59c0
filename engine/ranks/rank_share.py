"""One rank's share of a step: the work on the blocks that it holds.

Each rank gets the whole plan and so knows what the others do. All groups of ranks pass a stage equally often, since the experts
of its layers are spread over all of them. A group with less work, or none, passes it without rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.kv import RankPool
from core.plan import BlockCopy, StepPlan


@dataclass(frozen=True, slots=True)
class RankShare:
    plan: StepPlan
    """The rank's part of the plan, with the numbers that its pool has for its blocks."""
    most_tokens: int
    """The number of tokens of the group that has the most in this step."""


def share_of(plan: StepPlan, pools: Sequence[RankPool], rank: int) -> RankShare:
    """Return the rank's share of `plan`. `pools` are those of all ranks of the instance."""
    pool = pools[rank]
    if all(other.first_block == pool.first_block for other in pools):
        return RankShare(plan, plan.num_tokens)
    tokens: dict[int, int] = {}
    for work in plan.work:
        group = work.block_ids[0] // pool.num_blocks
        tokens[group] = tokens.get(group, 0) + work.count
    own = [work for work in plan.work if pool.holds(work.block_ids[0])]
    keys, first = {work.key for work in own}, pool.first_block
    mine = replace(
        plan,
        new=tuple(new for new in plan.new if new.key in keys),
        copies=tuple(
            BlockCopy(copy.src - first, copy.dst - first, copy.num_tokens)
            for copy in plan.copies
            if pool.holds(copy.dst)
        ),
        work=tuple(replace(work, block_ids=pool.local(work.block_ids)) for work in own),
    )
    return RankShare(mine, max(tokens.values(), default=0))

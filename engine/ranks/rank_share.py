"""One rank's share of a step: the work on the blocks that it holds.

Each rank gets the whole plan and so knows what the others do. All groups of ranks pass a stage equally often, and replay or
launch each pass alike, since the experts of its layers are spread over all of them. A group with less work, or none, passes it
without rows, or with those alone that pad a replay."""

from collections.abc import Sequence
from dataclasses import replace

from core.kv import RankPool
from core.plan import BlockCopy, SeqWork, StepPlan


def share_of(plan: StepPlan, pools: Sequence[RankPool], rank: int) -> StepPlan:
    """Return the rank's share of `plan`, with the numbers that its pool has for its blocks. `pools` are those of all ranks of the
    instance."""
    pool = pools[rank]
    firsts = {other.first_block for other in pools}
    if len(firsts) == 1:
        return plan
    first = pool.first_block
    others: dict[int, list[SeqWork]] = {other: [] for other in sorted(firsts - {first})}
    own: list[SeqWork] = []
    for work in plan.work:
        if pool.holds(work.block_ids[0]):
            own.append(replace(work, block_ids=pool.local(work.block_ids)))
        else:
            others[work.block_ids[0] // pool.num_blocks * pool.num_blocks].append(work)
    keys = {work.key for work in own}
    return replace(
        plan,
        new=tuple(new for new in plan.new if new.key in keys),
        copies=tuple(
            BlockCopy(copy.src - first, copy.dst - first, copy.num_tokens)
            for copy in plan.copies
            if pool.holds(copy.dst)
        ),
        work=tuple(own),
        groups=tuple(map(tuple, (own, *others.values()))),
    )

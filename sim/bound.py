"""How much of a load any scheduler could serve within its targets: an upper bound that knows the future. Pure.

In the long run no fleet is busy for more than its own time. Each request takes at least: computing the part of its prompt that
nobody before it had (one cache for all, of any size), and decoding in the largest batch whose steps hold its time per token.
Compute and memory may overlap perfectly. The dearest requests are given up first, as many as the attainment allows."""

from collections.abc import Sequence

from core.types import Slo
from sim.coarse.sequence import Job
from sim.cost import StepCost, chunk_pairs


def bound_seconds(
    jobs: Sequence[Job], cost: StepCost, slo: Slo, block_tokens: int, max_num_seqs: int, attainment: float
) -> float:
    """Instance seconds that the cheapest share `attainment` of `jobs` takes at least."""
    seen: set[int] = set()
    compute: list[float] = []
    memory: list[float] = []
    for job in jobs:
        num_cached = min(sum(h in seen for h in job.hashes) * block_tokens, job.num_prompt - 1)
        seen.update(job.hashes)
        num_new = job.num_prompt - num_cached
        pairs = chunk_pairs(num_cached, num_new)
        compute.append((num_new + job.max_tokens - 1) / cost.tokens_per_s + pairs * cost.pair_s)
        memory.append((job.max_tokens - 1) * _token_s(job, cost, slo, max_num_seqs))
    kept = round(attainment * len(jobs))
    return max(sum(sorted(compute)[:kept]), sum(sorted(memory)[:kept]))


def _token_s(job: Job, cost: StepCost, slo: Slo, max_num_seqs: int) -> float:
    """Memory time of one decode token in the largest batch of sequences like it that is quick enough."""
    context_s = (job.num_prompt + job.max_tokens / 2) * cost.kv_token_read_s
    room_s = max(context_s, slo.tpot_s - cost.overhead_s - cost.weights_read_s)
    batch = min(max_num_seqs, max(1.0, room_s / context_s))
    return (cost.weights_read_s + cost.overhead_s) / batch + context_s

"""The predictions of SLO-aware baselines, by each instance's own step-time models, which production has too."""

from math import ceil

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementQuery


def prefill_s(member: Member, num_tokens: int) -> float:
    """Return the time to compute so many prompt tokens, alone, in full steps."""
    model, decode, batch = member.steps.prompt, member.steps.decode, member.info.max_batch_tokens
    num_steps, context = ceil(num_tokens / batch), num_tokens * (num_tokens / batch + 1) / 2
    reads_s = num_steps * member.steps.reads_s(min(num_tokens, batch), 0, 1) + context * decode.context_s
    computes_s = (
        num_steps * (model.fixed_s + model.seq_s)
        + num_tokens * model.token_s
        + context * model.context_s
        + num_tokens * num_tokens / 2 * model.pair_s
    )
    return max(reads_s, computes_s)


def queue_s(member: Member) -> float:
    return prefill_s(member, member.queued_tokens)


def ttft_s(member: Member, ask: PlacementQuery) -> float:
    return queue_s(member) + prefill_s(member, ask.uncached(member))


def tpot_s(member: Member, ask: PlacementQuery) -> float:
    """Return the seconds of a decode step with this request in the batch. Reserved requests count with its own length."""
    num_seqs = member.num_seqs + 1
    reserved = max(0, num_seqs - member.num_decoding)
    context = member.context_tokens + reserved * ask.num_tokens
    return member.steps.decode.step_s(num_seqs, context, num_seqs)

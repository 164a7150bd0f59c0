"""How much of each pool is used, from what the scheduler knows of its instances. `scaler` decides by it.

Prompts: the share of the last interval that they took (tokens computed / tokens per second), and what waits for them, in seconds
over `scaling_wait_s`. Decoding: the fullest of blocks, sequence slots, and the step's share of the tightest target in the batch.
An instance that does both counts as the one that it has more of."""

from collections.abc import Iterable
from math import inf

from cluster.scheduler.fleet.member import DEFAULT_TOKENS_PER_S, Member
from cluster.scheduler.scaling.scaler import InstanceUse, PoolLoad, PoolName
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning


class UseMeter:
    """Measures use from one call to the next."""

    def __init__(self, tuning: SchedulerTuning = DEFAULT_TUNING) -> None:
        self._tuning = tuning
        self._computed: dict[str, int] = {}
        self._at = 0.0

    def loads(
        self, members: Iterable[Member], queued_tokens: int, targets: dict[PoolName, int], now: float
    ) -> list[PoolLoad]:
        """Return the load of each pool. `queued_tokens` are those of prompts that no instance was given yet, and `targets` the
        sizes that the pools shall have."""
        elapsed_s, self._at = now - self._at, now
        serving = [m for m in members if not m.leaving]
        found: list[PoolLoad] = []
        for pool, target in targets.items():
            mine = [m for m in serving if pool_of(m) == pool]
            for_prompts = pool == "prefill" or "prefill" not in targets
            waiting = queued_tokens / len(mine) if for_prompts and mine else 0.0
            uses = tuple(InstanceUse(m.address, self._use(m, waiting, elapsed_s)) for m in mine)
            found.append(PoolLoad(pool, uses, max(0, target - len(mine))))
        self._computed = {m.address: m.work.computed_tokens for m in serving}
        return found

    def _use(self, member: Member, waiting_tokens: float, elapsed_s: float) -> float:
        rate = member.measured_tokens_per_s or DEFAULT_TOKENS_PER_S
        waits = (member.queued_tokens + waiting_tokens) / rate / self._tuning.scaling_wait_s
        if member.info.prefills:
            computed = member.work.computed_tokens
            since = computed - self._computed.get(member.address, computed)
            waits += min(1.0, since / rate / elapsed_s) if elapsed_s > 0 else 0.0
        return max(waits, _decode_use(member, self._tuning) if member.info.decodes else 0.0)


def pool_of(member: Member) -> PoolName:
    """Return the deployment that it belongs to."""
    return "decode" if member.info.decodes else "prefill"


def _decode_use(member: Member, tuning: SchedulerTuning) -> float:
    model = member.steps.decode
    use = max(1 - member.free_blocks / member.all_blocks, member.num_seqs / member.info.max_num_seqs)
    if member.batch_seqs and model.num_steps and member.tightest_tpot_s < inf:
        context = member.batch_context_tokens
        alone_s = model.step_s(1, context / member.batch_seqs, 1)
        step_s = model.step_s(member.batch_seqs, context, member.batch_seqs)
        target_s = max(member.tightest_tpot_s, tuning.reach * alone_s)
        use = max(use, step_s / (tuning.scaling_tpot_share * target_s))
    return use

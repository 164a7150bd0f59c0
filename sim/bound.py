"""How much of a load any scheduler could serve within its targets: upper bounds that know the future.

What one request takes of an instance, at least: computing the part of its prompt that nobody before it had (one cache for all, of
any size), and decoding in steps that hold its time per token, as full as that time, slots and KV blocks allow. Compute and memory
overlap perfectly, the load divides evenly among instances, and nothing is computed twice. A request that would miss on an idle
instance is hopeless; of the others the dearest are given up first, as many as may miss beside the hopeless ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from core.cost.steps import chunk_pairs
from sim.catalogue.cost import StepCost
from sim.coarse.simulated_sequence import SimulatedRequest

_NUM_CHECKS = 24
"""The number of times at which the work that is due by then is checked. With fewer the bound is looser, and still holds."""


@dataclass(frozen=True, slots=True)
class EngineBound:
    """What an instance can do."""

    cost: StepCost
    max_num_seqs: int
    kv_tokens: int
    """The tokens whose KV it has room for."""
    state_tokens: int = 0
    """As many tokens' room does a sequence's recurrent state take."""


@dataclass(frozen=True, slots=True)
class _Need:
    """When one request is due, and what it takes, in instance seconds by what may run out."""

    first_due_at: float
    last_due_at: float
    prompt_s: tuple[float, ...]
    """What computing its prompt takes; due with the first token."""
    whole_s: tuple[float, ...]
    """Compute of everything; memory time of decoding where steps are full by their time, by their slots, by their blocks. What
    a step takes is no less than the sum of its requests' shares of any one of these, so each bounds the whole by itself."""


class Needs:
    """What a load needs, on instances of one kind."""

    def __init__(self, jobs: Sequence[SimulatedRequest], engine: EngineBound, block_tokens: int) -> None:
        """Each job's targets are those of its own class."""
        self._num_jobs = len(jobs)
        self._needs: list[_Need] = []
        """The needs of all but the hopeless."""
        seen: set[int] = set()
        for job in jobs:
            num_cached = min(sum(h in seen for h in job.hashes) * block_tokens, job.num_prompt - 1)
            seen.update(job.hashes)
            if (need := _need(job, num_cached, engine)) is not None:
                self._needs.append(need)

    def least_s(self, attainment: float) -> float:
        """Return the instance seconds that as many requests as must hold take at least; infinite where too many are hopeless."""
        num_spare = self._num_spare(attainment)
        return inf if num_spare < 0 else _least_s([need.whole_s for need in self._needs], num_spare)

    def can_ever_be(self, attainment: float, num_instances: int) -> bool:
        """Return whether it is possible at all. All instances are idle at 0 and nothing follows: at no time may more be due than
        they had time for."""
        num_spare = self._num_spare(attainment)
        return num_spare >= 0 and all(
            _least_s([work(need) for need in due[:count]], num_spare)
            <= num_instances * due_at(due[count - 1])
            for due_at, work in (_FIRST, _WHOLE)
            for due in [sorted(self._needs, key=due_at)]
            for count in _counts(len(due))
        )

    def _num_spare(self, attainment: float) -> int:
        """Return how many of those that are not hopeless may miss; negative when too many are hopeless."""
        num_hopeless = self._num_jobs - len(self._needs)
        return int((1 - attainment) * self._num_jobs + 1e-9) - num_hopeless


_Due = tuple[Callable[[_Need], float], Callable[[_Need], tuple[float, ...]]]
_FIRST: _Due = (lambda need: need.first_due_at, lambda need: need.prompt_s)
_WHOLE: _Due = (lambda need: need.last_due_at, lambda need: need.whole_s)


def _counts(total: int) -> list[int]:
    """Return counts that are evenly spread, up to all."""
    return sorted({-(-total * part // _NUM_CHECKS) for part in range(1, _NUM_CHECKS + 1)} - {0})


def _least_s(works: Sequence[tuple[float, ...]], num_spare: int) -> float:
    """Return the least time of all but `num_spare` of them, by the resource of which it takes most."""
    num_kept = len(works) - num_spare
    if num_kept <= 0:
        return 0.0
    return max(sum(sorted(resource)[:num_kept]) for resource in zip(*works, strict=True))


def _need(job: SimulatedRequest, num_cached: int, engine: EngineBound) -> _Need | None:
    """Return what a request needs; None where it is hopeless."""
    cost, slo = engine.cost, job.request.slo
    num_new, num_decoded = job.num_prompt - num_cached, job.max_tokens - 1
    prompt_s = cost.compute_s(num_new, chunk_pairs(num_cached, num_new))
    context = job.num_prompt + job.max_tokens / 2
    read_s, fixed_s = context * cost.kv_token_read_s + cost.state_s, cost.overhead_s + cost.weights_read_s
    read_s += min(context, cost.chosen_tokens) * cost.chosen_read_s
    room_s = slo.tpot_s - fixed_s
    if cost.overhead_s + prompt_s > slo.ttft_s or (num_decoded and read_s > room_s):
        return None
    kept_share = (context + engine.state_tokens) / engine.kv_tokens
    fills = (read_s / room_s if num_decoded else 0.0, 1 / engine.max_num_seqs, kept_share)
    decode_s = (num_decoded * (read_s + fixed_s * fill) for fill in fills)
    first_due_at = job.request.arrival_at + slo.ttft_s
    last_due_at = first_due_at + num_decoded * slo.tpot_s
    whole_s = (prompt_s + num_decoded / cost.tokens_per_s, *decode_s)
    return _Need(first_due_at, last_due_at, (prompt_s,), whole_s)

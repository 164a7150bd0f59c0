"""Block overcommit: sequences that are ahead of their pace pause, and others have their blocks.

Memory often holds fewer sequences than a device could serve: their steps are shorter than their targets allow. A sequence that
gets tokens sooner than its class promises may then sit out, as long as its next token is in time, and another one has its
blocks. Where lower tiers keep its KV, that costs a copy. Whoever reads at the promised pace notices nothing (compare Andes, Liu
et al., 2024, which schedules by what users have read).

A sequence pauses at the most `longest_pause_s` at a time, and comes back sooner where its next token gets due."""

from collections.abc import Iterable
from math import inf

from core.pacing.pacing import slack_s
from core.ports import S, ServedSequence
from core.scheduler_tuning import SchedulerTuning


def overcommit_blocks(num_blocks: int, host_blocks: int, tuning: SchedulerTuning) -> int:
    """Return how many blocks more than a pool has its sequences may hold together, where host memory keeps `host_blocks`. Half
    of these are left for what is saved meanwhile, which takes the place of what was not used for longest."""
    return int(min(num_blocks, host_blocks) * tuning.overcommit_share)


def ahead_s(seq: ServedSequence, now: float) -> float:
    """Return by how much a sequence is ahead of its pace; 0 without a first token, and where no pace is promised."""
    slack = slack_s(seq, now)
    return slack if slack != inf and seq.first_token_at != inf else 0.0


def pausable(seqs: Iterable[S], priority: int, now: float, tuning: SchedulerTuning) -> list[S]:
    """Return those of `seqs` that may pause for a class of that priority, what is furthest ahead first."""
    able = [(ahead_s(seq, now), seq) for seq in seqs if seq.request.slo.priority <= priority]
    return [seq for ahead, seq in sorted(able, key=_furthest) if ahead > tuning.pauses_s]


def rests(seq: ServedSequence, ends_at: float, now: float, tuning: SchedulerTuning) -> bool:
    """Return whether a sequence that has paused, `ends_at` at the latest, need not be back yet."""
    return now < ends_at and ahead_s(seq, now) > tuning.returns_s


def _furthest(pair: tuple[float, ServedSequence]) -> tuple[float, int]:
    return -pair[0], -pair[1].arrival

"""The few instances of a large fleet that are worth predicting for one request.

A scan of the whole fleet finds the best place, and takes a microsecond or more for each instance. The scan's choice is nearly
always among these: those that have most of the prefix cached, the emptiest decode batches and the fullest that still keep their
targets (of each tightness, with and without prompts before them), an idle one, the one with most room, the shortest prompt
queues, and the neighbours of those. An instance moves between buckets (`bucket_queue`) when something about it changes, so that
no look-up reads more than it returns. Among equals the request's own draw decides, so that bursts, and schedulers that do not see
each other, spread.

Invariant: after `settle` every living instance that takes work is in the buckets that its numbers say."""

from collections.abc import Iterable
from math import inf, log2
from typing import Final

from cluster.scheduler.fleet.bucket_queue import HIGHEST, NOWHERE, BucketEntry, BucketQueue, bucket_of
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.fleet.member_reservations import NO_LEVEL
from cluster.scheduler.fleet.neighbours import NeighbourGroup, Neighbours
from cluster.scheduler.fleet.rng import RequestRng
from core.types import Slo

NUM_CACHED: Final = 16
"""The number of instances with the longest cached prefix that are looked up, whatever their role."""
NUM_CACHED_DECODES: Final = 2
NUM_CACHED_SOURCES: Final = 3
_NUM_BATCHES: Final = 3
_NUM_QUEUES: Final = 2
NUM_NEAR: Final = 1
"""The number of instances whose neighbours are considered, too."""
_BACKLOG_UNIT_S: Final = 0.01
_STEP_UNIT_S: Final = 0.002
_ROOM_UNIT_TOKENS: Final = 1024.0
_NO_SLOT: Final = 64
"""Instances that have a slot are above this bucket."""
_LEVEL_ZERO: Final = 32
"""The bucket of priority 0. Classes of -32 and below count as one."""
_IDLE = (-1, False)
_PER_DOUBLING: Final = 2
"""Buckets for each doubling of a target. Targets for the time per token that differ by less than a factor of 1.4 share one."""


class Shortlist:
    def __init__(self) -> None:
        self.changed: dict[str, Member] = {}
        """Members whose buckets are out of date."""
        self._prompts = BucketQueue()
        """Instances that compute prompts, by what is queued there."""
        self._batches: dict[tuple[int, bool], BucketQueue] = {}
        """Instances that decode, by the time of a step. The keys are (tightness of its targets, whether prompts are to be
        computed first)."""
        self._room = BucketQueue()
        """Instances that decode and have free blocks: those with a sequence slot by how many, and below them the others by how
        soon they have one."""
        self._levels = BucketQueue()
        """Instances that decode, by the lowest class that was placed there."""
        self._neighbours = Neighbours()

    def forget(self, member: Member) -> None:
        self.changed.pop(member.address, None)
        if (standing := _standing(member)) is None:
            return
        member.standing = None
        self._take(standing)
        self._neighbours.leave(member)

    def settle(self, tokens_per_s: float) -> None:
        """Put every member into its buckets. `tokens_per_s` is the prompt rate of members that have not measured any."""
        if not self.changed:
            return
        changed = list(self.changed.values())
        self.changed.clear()
        for member in changed:
            if (standing := _standing(member)) is None:
                standing = member.standing = _Standing(member, self._neighbours.join(member))
            if member.leaving:
                self._take(standing)
                continue
            backlog = _backlog(member, tokens_per_s)
            if member.prefills:
                self._prompts.put(standing.prompts, backlog)
                for buckets, entry in standing.near_prompts:
                    buckets.put(entry, backlog)
            if member.decodes:
                self._put_decoding(standing, backlog)

    def any_headroom(self, level: int) -> bool:
        """Return whether any decode instance has blocks for another sequence, or a sequence of a lower level."""
        return len(self._room) > 0 or self._has_below(level)

    def any_slot(self, level: int) -> bool:
        """Return whether any of those has a slot as well, or a sequence of a lower level."""
        return self._room.highest_bucket > _NO_SLOT or self._has_below(level)

    def shortest_queue(self, rng: RequestRng) -> Member | None:
        return self._prompts.one_low(rng)

    def decodes(self, slo: Slo, near: Iterable[Member], rng: RequestRng) -> list[Member]:
        """Return instances to decode on. `near` are likely sources of the prompt's KV."""
        found = [self._room.one_high(rng)]
        found += [_nearest(s.near_batches, rng) for m in near if (s := _standing(m)) is not None]
        groups = list(self._batches)
        first = rng.below(len(groups)) if len(groups) > _NUM_BATCHES else 0
        for index in range(min(len(groups), _NUM_BATCHES)):
            tightness, _ = group = groups[(first + index) % len(groups)]
            buckets = self._batches[group]
            found.append(buckets.one_low(rng))
            if group != _IDLE:
                limit_s = min(slo.tpot_s, _target_s(tightness))
                found.append(buckets.one_high(rng, max(0, bucket_of(limit_s, _STEP_UNIT_S) - 1)))
        if self._has_below(slo.priority):
            found.append(self._levels.one_low(rng))
        return [member for member in found if member is not None]

    def _has_below(self, level: int) -> bool:
        return NOWHERE < self._levels.lowest_bucket < _level_bucket(level)

    def sources(self, decodes: Iterable[Member], rng: RequestRng) -> list[Member]:
        """Return instances that might compute the prompt for one of `decodes`."""
        found = self._prompts.lowest(_NUM_QUEUES, rng)
        for member in decodes:
            standing = _standing(member)
            if standing is not None and (near := _nearest(standing.near_prompts, rng)) is not None:
                found.append(near)
        return found

    def _put_decoding(self, standing: "_Standing", backlog: int) -> None:
        member = standing.member
        room = (member.free_blocks - member.state_blocks) * member.block_size
        if room > 0:
            self._room.put(standing.room, _room_bucket(member, room))
        else:
            self._room.take(standing.room)
        if member.lowest_level == NO_LEVEL:
            self._levels.take(standing.level)
        else:
            self._levels.put(standing.level, _level_bucket(member.lowest_level))
        batch = _batch(member)
        bucket = bucket_of(_step_s(member), _STEP_UNIT_S) if batch != _IDLE else backlog
        for near, entry in standing.near_batches:
            near.put(entry, bucket)
        if standing.batch != batch:
            self._take_batch(standing)
            standing.batch = batch
        buckets = self._batches.get(batch)
        if buckets is None:
            buckets = self._batches[batch] = BucketQueue()
        buckets.put(standing.in_batch, bucket)

    def _take(self, standing: "_Standing") -> None:
        """Take a member out of all buckets. It still has its neighbours."""
        self._prompts.take(standing.prompts)
        self._room.take(standing.room)
        self._levels.take(standing.level)
        self._take_batch(standing)
        for buckets, entry in (*standing.near_prompts, *standing.near_batches):
            buckets.take(entry)

    def _take_batch(self, standing: "_Standing") -> None:
        if (batch := standing.batch) is not None:
            buckets = self._batches[batch]
            buckets.take(standing.in_batch)
            standing.batch = None
            if not len(buckets):
                del self._batches[batch]


_Near = list[tuple[BucketQueue, BucketEntry]]
"""A member's groups, smallest first, and its entry in each."""


class _Standing:
    """One member's entries in all queues."""

    __slots__ = ("batch", "in_batch", "level", "member", "near_batches", "near_prompts", "prompts", "room")

    def __init__(self, member: Member, groups: tuple[NeighbourGroup, ...]) -> None:
        self.member = member
        self.prompts, self.room, self.in_batch = BucketEntry(member), BucketEntry(member), BucketEntry(member)
        self.level = BucketEntry(member)
        self.near_prompts: _Near = [(group.prompts, BucketEntry(member)) for group in groups]
        self.near_batches: _Near = [(group.batches, BucketEntry(member)) for group in groups]
        self.batch: tuple[int, bool] | None = None
        """The key of the queue in which `in_batch` is."""


def _standing(member: Member) -> _Standing | None:
    standing = member.standing
    return standing if isinstance(standing, _Standing) else None


def _nearest(near: _Near, rng: RequestRng) -> Member | None:
    """Return one member of the lowest bucket of the smallest group that has any, or None when there is none near."""
    for buckets, _ in near:
        if (found := buckets.one_low(rng)) is not None:
            return found
    return None


def _room_bucket(member: Member, room_tokens: int) -> int:
    if member.has_slot:
        return min(HIGHEST, _NO_SLOT + bucket_of(room_tokens, _ROOM_UNIT_TOKENS))
    return max(0, _NO_SLOT - bucket_of(member.num_seqs - member.max_num_seqs + 1, 1.0))


def _level_bucket(level: int) -> int:
    return min(HIGHEST, max(0, level + _LEVEL_ZERO))


def _backlog(member: Member, tokens_per_s: float) -> int:
    rate = member.measured_tokens_per_s or tokens_per_s
    return bucket_of(member.queued_tokens / rate, _BACKLOG_UNIT_S)


def _batch(member: Member) -> tuple[int, bool]:
    if not member.num_seqs:
        return _IDLE
    tpot_s = member.tightest_tpot_s
    tightness = HIGHEST if tpot_s == inf or tpot_s <= 0 else int(_PER_DOUBLING * log2(tpot_s * 1e6))
    return tightness, member.queued_tokens > 0


def _target_s(tightness: int) -> float:
    """Return the tightest target of that tightness."""
    return inf if tightness == HIGHEST else 2 ** (tightness / _PER_DOUBLING) * 1e-6


def _step_s(member: Member) -> float:
    """Return the time of a decode step of everything that is or will be there. Where it is not known, return the share of slots
    that are taken."""
    model = member.steps.decode
    if not model.num_steps:
        return member.step_s * member.num_seqs / member.max_num_seqs
    return model.step_s(member.batch_seqs, member.batch_context_tokens, member.batch_seqs)

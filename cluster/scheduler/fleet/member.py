"""What the scheduler knows of one instance (a member of the fleet): its last report, and what was reserved since.

Invariant: every reservation is counted once, as unsettled (no report can show it yet) or as settled, until it is released;
with no reservations all sums are zero."""

from collections.abc import Mapping, Sequence
from math import floor, inf
from typing import Final

from cluster.scheduler.fleet.context_forecast import (
    NO_CONTEXTS,
    Contexts,
    added,
    even,
    scaled,
    without,
)
from cluster.scheduler.fleet.member_reservations import ReservedFacts
from cluster.scheduler.fleet.prefix_index import PrefixHolders
from cluster.scheduler.fleet.reservation import PlacementReservation, ReservationSum, Turnover, growth_blocks
from core.kv import num_blocks_for
from core.messages import PlaceRequest
from core.reports import InstanceStatus, LoadReport, Register

DEFAULT_TOKENS_PER_S: Final = 4000.0
"""The prompt rate (tokens per second) that is assumed of an instance until anything was measured anywhere."""
_ROUNDING: Final = 1e-6

CachedBlocks = PrefixHolders | Mapping[str, int]
"""How many leading blocks of a prompt are cached where."""


class Member(ReservedFacts):
    """One registered instance. Owned by the GlobalScheduler; policies read it."""

    def __init__(
        self, info: Register, changed: dict[str, "Member"] | None = None, turnover: Turnover | None = None
    ) -> None:
        """`changed` is where the member puts itself when anything about it changes. `turnover` is that of the whole fleet."""
        super().__init__(info)
        self._changed = {} if changed is None else changed
        self._turnover = turnover or Turnover()
        self._spare_share = min(1.0, self._turnover.tuning.spare_tokens / self.block_size)
        self.version = 0
        """Grows with each change."""
        self.forecast: object = None
        """For the placement policy: what it has worked out about the member at some version. It is here so that no look-up is
        needed."""
        self.standing: object = None
        """For the shortlist: where the member stands in its queues."""
        self._runs_lower = False
        """Whether steps run for lower classes, which `above` leaves out."""
        self.leaving = False
        """Whether the instance is leaving. It takes nothing new, but its KV can still be fetched."""
        self.capacity_tokens = info.capacity_tokens
        self.free_blocks = info.num_blocks
        """The number of blocks that nothing uses and that no reservation takes."""
        self.room_blocks = info.num_blocks
        """As many of them as a newcomer may take."""
        self.now_blocks = info.num_blocks
        """As many of them as a newcomer can have at once, with those of sequences that may pause."""
        self._exact_free = self._exact_room = self._exact_now = float(info.num_blocks)
        self._spare_blocks = 0.0
        self.num_seqs = 0
        """The number of sequences that are or will be here."""
        self._above: dict[int, Member] = {}
        """Level -> the result of `above`, as long as nothing has changed."""
        self.batch_seqs = 0
        """The number of sequences that a step decodes here, or will: no more than there are slots."""
        self.batch_context_tokens = 0.0
        """The sum of their lengths now."""
        self._num_to_decode = 0
        self._contexts = NO_CONTEXTS
        """What all hold, and will hold, that decode or will decode here, also without a slot."""

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens to be computed here, reported and reserved."""
        return self._waiting_tokens + self._unsettled_sum.compute_tokens

    def tokens_before(self, *, late: bool) -> int:
        """Return the queued tokens that are computed before another prompt's. One that is not `late` passes those that are."""
        passed = 0 if late else self._late_tokens + self._unsettled_sum.late_tokens
        return max(0, self.queued_tokens - passed)

    @property
    def is_busy(self) -> bool:
        """Return whether a step may be running here. Whoever it is for, the next one begins when it has ended."""
        return self._runs_lower or bool(self.batch_seqs or self.num_running or self.queued_tokens)

    @property
    def has_slot(self) -> bool:
        """Return whether one more sequence finds a slot."""
        return self.num_seqs < self.max_num_seqs

    @property
    def steps_to_slot(self) -> float:
        """Return how many steps pass until one more sequence finds a slot, if those here end evenly; infinite while it is not
        known how long outputs are."""
        num_before = self.num_seqs + 1 - self.max_num_seqs
        if num_before <= 0:
            return 0.0
        return num_before * self._turnover.mean_output_tokens / max(1, self.max_num_seqs)

    def has_blocks(
        self, num_tokens: int, contexts: Contexts, hashes: Sequence[int], cached: CachedBlocks
    ) -> bool:
        """Return whether there is room for a prompt of `num_tokens`, and for what its sequence will hold. What is cached is
        looked up only where that decides."""
        last_has_room = (-num_tokens % self.block_size) / self.block_size
        growth = growth_blocks(contexts, self._num_to_decode + 1, self.block_size)
        growth = max(0.0, growth - last_has_room)
        if self._finds(self.blocks_needed(num_tokens, (), 0), growth):
            return True
        num_cached = cached.get(self.address, 0)
        return bool(num_cached) and self._finds(self.blocks_needed(num_tokens, hashes, num_cached), growth)

    def _finds(self, num_blocks: int, growth: float) -> bool:
        """Return whether there are so many blocks at once, and as many more before long."""
        return num_blocks + growth <= self.room_blocks and num_blocks <= self.now_blocks

    def can_compute(self, place: PlaceRequest, cached: CachedBlocks) -> bool:
        """Return whether there is room for a prompt that is computed here for another instance. One that does not decode has room
        before long; one that does may be full of outputs."""
        return not self.decodes or self.has_blocks(place.num_tokens, NO_CONTEXTS, place.block_hashes, cached)

    def output_blocks(self, num_tokens: int, num_output: int) -> int:
        """Return how many blocks more than its prompt a sequence takes with so much output."""
        size = self.block_size
        return num_blocks_for(num_tokens + num_output, size) - num_blocks_for(num_tokens, size)

    def blocks_needed(self, num_tokens: int, hashes: Sequence[int], num_cached: int) -> int:
        """Return how many of `free_blocks` a sequence of `num_tokens` would take.

        Of its `num_cached` leading blocks in the cache, those that a reservation already pays for are free of charge. The others
        count as available in the report and stop being so."""
        shared = self._chains.num_shared(hashes, num_cached) if num_cached else 0
        return self.state_blocks + num_blocks_for(num_tokens, self.block_size) - shared

    def reserve(self, key: str, reservation: PlacementReservation) -> None:
        self._add(key, reservation)
        self._refresh()

    def grown(self, key: str, num_blocks: int, contexts: Contexts) -> None:
        """Note how far a reserved sequence has come, and what it will hold. Nothing happens where it is not reserved."""
        is_settled = key in self._settled
        reservations = self._settled if is_settled else self._unsettled
        total = self._settled_sum if is_settled else self._unsettled_sum
        if (reservation := reservations.get(key)) is not None:
            total.add(reservation, -1)
            reservation = reservations[key] = reservation.grown(num_blocks, contexts)
            total.add(reservation, 1)
            self._refresh()

    def release(self, key: str) -> None:
        """Forget a reservation. Nothing happens when there is none. When no reservation is left that the last report shows, the
        work in that report has ended, and the next request need not wait for a new report."""
        was_settled = key in self._settled
        if self._remove(key):
            if was_settled and not self._settled:
                self._take_idle()
            self._refresh()

    def report(self, report: LoadReport, settled_before: float) -> None:
        """Take a report over. It shows all reservations that it says have arrived, and is taken to show those made before
        `settled_before`."""
        self._take(report)
        for key in report.sent:
            self.out_links.give_back(key)
        for key in report.received:
            if key in self._unsettled:
                self._settle(key)
        while self._unsettled:
            key, reservation = next(iter(self._unsettled.items()))
            if reservation.made_at >= settled_before:
                break
            self._settle(key)
        self._refresh()

    def leave(self) -> None:
        self.leaving = True
        self._refresh()

    def above(self, level: int) -> "Member":
        """Return the instance as a class of that priority finds it once all lower ones have given way; itself where none is
        lower.

        The result is for reading only: nothing may be reserved to it."""
        if level <= self.lowest_level:
            return self
        known = self._above.get(level)
        if known is None or known.version != self.version:
            known = self._above[level] = self._without_below(level)
        return known

    def _without_below(self, level: int) -> "Member":
        """Return the instance without its lower classes. Their sequences are preempted or left out of steps
        (`core.pacing.priority`), and their prompts come later. The step that runs is not stopped."""
        lower, tightest_s = ReservationSum(), inf
        for reservation in (*self._unsettled.values(), *self._settled.values()):
            if reservation.level < level:
                lower.add(reservation, 1)
            elif reservation.num_seqs:
                tightest_s = min(tightest_s, reservation.tpot_s)
        rest = Member(self.info, None, self._turnover)
        rest.version, rest.leaving, rest.defect = self.version, self.leaving, self.defect
        rest.steps, rest.step_s = self.steps, self.step_s
        rest._runs_lower = self.is_busy
        rest.measured_tokens_per_s, rest.capacity_tokens = self.measured_tokens_per_s, self.capacity_tokens
        rest.lowest_level = level
        later = sum(tokens for priority, tokens in self._waiting_by_priority if priority < level)
        later += sum(one.compute_tokens for one in self._unsettled.values() if one.level < level)
        num_left, left = max(0, self._num_to_decode - lower.num_seqs), without(self._contexts, lower.contexts)
        lower_blocks = lower.num_blocks + self._growth_blocks()
        lower_blocks -= growth_blocks(left, num_left, self.block_size)
        rest._set_blocks(
            self._exact_free + lower_blocks,
            self._exact_room + lower_blocks,
            self._exact_now + lower.num_blocks,
        )
        rest.num_seqs = max(0, self.num_seqs - lower.num_seqs)
        rest._waiting_tokens = max(0, self.queued_tokens - later)
        rest.tightest_tpot_s = tightest_s
        rest._set_batch(num_left, left)
        rest._chains, rest.out_links = self._chains, self.out_links
        return rest

    def status(self) -> InstanceStatus:
        return InstanceStatus(
            address=self.address,
            prefills=self.prefills,
            decodes=self.decodes,
            num_blocks=self.num_blocks,
            free_blocks=self.num_blocks - self._used_blocks,
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            defect=self.defect,
            tiers=self.tiers,
            steps=self.steps,
            work=self.work,
            leaving=self.leaving,
            queued_tokens=self.queued_tokens,
            tokens_per_s=self.measured_tokens_per_s,
            step_s=self.step_s,
            expert_imbalance=tuple((one.layer, one.imbalance) for one in self.experts),
            expert_moves=sum(one.num_moves for one in self.experts),
            start=self.info.start,
        )

    def _refresh(self) -> None:
        """Work the sums out anew. Settled reservations show in the report as far as they have grown, so the larger of the two
        counts. Unsettled ones come on top."""
        self.version += 1
        self._changed[self.address] = self
        settled, unsettled = self._settled_sum, self._unsettled_sum
        self.num_seqs = max(self.num_running + self.num_waiting, settled.num_seqs) + unsettled.num_seqs
        num_to_decode = max(self.num_decoding, settled.num_seqs) + unsettled.num_seqs
        self._set_batch(num_to_decode, added(self._reported_contexts(), unsettled.contexts))
        kept, used = settled.num_blocks, self._used_blocks
        others = self.all_blocks - unsettled.num_blocks - self._growth_blocks() + _ROUNDING
        spare = self._spare_blocks = self.num_running * self._spare_share
        now = self.num_blocks + self._pausable_blocks - unsettled.num_blocks - used + _ROUNDING
        self._set_blocks(others - max(used, kept), others - max(used + spare, kept), now)

    def _reported_contexts(self) -> Contexts:
        """Return what the sequences hold and will hold that the report shows. Whoever has placed them, they are taken to grow as
        those do that were reserved here."""
        known, now = self._settled_sum.contexts, float(self.context_tokens)
        if known[0] <= 0:
            return even(now)
        return scaled(known, max(1.0, now / known[0]))

    def _growth_blocks(self) -> float:
        return growth_blocks(self._contexts, self._num_to_decode, self.block_size)

    def _set_blocks(self, free: float, room: float, now: float) -> None:
        """Note how much is free. Parts of blocks stay known, so that what lower classes keep is rounded with them, not apart."""
        self._exact_free, self._exact_room, self._exact_now = free, room, now
        # A newcomer's last block has room for some of its growth (`has_blocks`), which may be counted again once it is here.
        self.free_blocks = max(0, min(self.all_blocks, floor(min(free, now))))
        self.room_blocks = max(0, min(self.all_blocks, floor(room)))
        self.now_blocks = max(0, min(self.num_blocks, floor(now - self._spare_blocks)))

    def _set_batch(self, num_seqs: int, contexts: Contexts) -> None:
        """Note how many sequences decode or will decode here, and the sum of their lengths. Those without a slot are in no
        step."""
        self._num_to_decode, self._contexts = num_seqs, contexts
        self.batch_seqs = min(num_seqs, self.max_num_seqs)
        self.batch_context_tokens = contexts[0]
        if num_seqs > self.batch_seqs:
            self.batch_context_tokens *= self.batch_seqs / num_seqs

"""The sequences on a device of the coarse simulation: who waits, whose prompt is computed, who decodes or sits steps out.

Invariant: each sequence that is here is in exactly one of the five; all but those that wait have blocks."""

from core.pacing.giving_way import giving_way
from core.pacing.lateness import late_tokens
from core.pacing.overcommit import ahead_s, pausable, rests
from core.pacing.priority import taking_part, tokens_by_priority
from core.pacing.slots import decode_slots, has_slot
from core.ports import SchedulerPolicy
from core.reports import Register
from core.types import Request
from sim.coarse.blocks import FINE_BLOCK_TOKENS, Blocks
from sim.coarse.decode_batch import DecodeBatch
from sim.coarse.device_config import DeviceConfig
from sim.coarse.simulated_sequence import SimulatedSequence


class DeviceSequences:
    def __init__(
        self, info: Register, config: DeviceConfig, policy: SchedulerPolicy[SimulatedSequence], blocks: Blocks
    ) -> None:
        self._info, self._config, self._policy, self._blocks = info, config, policy, blocks
        self.waiting: list[SimulatedSequence] = []
        self.prompts: list[SimulatedSequence] = []
        self.joining: list[SimulatedSequence] = []
        self.decoding = DecodeBatch(info.block_size, info.state_blocks)
        self.paused: list[SimulatedSequence] = []
        """Sequences that decode and sit steps out, because a class of higher priority needs the time."""
        self._read_until = 0.0
        """When the last of what is being read back will be here."""
        self._priorities: set[int] = set()
        """The priorities of the classes that have come here."""

    def note_class(self, request: Request) -> None:
        self._priorities.add(request.slo.priority)

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prompts) + len(self.joining) + len(self.paused)

    @property
    def coming(self) -> list[SimulatedSequence]:
        """Return those that a step does not take part in before it is planned: all but those that decode."""
        return [*self.waiting, *self.prompts, *self.joining]

    @property
    def num_waiting_tokens(self) -> int:
        """The number of tokens to compute before everything here decodes."""
        return sum(count for _, count in self._to_compute())

    def late_tokens(self, now: float) -> int:
        """Return the tokens of prompts that are late, which let others pass."""
        if self._config.mixed_batch_tokens:
            return 0
        return late_tokens(self._to_compute(), now, self._config.steps, self._policy.tuning)

    def waiting_by_priority(self) -> tuple[tuple[int, int], ...]:
        """Return (priority, tokens to compute) of each class that is here, the lowest first; empty where one class came."""
        if len(self._priorities) <= 1:
            return ()
        decoding = (seq.request.slo.priority for seq in (*self.decoding, *self.paused))
        return tokens_by_priority(decoding, self._to_compute())

    def _to_compute(self) -> list[tuple[SimulatedSequence, int]]:
        """Return each sequence that does not decode yet, with how many of its tokens are to be computed before it does."""
        waiting = [(seq, seq.num_known - seq.num_below) for seq in self.waiting]
        return [(seq, seq.num_missing) for seq in self.prompts] + waiting

    def admit(self, seq: SimulatedSequence, now: float) -> bool:
        """Begin the prompt of a waiting sequence. Return False where it lacks a slot or blocks."""
        num_running = self.num_running
        if not has_slot(seq, num_running, self._info.max_num_seqs):
            return False
        if not self._blocks.admit(seq, seq.num_known, num_running):
            if self.rests(seq, now) or not self.make_room(seq, seq.num_known + 1, now):
                return False
            if not self._blocks.admit(seq, seq.num_known, self.num_running):
                return False
        self.waiting.remove(seq)
        self.prompts.append(seq)
        self._read_back(seq, now)
        return True

    def _read_back(self, seq: SimulatedSequence, now: float) -> None:
        """Have the KV read that host memory keeps of a sequence, one after another. Steps do without it until it is there."""
        num_tokens, seq.num_below = seq.num_below - seq.num_computed, 0
        if num_tokens > 0:
            seq.num_computed += num_tokens
            self._read_until = max(self._read_until, now)
            self._read_until += num_tokens * self._info.kv_token_bytes / self._config.host_bytes_per_s
            seq.ready_at = self._read_until

    def rests(self, seq: SimulatedSequence, now: float) -> bool:
        """Return whether a waiting sequence has paused, and need not be back yet."""
        return rests(seq, seq.rests_until, now, self._policy.tuning)

    def make_room(
        self, seq: SimulatedSequence, num_tokens: int, now: float, *, between_steps: bool = True
    ) -> bool:
        """Have others give way until `seq` finds blocks for so many tokens. Return False, and none does, where they have too few.
        While steps run, only such give way as are ahead of their pace."""
        size = self._info.block_size
        wanted = -(-num_tokens // size) + self._info.state_blocks
        wanted += -(-self.num_running * FINE_BLOCK_TOKENS // size)
        below = self._below(seq) if between_steps else []
        short = wanted - self._blocks.num_available
        victims = giving_way(self._policy, below, self._pausable(seq, now), short)
        for victim in victims or ():
            if victim in below:
                self._preempt(victim, now)
            else:
                self._pause(victim, now)
        return victims is not None

    def pausable_blocks(self, now: float, num_done: int) -> int:
        """Return the blocks of sequences that are so far ahead, `num_done` steps after the last count, that the scheduler may
        count on them."""
        if not self.overcommits:
            return 0
        found, steps, counts_s = 0, self.decoding.steps + num_done, self._policy.tuning.counts_s
        for seq in self.decoding:
            more_s = (steps - seq.joined_step) * seq.request.slo.tpot_s
            if ahead_s(seq, now - more_s) > counts_s:
                found += len(seq.blocks.block_ids)
        return found

    @property
    def overcommits(self) -> bool:
        """Whether sequences that are ahead of their pace pause and give up their blocks."""
        config = self._config
        return config.host_bytes_per_s > 0 and config.longest_pause_s > 0 and not self._info.state_blocks

    def _pausable(self, seq: SimulatedSequence, now: float) -> list[SimulatedSequence]:
        if not self.overcommits:
            return []
        return pausable(self.decoding.counted(), seq.request.slo.priority, now, self._policy.tuning)

    def _pause(self, seq: SimulatedSequence, now: float) -> None:
        seq.rests_until = now + self._config.longest_pause_s
        self._preempt(seq, now)

    def join(self, planned_at: float) -> None:
        """Let those decode that were ready when the step was planned."""
        if not self.joining:
            return
        num_slots = self._num_slots()
        left: list[SimulatedSequence] = []
        for seq in self.joining:
            if seq.ready_at <= planned_at and len(self.decoding) < num_slots:
                self.decoding.insert(seq)
            else:
                left.append(seq)
        self.joining = left

    def _num_slots(self) -> int:
        """Return how many sequences may decode."""
        num_decoding = len(self.decoding) + len(self.joining)
        return decode_slots(self._info.max_num_seqs, num_decoding, self.prompts, self.waiting)

    def enter_batch(self, seq: SimulatedSequence, now: float) -> None:
        """Let a sequence decode whose prompt was computed here, behind those that wait for a slot. Where there are slots, the
        next step is planned already, and has it."""
        if seq.num_output >= seq.job.max_tokens:
            self._blocks.keep_output(seq)
            self._blocks.strip(seq)
            return
        seq.ready_at = now
        if len(self.decoding) + len(self.joining) < self._info.max_num_seqs:
            self.decoding.insert(seq)
        else:
            self.joining.append(seq)

    def grow_decoding(self, now: float) -> None:
        """Give a block to each sequence whose next token needs one. May preempt."""
        while (seq := self.decoding.pop_growing()) is not None:
            if self._make_room(seq, now):
                self._blocks.grow(seq)
                self.decoding.note_growth(seq)

    def _make_room(self, seq: SimulatedSequence, now: float) -> bool:
        """Free one block, taking it from a victim when none is left. Return False when the victim is `seq` itself."""
        while self._blocks.num_available < 1:
            if ahead := self._pausable(seq, now):
                victim = ahead[0]
                self._pause(victim, now)
            else:
                victim = self._policy.victim(self._preemptible())
                self._preempt(victim, now)
            if victim is seq:
                return False
        return True

    def _preemptible(self) -> list[SimulatedSequence]:
        prompts = (seq for seq in self.prompts if seq.holder is None)
        return [*self.decoding.counted(), *self.paused, *self.joining, *prompts]

    def put_classes_first(self, now: float) -> None:
        """Say which sequences sit the next step out, and take slots of lower classes for higher ones that wait."""
        if len(self._priorities) <= 1:
            return
        self._free_slots(now)
        batch = [*self.decoding.counted(), *self.paused]
        taking = taking_part(batch, self._config.steps, now, self._policy.tuning)
        chosen = set(map(id, taking if taking or self.prompts else batch))
        for seq in batch:
            if (id(seq) in chosen) == (seq in self.decoding):
                continue
            if id(seq) in chosen:
                self.paused.remove(seq)
                self.decoding.insert(seq)
            else:
                self.decoding.remove(seq)
                self.paused.append(seq)

    def _free_slots(self, now: float) -> None:
        num_free = self._info.max_num_seqs - self.num_running
        if num_free >= len(self.waiting):
            return
        for seq in [*self._policy.order(self.waiting, now)][max(0, num_free) :]:
            if not (victims := self._below(seq)):
                return
            self._preempt(self._policy.victim(victims), now)

    def _below(self, seq: SimulatedSequence) -> list[SimulatedSequence]:
        """Return the sequences of lower classes that can be preempted."""
        if len(self._priorities) <= 1:
            return []
        priority = seq.request.slo.priority
        return [one for one in self._preemptible() if one.request.slo.priority < priority]

    def _preempt(self, seq: SimulatedSequence, now: float) -> None:
        if seq in self.decoding:
            self.decoding.remove(seq)
        elif seq in self.paused:
            self.paused.remove(seq)
        elif seq in self.joining:
            self.joining.remove(seq)
        else:
            self.prompts.remove(seq)
        if self._config.host_bytes_per_s and not self._info.state_blocks:
            seq.num_below = seq.num_computed // FINE_BLOCK_TOKENS * FINE_BLOCK_TOKENS
        self._blocks.preempt(seq)
        seq.num_computed, seq.ready_at = 0, now
        self.waiting.append(seq)

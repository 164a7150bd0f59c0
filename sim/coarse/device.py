"""One instance of the coarse simulation: composes steps as `StepScheduler` does, and takes equal decode steps in one burst.
`tests/sim/test_steps_agree.py` holds it to that.

Production: block pool, prefix tree, eviction and ledger (`sim.coarse.blocks`), the worker policy. Modelled: the order in which a
step is filled, preemption by recompute, lookahead (a step knows what was here when the one before began), the hand-over (layers
go out while the next compute; one link out of each instance, first come, first served). Left out: generation at prefill while a
slow link catches up, lower cache tiers, replicas, failures."""

import itertools
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from core.cost.steps import chunk_pairs
from core.ports import SchedulerPolicy
from core.reports import LoadReport, Register
from engine.planning.planned_reservations import REST_BLOCKS
from engine.planning.sequence import Sequence
from sim.coarse.blocks import FINE_BLOCK_TOKENS, Blocks
from sim.coarse.burst import Burst, decoding_burst
from sim.coarse.device_config import DeviceConfig
from sim.coarse.device_sequences import DeviceSequences
from sim.coarse.outlink import OutLink
from sim.coarse.simulated_sequence import Rate, SimulatedRequest, SimulatedSequence

_PAUSED_STEPS = 8
"""Steps that are taken at once, at most, while some sequences sit them out, or where another device may slow them down."""


class Surroundings(Protocol):
    """What a device asks of the world."""

    def at(self, due_at: float, call: Callable[..., None], *args: object) -> None: ...
    def device(self, address: str) -> "Device": ...
    def new_block_id(self) -> int: ...
    def tokens(self, job: SimulatedRequest, now: float, num_tokens: int) -> None:
        """The job has so many output tokens, the last of them at `now`."""
        ...

    def changed(self, device: "Device", now: float) -> None:
        """The load is another one."""
        ...


@dataclass(slots=True)
class _Chunk:
    seq: SimulatedSequence
    start: int
    count: int


class Device:
    def __init__(
        self,
        info: Register,
        config: DeviceConfig,
        policy: SchedulerPolicy[SimulatedSequence],
        world: Surroundings,
    ) -> None:
        self.info, self._config, self._policy, self._world = info, config, policy, world
        self._blocks = Blocks(info.num_blocks, info.block_size, world.new_block_id, info.state_blocks)
        self._seqs = DeviceSequences(info, config, policy, self._blocks)
        self._reserving: deque[tuple[SimulatedSequence, str]] = deque()
        self._chunks: list[_Chunk] = []
        self._burst: Burst | None = None
        self._timer = 0
        self._rate = Rate()
        self._num_measured = 0
        """Steps of the running burst that `_rate` has seen."""
        self._reported: tuple[float, ...] = ()
        self._reported_step_s = 0.0
        self._link = OutLink(config.link, config.num_layers)
        self._arrivals = itertools.count()
        self._reports = itertools.count(1)
        self._received: list[str] = []
        self.num_steps = 0
        self.busy_s = 0.0

    def submit(self, now: float, job: SimulatedRequest, prefill: str) -> None:
        """Decode `job` here, after computing its prompt here too, or (`prefill`) once that instance has sent its KV."""
        self._received.append(job.request.key)
        seq = self._seq(job, now)
        if prefill:
            insort(self._reserving, (seq, prefill), key=_priority)
            self._serve_reservations(now)
        else:
            self._seqs.waiting.append(seq)
        self._wake(now)

    def start_prefill(self, now: float, holder: SimulatedSequence) -> None:
        """Compute the prompt of `holder`, a sequence on another instance, from its first missing token on."""
        self._received.append(holder.request.key)
        seq = self._seq(holder.job, now)
        seq.holder, seq.num_pushed = holder, holder.num_computed
        self._seqs.waiting.append(seq)
        self._wake(now)

    def committed(self, now: float, seq: SimulatedSequence) -> None:
        """The KV of the prompt of `seq` is here, and the first token is sampled."""
        seq.first_token_at = now
        seq.num_computed, seq.num_known, seq.ready_at = seq.num_known, seq.num_known + 1, now
        self._blocks.offer(seq)
        if seq.num_output >= seq.job.max_tokens:
            self._blocks.strip(seq)
            self._serve_reservations(now)
        else:
            self._seqs.joining.append(seq)
        self._wake(now)

    def delivered(self, now: float, seq: SimulatedSequence) -> None:
        """All KV of a computed prompt has left: its blocks are free for others."""
        self._blocks.strip(seq)
        self._serve_reservations(now)
        self._wake(now)

    @property
    def is_busy(self) -> bool:
        return self._burst is not None

    def report(self, now: float) -> LoadReport | None:
        """None when it would say the same as the last one, but for a change of the step time by less than 2 %."""
        self._measure(now)
        seqs = self._seqs
        waiting, num_waiting = seqs.num_waiting_tokens, len(seqs.waiting) + len(self._reserving)
        num_done = self._burst.num_done(now) if self._burst is not None else 0
        pausable = seqs.pausable_blocks(now, num_done)
        load = (self._blocks.num_available, waiting, num_waiting, seqs.num_running, self._rate.tokens_per_s)
        step_s = self._rate.step_s
        added, removed = self._blocks.drain_events()
        same = load == self._reported and abs(step_s - self._reported_step_s) < 0.02 * step_s
        grown = seqs.decoding.grown(num_done)
        if same and not added and not removed and not self._received and not grown:
            return None
        received, self._received = tuple(self._received), []
        self._reported, self._reported_step_s = load, step_s
        return LoadReport(
            address=self.info.address,
            seq=next(self._reports),
            free_blocks=load[0],
            waiting_tokens=load[1],
            waiting_by_priority=seqs.waiting_by_priority(),
            num_waiting=load[2],
            num_running=load[3],
            tokens_per_s=load[4],
            step_s=step_s,
            cache_added=added,
            cache_removed=removed,
            num_decoding=len(seqs.decoding) + len(seqs.joining) + len(seqs.paused),
            context_tokens=seqs.decoding.context
            + sum(s.num_known for s in (*seqs.prompts, *seqs.joining, *seqs.paused)),
            received=received,
            steps=self._config.steps,
            late_tokens=seqs.late_tokens(now),
            pausable_blocks=pausable,
            grown=grown,
        )

    def check_integrity(self) -> None:
        """Raises Bug where the production ledger, pool and prefix tree disagree with the sequences that are here."""
        self._blocks.check_integrity()

    def _wake(self, now: float) -> None:
        """Something new is here: begin a step, or end the running burst where the next plan would know of it."""
        self._world.changed(self, now)
        burst = self._burst
        if burst is None:
            self._begin(now, now)
            return
        known = burst.num_done(now) + (2 if self._config.lookahead else 1)
        if known < burst.num_steps:
            burst.num_steps = known
            self._set_timer()

    def _begin(self, now: float, planned_at: float) -> None:
        """The next step or burst, as it was planned at `planned_at`; as of now where there was nothing to plan then."""
        self._seqs.join(planned_at)
        self._seqs.put_classes_first(now)
        self._seqs.grow_decoding(now)
        self._chunks = self._compose(now, planned_at)
        self._num_measured = 0
        batch = len(self._seqs.decoding)
        if not batch and not self._chunks:
            self._burst = None
            if planned_at < now:
                self._begin(now, now)
            elif later := [seq.ready_at for seq in self._seqs.prompts if seq.ready_at > now]:
                self._world.at(min(later), self._wake)
            return
        if self._chunks:
            self._burst = Burst(now, 1, self._step_with_prompts_s(batch))
        else:
            self._burst = decoding_burst(now, self._seqs.decoding, self._config.step)
            if any(seq.ready_at > planned_at for seq in self._seqs.coming):
                self._burst.num_steps = 1
            elif (
                self._seqs.paused
                or self._config.shares_card
                or (self._seqs.overcommits and self._seqs.waiting)
            ):
                self._burst.num_steps = min(self._burst.num_steps, _PAUSED_STEPS)
        self._set_timer()

    def _step_with_prompts_s(self, batch: int) -> float:
        num_tokens, context = batch, self._seqs.decoding.context
        new_pairs = 0.0
        for chunk in self._chunks:
            num_tokens += chunk.count
            context += chunk.start + chunk.count
            new_pairs += chunk_pairs(chunk.start, chunk.count)
        pairs = self._seqs.decoding.context + new_pairs
        return self._config.step.step_s(num_tokens, context, pairs, batch + len(self._chunks))

    def _set_timer(self) -> None:
        """At the end of the burst, which may have become another."""
        assert self._burst is not None
        self._timer += 1
        self._world.at(self._burst.end_at, self._end, self._timer)

    def _end(self, now: float, timer: int) -> None:
        burst = self._burst
        if timer != self._timer or burst is None:
            return
        self._seqs.decoding.advance(burst.num_steps)
        self.num_steps += burst.num_steps
        self.busy_s += now - burst.began_at
        self._measure(now)
        self._finish_decoding(now)
        self._finish_chunks(now, burst)
        self._burst = None
        self._serve_reservations(now)
        self._world.changed(self, now)
        self._begin(now, burst.last_began_at if self._config.lookahead else now)

    def _measure(self, now: float) -> None:
        """Let the moving averages know of the steps that are over."""
        burst = self._burst
        num_done = burst.num_done(now) if burst is not None else 0
        if burst is None or num_done <= self._num_measured:
            return
        prompt_tokens = sum(chunk.count for chunk in self._chunks)
        step_s = burst.first_s + (num_done - 1) * burst.slope_s
        self._rate.observe(step_s, prompt_tokens, num_done - self._num_measured)
        self._num_measured = num_done

    def _finish_decoding(self, now: float) -> None:
        while (seq := self._seqs.decoding.pop_finished()) is not None:
            self._blocks.keep_output(seq)
            self._blocks.strip(seq)
            self._world.tokens(seq.job, now, seq.num_output)

    def _finish_chunks(self, now: float, burst: Burst) -> None:
        for chunk in self._chunks:
            seq = chunk.seq
            self._blocks.offer(seq)
            sent_at = self._push(seq, now, burst) if seq.holder is not None else now
            if seq.num_missing:
                continue
            self._seqs.prompts.remove(seq)
            if seq.holder is None:
                seq.num_known += 1
                seq.first_token_at = min(seq.first_token_at, now)
                self._world.tokens(seq.job, now, seq.num_output)
                self._seqs.enter_batch(seq, now)
            else:
                self._world.tokens(seq.job, now, seq.num_output + 1)
                holder = self._world.device(seq.holder.address)
                self._world.at(sent_at, self.delivered, seq)
                self._world.at(sent_at + self._config.message_s, holder.committed, seq.holder)
        self._chunks = []

    def _compose(self, now: float, planned_at: float) -> list[_Chunk]:
        """Prompts in the room that the decoding sequences leave in the step."""
        if not self._seqs.prompts and not self._seqs.waiting:
            return []
        prompts = self._by_turn((seq for seq in self._seqs.prompts if seq.ready_at <= planned_at), now)
        here = [seq for seq in self._seqs.waiting if seq.ready_at <= planned_at]
        budget = self._prompt_budget(now, [*prompts, *here])
        waiting = self._in_order(here, now) if here and budget > 0 else ()
        chunks: list[_Chunk] = []
        arriving, may_admit = set(map(id, waiting)), True
        gone = set[int]()
        """Prompts that gave way to one of a higher class."""
        for seq in self._by_turn((*prompts, *waiting), now):
            if budget <= 0 or len(self._seqs.decoding) + len(chunks) >= self.info.max_num_seqs:
                break
            if id(seq) in arriving:
                if not (may_admit := may_admit and self._seqs.admit(seq, now)):
                    continue
                gone = set(map(id, prompts)).difference(map(id, self._seqs.prompts))
            if id(seq) not in gone:
                budget -= self._take_chunk(seq, budget, chunks)
        return [chunk for chunk in chunks if id(chunk.seq) not in gone]

    def _in_order(self, waiting: list[SimulatedSequence], now: float) -> list[SimulatedSequence]:
        """Return those that wait. What has paused and need not be back yet comes last."""
        return sorted(self._policy.order(waiting, now), key=lambda seq: self._seqs.rests(seq, now))

    def _by_turn(self, seqs: Iterable[SimulatedSequence], now: float) -> list[SimulatedSequence]:
        """Where another bound than the policy's holds, prompts are served as they come."""
        if self._config.mixed_batch_tokens:
            return [*seqs]
        return sorted(seqs, key=lambda seq: self._policy.turn(seq, now, self._config.steps))

    def _prompt_budget(self, now: float, prompts: list[SimulatedSequence]) -> int:
        """Prompt tokens that the step that begins now may compute of those that were here when it was planned."""
        batch, limit = len(self._seqs.decoding), self._config.mixed_batch_tokens
        if batch and limit:
            return limit - batch
        budget = self.info.max_batch_tokens - batch
        if not batch:
            return budget
        decoding, steps = self._seqs.decoding, self._config.steps
        seqs = decoding.counted()
        return self._policy.prompt_tokens(seqs, decoding.context, prompts, steps, budget, now)

    def _take_chunk(self, seq: SimulatedSequence, budget: int, chunks: list[_Chunk]) -> int:
        count = max(0, min(seq.num_missing, budget))
        if count:
            chunks.append(_Chunk(seq, seq.num_computed, count))
            seq.num_computed += count
        return count

    def _seq(self, job: SimulatedRequest, now: float) -> SimulatedSequence:
        self._seqs.note_class(job.request)
        blocks = Sequence(request=job.request, tokens=list(job.ids), num_prompt=len(job.ids), arrival=0)
        return SimulatedSequence(
            job=job,
            address=self.info.address,
            arrival=next(self._arrivals),
            num_known=job.num_prompt,
            ready_at=now,
            blocks=blocks,
        )

    def _serve_reservations(self, now: float) -> None:
        while self._reserving:
            seq, prefill = self._reserving[0]
            if not self._reserve(seq, now):
                return
            self._reserving.popleft()
            num_blocks = REST_BLOCKS if seq.num_computed else 1
            if seq.num_missing <= num_blocks * FINE_BLOCK_TOKENS:
                self._compute_here(seq, now)
            else:
                source = self._world.device(prefill)
                self._world.at(now + self._config.message_s, source.start_prefill, seq)
                self._world.at(now + self._config.grant_ttl_s, self._expire, seq, source)

    def _reserve(self, seq: SimulatedSequence, now: float) -> bool:
        num_tokens = seq.num_known + 1
        if self._blocks.admit(seq, num_tokens, self._seqs.num_running):
            return True
        made_room = self._seqs.make_room(seq, num_tokens, now, between_steps=self._burst is None)
        return made_room and self._blocks.admit(seq, num_tokens, self._seqs.num_running)

    def _expire(self, now: float, seq: SimulatedSequence, source: "Device") -> None:
        """Its prompt was not begun in time; `source` may wait for blocks just as this instance does. Compute it here."""
        if source.withdraw(seq):
            self._compute_here(seq, now)
            self._wake(now)

    def _compute_here(self, seq: SimulatedSequence, now: float) -> None:
        """Compute the prompt of a sequence that has its blocks."""
        seq.ready_at = now
        self._seqs.prompts.append(seq)

    def withdraw(self, holder: SimulatedSequence) -> bool:
        """Do not compute that prompt; False when it has been begun."""
        waiting = next((seq for seq in self._seqs.waiting if seq.holder is holder), None)
        if waiting is not None:
            self._seqs.waiting.remove(waiting)
        return waiting is not None

    def _push(self, seq: SimulatedSequence, now: float, burst: Burst) -> float:
        """When the KV computed in the step that ends now, and any before it, will be with the holder."""
        num_tokens = max(0, seq.num_computed - seq.num_pushed)
        seq.num_pushed = max(seq.num_pushed, seq.num_computed)
        if not seq.num_missing:
            num_tokens += self.info.state_blocks * self.info.block_size
        return self._link.send(num_tokens * self.info.kv_token_bytes, burst.began_at, now)


def _priority(reservation: tuple[SimulatedSequence, str]) -> int:
    """Order reservations by class, so that higher classes are served first."""
    return -reservation[0].request.slo.priority

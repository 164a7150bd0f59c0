"""One instance of the coarse simulation: composes steps as `step_scheduler` does, and takes equal decode steps in one stretch.

Production: block pool, prefix tree, eviction and ledger (`sim.coarse.blocks`), the worker policy. Modelled: the order in which a
step is filled, preemption by recompute, lookahead (a step knows what was here when the one before began), the hand-over (layers
go out while the next compute; one link out of each instance, first come, first served). Left out: generation at prefill while a
slow link catches up, lower cache tiers, replicas, failures."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from core.ports import SchedulerPolicy
from core.precedence import taking_part
from core.reports import LoadReport, Register
from core.steps import chunk_pairs
from engine.planning.sequence import Sequence
from sim.coarse.blocks import Blocks
from sim.coarse.burst import Stretch, decoding_stretch
from sim.coarse.decode_batch import DecodeBatch
from sim.coarse.device_config import DeviceConfig
from sim.coarse.outlink import OutLink
from sim.coarse.simulated_sequence import Rate, SimulatedRequest, SimulatedSequence

_PAUSED_STEPS = 8
"""Steps that are taken at once, at most, while some sequences sit them out."""
_FINE_BLOCK_TOKENS = 16
"""A production block: a prompt lacking no more is computed where it is decoded."""


class Surroundings(Protocol):
    """What a device asks of the world."""

    def at(self, time_s: float, call: Callable[..., None], *args: object) -> None: ...
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
    stay: SimulatedSequence
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
        self._blocks = Blocks(info.num_blocks, info.block_size, world.new_block_id)
        self._waiting: list[SimulatedSequence] = []
        self._reserving: deque[tuple[SimulatedSequence, str]] = deque()
        self._prompts: list[SimulatedSequence] = []
        self._joining: list[SimulatedSequence] = []
        self._decoding = DecodeBatch(info.block_size)
        self._paused: list[SimulatedSequence] = []
        """Sequences that decode and sit steps out, because a class of higher priority needs the time."""
        self._chunks: list[_Chunk] = []
        self._stretch: Stretch | None = None
        self._timer = 0
        self._rate = Rate()
        self._num_measured = 0
        """Steps of the running stretch that `_rate` has seen."""
        self._reported: tuple[float, ...] = ()
        self._reported_step_s = 0.0
        self._priorities: set[int] = set()
        """The priorities of the classes that have come here."""
        self._link = OutLink(config.link, config.num_layers)
        self._arrivals = itertools.count()
        self._reports = itertools.count(1)
        self._received: list[str] = []
        self.num_steps = 0
        self.busy_s = 0.0

    def submit(self, now: float, job: SimulatedRequest, prefill: str) -> None:
        """Decode `job` here, after computing its prompt here too, or (`prefill`) once that instance has sent its KV."""
        self._received.append(job.request.key)
        stay = self._stay(job, now)
        if prefill:
            self._reserving.append((stay, prefill))
            self._serve_reservations(now)
        else:
            self._waiting.append(stay)
        self._wake(now)

    def start_prefill(self, now: float, holder: SimulatedSequence) -> None:
        """Compute the prompt of `holder`, a stay on another instance, from its first missing token on."""
        self._received.append(holder.request.key)
        stay = self._stay(holder.job, now)
        stay.holder, stay.num_pushed = holder, holder.num_computed
        self._waiting.append(stay)
        self._wake(now)

    def committed(self, now: float, stay: SimulatedSequence) -> None:
        """The KV of the prompt of `stay` is here, and the first token is drawn."""
        stay.first_token_s = now
        stay.num_computed, stay.num_known, stay.ready_s = stay.num_known, stay.num_known + 1, now
        self._blocks.offer(stay)
        if stay.num_output >= stay.job.max_tokens:
            self._blocks.strip(stay)
            self._serve_reservations(now)
        else:
            self._joining.append(stay)
        self._wake(now)

    def delivered(self, now: float, stay: SimulatedSequence) -> None:
        """All KV of a computed prompt has left: its blocks are free for others."""
        self._blocks.strip(stay)
        self._serve_reservations(now)
        self._wake(now)

    @property
    def is_busy(self) -> bool:
        return self._stretch is not None

    def report(self, now: float) -> LoadReport | None:
        """None when it would say the same as the last one, but for a change of the step time by less than 2 %."""
        self._measure(now)
        waiting = sum(s.num_missing for s in self._prompts) + sum(s.num_known for s in self._waiting)
        num_waiting = len(self._waiting) + len(self._reserving)
        load = (self._blocks.num_available, waiting, num_waiting, self._num_running, self._rate.tokens_per_s)
        step_s = self._rate.step_s
        added, removed = self._blocks.drain_events()
        same = load == self._reported and abs(step_s - self._reported_step_s) < 0.02 * step_s
        if same and not added and not removed and not self._received:
            return None
        received, self._received = tuple(self._received), []
        self._reported, self._reported_step_s = load, step_s
        return LoadReport(
            address=self.info.address,
            seq=next(self._reports),
            free_blocks=load[0],
            waiting_tokens=load[1],
            waiting_by_priority=self._waiting_by_priority(),
            num_waiting=load[2],
            num_running=load[3],
            tokens_per_s=load[4],
            step_s=step_s,
            cache_added=added,
            cache_removed=removed,
            num_decoding=len(self._decoding) + len(self._joining) + len(self._paused),
            context_tokens=self._decoding.context
            + sum(s.num_known for s in (*self._prompts, *self._joining, *self._paused)),
            received=received,
            steps=self._config.steps,
        )

    def _waiting_by_priority(self) -> tuple[tuple[int, int], ...]:
        if len(self._priorities) <= 1:
            return ()
        tokens = {stay.request.slo.priority: 0 for stay in (*self._decoding, *self._paused)}
        for stay in self._prompts:
            tokens[stay.request.slo.priority] = tokens.get(stay.request.slo.priority, 0) + stay.num_missing
        for stay in self._waiting:
            tokens[stay.request.slo.priority] = tokens.get(stay.request.slo.priority, 0) + stay.num_known
        return tuple(sorted(tokens.items()))

    def check_integrity(self) -> None:
        """Raises Bug where the production ledger, pool and prefix tree disagree with the sequences that are here."""
        self._blocks.check_integrity()

    def _wake(self, now: float) -> None:
        """Something new is here: begin a step, or end the running stretch where the next plan would know of it."""
        self._world.changed(self, now)
        stretch = self._stretch
        if stretch is None:
            self._begin(now, now)
            return
        known = stretch.num_done(now) + (2 if self._config.lookahead else 1)
        if known < stretch.num_steps:
            stretch.num_steps = known
            self._set_timer()

    def _begin(self, now: float, planned_s: float) -> None:
        """The next step or stretch, as it was planned at `planned_s`; as of now where there was nothing to plan then."""
        if not self._decoding and not self._prompts:
            planned_s = now
        self._join(planned_s)
        self._put_classes_first(now)
        self._grow_decoding(now)
        self._chunks = self._compose(now, planned_s)
        self._num_measured = 0
        batch = len(self._decoding)
        if not batch and not self._chunks:
            self._stretch = None
            return
        if self._chunks:
            self._stretch = Stretch(now, 1, self._step_with_prompts_s(batch))
        else:
            self._stretch = decoding_stretch(now, self._decoding, self._config.step)
            if _any_later(self._waiting, planned_s) or _any_later(self._joining, planned_s):
                self._stretch.num_steps = 1
            elif self._paused:
                self._stretch.num_steps = min(self._stretch.num_steps, _PAUSED_STEPS)
        self._set_timer()

    def _step_with_prompts_s(self, batch: int) -> float:
        num_tokens, context = batch, self._decoding.context
        new_pairs = 0.0
        for chunk in self._chunks:
            num_tokens += chunk.count
            context += chunk.start + chunk.count
            new_pairs += chunk_pairs(chunk.start, chunk.count)
        pairs = self._decoding.context + new_pairs
        return self._config.step.step_s(num_tokens, context, pairs, batch + len(self._chunks))

    def _set_timer(self) -> None:
        """At the end of the stretch, which may have become another."""
        assert self._stretch is not None
        self._timer += 1
        self._world.at(self._stretch.end_s, self._end, self._timer)

    def _end(self, now: float, timer: int) -> None:
        stretch = self._stretch
        if timer != self._timer or stretch is None:
            return
        self._decoding.advance(stretch.num_steps)
        self.num_steps += stretch.num_steps
        self.busy_s += now - stretch.began_s
        self._measure(now)
        self._finish_decoding(now)
        self._finish_chunks(now, stretch)
        self._serve_reservations(now)
        self._world.changed(self, now)
        self._begin(now, stretch.last_began_s if self._config.lookahead else now)

    def _measure(self, now: float) -> None:
        """Let the moving averages know of the steps that are over."""
        stretch = self._stretch
        num_done = stretch.num_done(now) if stretch is not None else 0
        if stretch is None or num_done <= self._num_measured:
            return
        prompt_tokens = sum(chunk.count for chunk in self._chunks)
        step_s = stretch.first_s + (num_done - 1) * stretch.slope_s
        self._rate.observe(step_s, prompt_tokens, num_done - self._num_measured)
        self._num_measured = num_done

    def _finish_decoding(self, now: float) -> None:
        while (stay := self._decoding.pop_finished()) is not None:
            self._blocks.keep_output(stay)
            self._blocks.strip(stay)
            self._world.tokens(stay.job, now, stay.num_output)

    def _finish_chunks(self, now: float, stretch: Stretch) -> None:
        for chunk in self._chunks:
            stay = chunk.stay
            self._blocks.offer(stay)
            sent_s = self._push(stay, now, stretch) if stay.holder is not None else now
            if stay.num_missing:
                continue
            self._prompts.remove(stay)
            if stay.holder is None:
                stay.num_known += 1
                stay.first_token_s = min(stay.first_token_s, now)
                self._world.tokens(stay.job, now, stay.num_output)
                self._enter_batch(stay, now)
            else:
                self._world.tokens(stay.job, now, stay.num_output + 1)
                holder = self._world.device(stay.holder.address)
                self._world.at(sent_s, self.delivered, stay)
                self._world.at(sent_s + self._config.message_s, holder.committed, stay.holder)
        self._chunks = []

    def _compose(self, now: float, planned_s: float) -> list[_Chunk]:
        """Prompts in the room that the decoding sequences leave in the step."""
        if not self._prompts and not self._waiting:
            return []
        self._prompts = self._by_turn(self._prompts, now)
        budget = self._prompt_budget(now)
        waiting: Iterable[SimulatedSequence] = ()
        if self._waiting and budget > 0:
            waiting = self._policy.order([stay for stay in self._waiting if stay.ready_s <= planned_s], now)
        chunks: list[_Chunk] = []
        begun, may_admit = set(map(id, self._prompts)), True
        for stay in self._by_turn((*self._prompts, *waiting), now):
            if budget <= 0 or len(self._decoding) + len(chunks) >= self.info.max_num_seqs:
                break
            if id(stay) not in begun and not (may_admit := may_admit and self._admit(stay)):
                continue
            budget -= self._take_chunk(stay, budget, chunks)
        return chunks

    def _by_turn(self, stays: Iterable[SimulatedSequence], now: float) -> list[SimulatedSequence]:
        """Where another bound than the policy's holds, prompts are served as they come."""
        if self._config.mixed_batch_tokens:
            return [*stays]
        return sorted(stays, key=lambda stay: self._policy.turn(stay, now, self._config.steps))

    def _admit(self, stay: SimulatedSequence) -> bool:
        num_running = self._num_running
        if num_running >= self.info.max_num_seqs or not self._blocks.admit(stay, stay.num_known, num_running):
            return False
        self._waiting.remove(stay)
        self._prompts.append(stay)
        return True

    def _prompt_budget(self, now: float) -> int:
        """Prompt tokens that the step that begins now may compute."""
        batch, limit = len(self._decoding), self._config.mixed_batch_tokens
        if batch and limit:
            return limit - batch
        budget = self.info.max_batch_tokens - batch
        if not batch:
            return budget
        decoding, steps = self._decoding, self._config.steps
        stays = decoding.counted()
        return self._policy.prompt_tokens(stays, decoding.context, self._prompts, steps, budget, now)

    @property
    def _num_running(self) -> int:
        return len(self._decoding) + len(self._prompts) + len(self._joining) + len(self._paused)

    def _take_chunk(self, stay: SimulatedSequence, budget: int, chunks: list[_Chunk]) -> int:
        count = max(0, min(stay.num_missing, budget))
        if count:
            chunks.append(_Chunk(stay, stay.num_computed, count))
            stay.num_computed += count
        return count

    def _join(self, planned_s: float) -> None:
        if not self._joining:
            return
        left: list[SimulatedSequence] = []
        for stay in self._joining:
            if stay.ready_s <= planned_s and len(self._decoding) < self.info.max_num_seqs:
                self._decoding.insert(stay)
            else:
                left.append(stay)
        self._joining = left

    def _enter_batch(self, stay: SimulatedSequence, now: float) -> None:
        """Its prompt was computed here: the next step is planned already, and has it."""
        if stay.num_output >= stay.job.max_tokens:
            self._blocks.keep_output(stay)
            self._blocks.strip(stay)
            return
        stay.ready_s = now
        if len(self._decoding) < self.info.max_num_seqs:
            self._decoding.insert(stay)
        else:
            self._joining.append(stay)

    def _grow_decoding(self, now: float) -> None:
        while (stay := self._decoding.pop_growing()) is not None:
            if self._make_room(stay, now):
                self._blocks.grow(stay)
                self._decoding.note_growth(stay)

    def _make_room(self, stay: SimulatedSequence, now: float) -> bool:
        """One block, from a victim when none is left; False when the victim is `stay` itself."""
        while self._blocks.num_available < 1:
            victim = self._policy.victim(self._preemptible())
            self._preempt(victim, now)
            if victim is stay:
                return False
        return True

    def _preemptible(self) -> list[SimulatedSequence]:
        return [*self._decoding.counted(), *self._paused, *(s for s in self._prompts if s.holder is None)]

    def _put_classes_first(self, now: float) -> None:
        """Say who sits the next step out, and take slots and blocks of lower classes for higher ones that wait."""
        if len(self._priorities) <= 1:
            return
        for stay in self._policy.order(self._waiting, now):
            if not self._make_way(stay, now):
                break
        batch = [*self._decoding.counted(), *self._paused]
        taking = taking_part(batch, (*self._prompts, *self._waiting), self._config.steps, now)
        chosen = set(map(id, taking if taking or self._prompts else batch))
        for stay in batch:
            if (id(stay) in chosen) == (stay in self._decoding):
                continue
            if id(stay) in chosen:
                self._paused.remove(stay)
                self._decoding.insert(stay)
            else:
                self._decoding.remove(stay)
                self._paused.append(stay)

    def _make_way(self, stay: SimulatedSequence, now: float) -> bool:
        """Preempt lower classes where `stay` lacks a slot or blocks, and what they have suffices; False: it waits."""
        priority = stay.request.slo.priority
        victims = [one for one in self._preemptible() if one.request.slo.priority < priority]
        wanted = -(-stay.num_known // self.info.block_size) + self._num_running
        coming = self._blocks.num_available
        if coming + sum(len(one.blocks.block_ids) for one in victims) < wanted:
            return False
        while self._num_running >= self.info.max_num_seqs or coming < wanted:
            if not victims:
                return False
            victim = self._policy.victim(victims)
            victims.remove(victim)
            coming += len(victim.blocks.block_ids)
            self._preempt(victim, now)
        return True

    def _preempt(self, stay: SimulatedSequence, now: float) -> None:
        if stay in self._decoding:
            self._decoding.remove(stay)
        elif stay in self._paused:
            self._paused.remove(stay)
        else:
            self._prompts.remove(stay)
        self._blocks.preempt(stay)
        stay.num_computed, stay.ready_s = 0, now
        self._waiting.append(stay)

    def _stay(self, job: SimulatedRequest, now: float) -> SimulatedSequence:
        self._priorities.add(job.request.slo.priority)
        blocks = Sequence(request=job.request, tokens=list(job.ids), num_prompt=len(job.ids), arrival=0)
        return SimulatedSequence(
            job=job,
            address=self.info.address,
            arrival=next(self._arrivals),
            num_known=job.num_prompt,
            ready_s=now,
            blocks=blocks,
        )

    def _serve_reservations(self, now: float) -> None:
        while self._reserving:
            stay, prefill = self._reserving[0]
            if not self._blocks.admit(stay, stay.num_known + 1, self._num_running):
                return
            self._reserving.popleft()
            if stay.num_missing <= _FINE_BLOCK_TOKENS:
                self._prompts.append(stay)
            else:
                source = self._world.device(prefill)
                self._world.at(now + self._config.message_s, source.start_prefill, stay)
                self._world.at(now + self._config.grant_ttl_s, self._expire, stay, source)

    def _expire(self, now: float, stay: SimulatedSequence, source: "Device") -> None:
        """Its prompt was not begun in time; `source` may wait for blocks just as this instance does. Compute it here."""
        if source.withdraw(stay):
            self._prompts.append(stay)
            self._wake(now)

    def withdraw(self, holder: SimulatedSequence) -> bool:
        """Do not compute that prompt; False when it has been begun."""
        waiting = next((stay for stay in self._waiting if stay.holder is holder), None)
        if waiting is not None:
            self._waiting.remove(waiting)
        return waiting is not None

    def _push(self, stay: SimulatedSequence, now: float, stretch: Stretch) -> float:
        """When the KV computed in the step that ends now, and any before it, will be with the holder."""
        num_tokens = max(0, stay.num_computed - stay.num_pushed)
        stay.num_pushed = max(stay.num_pushed, stay.num_computed)
        return self._link.send(num_tokens * self.info.kv_token_bytes, stretch.began_s, now)


def _any_later(stays: list[SimulatedSequence], planned_s: float) -> bool:
    """Is any of them ready only after that?"""
    return any(stay.ready_s > planned_s for stay in stays)

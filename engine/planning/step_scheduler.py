"""Plans an engine's steps: continuous batching, chunked prefill, prefix sharing, preemption by recompute, lookahead.

There is no prefill phase and no decode phase, only tokens computed versus tokens known. `plan` advances counters; `commit`
only learns what was drawn, so the next step can be planned while one runs. Steps are committed in the order of their plans.

Invariant: a block is given back only when no planned, uncommitted step can write it and no grant or pusher uses it."""

import itertools
from collections import deque
from collections.abc import Sequence as SeqOf

from core.config import EngineConfig
from core.errors import Bug, RequestError
from core.kv import num_blocks_for
from core.messages import Grant
from core.plan import SeqWork, StepPlan, StepResult
from core.ports import SchedulerPolicy
from core.precedence import taking_part
from core.steps import UNKNOWN_STEPS, StepModels
from core.types import Request, TokenOut
from engine.cache.block_pool import BlockPool
from engine.cache.radix_cache import Kept, PrefixMatch, RadixCache
from engine.planning.block_ledger import BlockLedger, Reservation, Restore
from engine.planning.sequence import Sequence, State
from engine.planning.sequence_table import SequenceTable
from engine.planning.speculation.speculator import Drafts, Speculator
from engine.planning.step_builder import StepBuilder
from engine.planning.step_time_fit import expected_s


class StepScheduler:
    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_context_tokens: int,
        policy: SchedulerPolicy[Sequence],
        first_block: int = 0,
        *,
        whole_prompts: bool = False,
        speculator: Speculator | None = None,
    ) -> None:
        """`whole_prompts`: a prompt is computed in one step, for which `config` has room, and nothing decodes. `speculator`: who
        guesses what sequences draw next, if anybody."""
        self._config, self._policy, self._whole_prompts = config, policy, whole_prompts
        self._speculator = speculator
        self._max_context_tokens = max_context_tokens
        self._pool = BlockPool(num_blocks, first_block)
        self._cache = RadixCache(self._pool, config.block_size, config.prefix_cache)
        self._ledger = BlockLedger(self._pool, self._cache, config.block_size)
        self._table = SequenceTable()
        self.num_preempted = 0
        self._drop: list[str] = []
        self._steps = itertools.count()
        self._in_flight: deque[StepPlan] = deque()

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_used

    @property
    def prefix_tokens(self) -> tuple[int, int]:
        """(known tokens of the sequences that came, of these found in the prefix cache)"""
        return self._ledger.num_queried_tokens, self._ledger.num_hit_tokens

    @property
    def num_available_blocks(self) -> int:
        """The number of unused blocks and of those that the prefix cache would give up."""
        return self._ledger.num_available

    @property
    def draft_tokens(self) -> tuple[int, int]:
        """The number of guesses that steps have computed, and of those that were right."""
        return self._speculator.counts if self._speculator is not None else (0, 0)

    @property
    def awaits_tokens(self) -> bool:
        """Whether the next step is to be planned when those in flight are committed, since guesses follow what they draw."""
        return self._speculator is not None and self._speculator.awaits(self._in_flight, self._table)

    @property
    def num_running(self) -> int:
        return len(self._table.running)

    @property
    def num_decoding(self) -> int:
        """The number of running sequences whose prompt is computed."""
        return len(self._table.decoding)

    @property
    def num_context_tokens(self) -> int:
        return sum(len(seq.tokens) for seq in self._table.running)

    @property
    def num_waiting(self) -> int:
        return len(self._table.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """The number of tokens to compute before everything here decodes."""
        return self._table.num_waiting_tokens

    @property
    def waiting_by_priority(self) -> tuple[tuple[int, int], ...]:
        """(priority, tokens of `num_waiting_tokens`) of each class that is here, the lowest first."""
        return self._table.waiting_by_priority

    @property
    def stuck_pushes(self) -> list[str]:
        """Return the keys of pushed sequences that cannot be admitted because every block is reserved for remote writes. The
        instances that write may wait for this one in turn. Ask when `plan` has nothing and nothing is in flight."""
        idle = {State.WAITING, State.RESERVED}
        if self._ledger.num_restores or any(seq.state not in idle for seq in self._table.all.values()):
            return []
        return [seq.key for seq in self._table.waiting if seq.push is not None]

    def drain_cache_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._cache.drain_events()

    def replay_cache_events(self) -> None:
        self._cache.replay_events()

    def knows(self, key: str) -> bool:
        return key in self._table.all

    def check_fits(self, request: Request) -> None:
        """Raise RequestError for a request that could never be served here."""
        size = len(request.prompt) + request.sampling.max_tokens
        # What is drawn after a text to embed has no place: it means nothing.
        most_known = self._max_context_tokens - (not request.sampling.pooling)
        if len(request.tokens) > most_known:
            raise RequestError(
                f"{len(request.tokens)} tokens do not fit a context of {self._max_context_tokens}"
            )
        capacity = self.num_blocks * self._config.block_size
        if min(size, self._max_context_tokens) > capacity:
            raise RequestError(
                f"prompt and output of {size} tokens exceed this instance's KV cache of {capacity}"
            )
        if request.key in self._table.all:
            raise RequestError(f"request {request.key} is already here")

    def add(self, request: Request, push: Grant | None = None) -> None:
        """Compute `request` here. With `push` it draws token by token until `hold`, and its KV is sent on. Raises
        RequestError."""
        self.check_fits(request)
        seq = self._table.new(request, push)
        self._table.waiting.append(seq)

    def abort(self, key: str) -> None:
        """Compute no more of it. Blocks that a pusher or a writer uses stay until `release`. Idempotent."""
        seq = self._table.all.get(key)
        if seq is None or seq.aborted or seq.state in (State.RESERVED, State.HELD):
            return
        seq.aborted = True
        if seq.state is State.WAITING:
            self._table.waiting.remove(seq)
            self._forget(seq)
        elif seq.state is State.RUNNING:
            self._table.running.remove(seq)
            self._leave(seq)
        elif seq.state is State.PREEMPTED:
            self._leave(seq)

    def reserve(self, request: Request) -> Reservation | None:
        """Blocks for all known tokens and the next one, or None while there are not enough. Raises RequestError."""
        self.check_fits(request)
        match = self._ledger.find(request, request.tokens, partial=False)
        seq = self._table.new(request, None)
        # One block more: whoever writes the others may go on generating meanwhile.
        wanted = min(
            len(seq.tokens) + 1 + self._config.block_size, seq.num_prompt + request.sampling.max_tokens
        )
        num_tokens = max(wanted, len(seq.tokens) + 1)
        if not (
            self._ledger.admit(seq, match, num_tokens, len(self._table.running))
            or self._ledger.admit(seq, match, len(seq.tokens) + 1, len(self._table.running))
        ):
            self._disown(seq)
            return None
        seq.state = State.RESERVED
        return Reservation(seq.key, seq.table, seq.num_computed, len(seq.tokens))

    def make_room(self, request: Request) -> bool:
        """Preempt sequences of lower classes until `request` finds blocks here. Returns False, having preempted none, if that
        does not suffice.

        Blocks that a step in flight writes come free when it is committed. Until then nothing more is taken."""
        victims = self._table.below(request.slo.priority)
        if not victims or any(seq.state is State.PREEMPTED for seq in self._table.all.values()):
            return False
        wanted = num_blocks_for(len(request.tokens) + 1, self._config.block_size) + len(self._table.running)
        coming = self.num_available_blocks
        if coming + sum(len(seq.block_ids) for seq in victims) < wanted:
            return False
        while coming < wanted and victims:
            victim = self._policy.victim(victims)
            victims.remove(victim)
            coming += len(victim.block_ids)
            self._preempt(victim)
        return True

    def has_room(self, key: str) -> bool:
        """Return whether a pushed sequence can draw one more token without another block. It must not wait for one, since it
        gives none back itself."""
        seq = self._table.all[key]
        return seq.state is State.RUNNING and len(seq.block_ids) * self._config.block_size >= len(seq.tokens)

    def hold(self, key: str) -> None:
        """Compute no more of a pushed sequence, which has drawn enough, and keep its blocks until `release`. Idempotent."""
        if self._table.all[key].state is State.RUNNING:
            self._finish(self._table.all[key])

    def activate(self, key: str, drawn: SeqOf[TokenOut], now: float) -> None:
        """Go on with a sequence. The reserved blocks have the KV of all known tokens and of all of `drawn` but the last."""
        seq = self._reserved(key)
        seq.know((token.token for token in drawn), now)
        seq.num_computed = len(seq.tokens) - 1
        self._ledger.offer(seq, seq.num_computed)
        if drawn[-1].finish is not None:
            self._forget(seq)
        else:
            self._run(seq)

    def compute(self, key: str) -> None:
        """Compute the missing tokens here, since nobody will write the reserved blocks."""
        self._run(self._reserved(key))

    def release(self, key: str) -> None:
        """Give back a reservation, or a sequence whose blocks the pusher has read. Its users are gone."""
        seq = self._table.all.get(key)
        if seq is None:
            return
        if seq.state is State.RUNNING:
            raise Bug(f"{key} is released while it runs")
        if seq.state is State.WAITING:
            self._table.waiting.remove(seq)
        seq.push = None
        if seq.num_in_flight == 0:
            self._forget(seq)
        else:
            seq.aborted = True
            seq.state = State.DONE

    def on_kept(self, hear: Kept) -> None:
        """Call `hear` with each block whose KV is complete and kept."""
        self._cache.on_kept = hear

    def num_cached_blocks(self, request: Request) -> int:
        return len(self._cache.match(request.tokens, request.salt, partial=False).blocks)

    def begin_restore(self, request: Request, count: int) -> Restore | None:
        """Reserve blocks for the `count` full blocks after the cached prefix. Returns None while there are not enough to
        spare."""
        return self._ledger.begin_restore(request.tokens, request.salt, count, len(self._table.running))

    def publish_restore(self, restore: Restore, count: int) -> None:
        """Put the first `count` blocks of a restore into the cache. They hold their KV, or will before a step reads it."""
        self._ledger.publish_restore(restore, count)

    def end_restore(self, restore: Restore) -> None:
        """End a restore, which fills its blocks no more. Those that are not in the cache are free."""
        self._ledger.end_restore(restore)

    def plan(self, now: float, steps: StepModels = UNKNOWN_STEPS) -> StepPlan | None:
        """Plan the next step. Returns None when nothing can be computed now. `steps` says how long this instance's steps take."""
        if self.awaits_tokens:
            return None
        builder = StepBuilder(step=next(self._steps), budget=self._config.max_batch_tokens)
        # Steps are planned as one ends or none is there, so those in flight are still to be run.
        starts_s = now + sum(expected_s(plan, steps) for plan in self._in_flight)
        self._free_slots(now)
        decoding = [seq for seq in self._table.decoding if not seq.lacks_mask]
        taking = self._taking_part(decoding, steps, starts_s)
        computed, drafts = taking[: self._config.max_num_seqs], Drafts()
        if self._speculator is not None:
            drafts = self._speculator.draft(computed, self._table, steps)
        for seq in computed:
            self._plan_one(seq, builder, drafts.get(seq.key, ()))
        self._plan_prompts(taking, builder, now, steps, starts_s)
        if not builder.work and len(taking) < len(decoding):
            # Nobody of a higher class can go on, so nothing is gained by waiting for it.
            for seq in decoding[: self._config.max_num_seqs]:
                self._plan_one(seq, builder)
        if not builder.work:
            return None
        plan = builder.plan(tuple(self._drop))
        self._drop.clear()
        self._in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenOut]:
        """Learn what `plan` has drawn."""
        self._in_flight.popleft()
        out: list[TokenOut] = []
        sampled = {drawn.key: drawn for drawn in result.sampled}
        self._ledger.committed(plan.step)
        for item in plan.work:
            seq = self._table.all.get(item.key)
            if seq is None:
                raise Bug(f"{item.key} was forgotten while a step computed it")
            seq.num_in_flight -= 1
            drawn = sampled.get(item.key) if item.samples else None
            if drawn is not None:
                seq.num_pending -= 1
                if item.drafts and self._speculator is not None:
                    self._speculator.verified(seq, len(item.drafts), len(drawn.more))
            elif item.samples and item.known_end == len(seq.tokens):
                seq.put_off()
            if seq.aborted or seq.state in (State.HELD, State.DONE):
                self._settle(seq)
                continue
            if drawn is not None:
                out += seq.learn(drawn, now, self._max_context_tokens)
                self._ledger.offer(seq, len(seq.tokens) - 1)
                if out[-1].finish is not None:
                    self._finish(seq)
            elif not item.samples:
                self._ledger.offer(seq, item.start + item.count)
            self._settle(seq)
        return out

    def mask_ready(self, key: str, num_tokens: int) -> None:
        """The draw behind this many tokens of a sequence, which a result lacks or will lack, can be made."""
        if (seq := self._table.all.get(key)) is not None:
            seq.num_masked = max(seq.num_masked, num_tokens)

    def check_integrity(self) -> None:
        """Raise Bug where the sequences, the pool and the prefix cache disagree."""
        self._ledger.check_integrity(self._table.all.values())
        self._table.check_integrity()

    def _free_slots(self, now: float) -> None:
        """Preempt sequences of lower classes where those of higher ones wait and have no slot."""
        num_free = self._config.max_num_seqs - len(self._table.running)
        if self._table.num_priorities <= 1 or num_free >= len(self._table.waiting):
            return
        for seq in [*self._policy.order(self._table.waiting, now)][max(0, num_free) :]:
            victims = self._table.below(seq.request.slo.priority)
            if not victims:
                return
            self._preempt(self._policy.victim(victims))

    def _taking_part(self, decoding: list[Sequence], steps: StepModels, starts_s: float) -> SeqOf[Sequence]:
        """Return those of `decoding` that this step computes: all, unless a class of higher priority needs the time."""
        if self._table.num_priorities <= 1:
            return decoding
        prompts = [seq for seq in (*self._table.running, *self._table.waiting) if seq.num_missing > 1]
        return taking_part(decoding, prompts, steps, starts_s)

    def _plan_prompts(
        self, decoding: SeqOf[Sequence], builder: StepBuilder, now: float, steps: StepModels, starts_s: float
    ) -> None:
        """Plan prompts by the policy's order. Among equals, those that have been begun come before those that wait for room."""

        def turn(seq: Sequence) -> tuple[int, bool]:
            return self._policy.turn(seq, now, steps)

        prompts = sorted((seq for seq in self._table.running if seq.num_missing > 1), key=turn)
        if not prompts and not self._table.waiting:
            return
        context = sum(len(seq.tokens) for seq in decoding)
        if not self._whole_prompts:
            builder.budget = self._policy.prompt_tokens(
                decoding, context, prompts, steps, builder.budget, starts_s
            )
        waiting = self._policy.order(self._table.waiting, now) if builder.budget > 0 else ()
        may_admit = True
        for seq in sorted((*prompts, *waiting), key=turn):
            if builder.budget <= 0 or len(builder.work) >= self._config.max_num_seqs:
                return
            if self._whole_prompts and len(seq.tokens) > builder.budget:
                continue  # those after it may fit; in the next step it comes before them
            if seq.state is State.RUNNING:
                self._plan_one(seq, builder)
            elif may_admit and seq.state is State.WAITING:
                may_admit = self._admit(seq, builder)

    def _plan_one(self, seq: Sequence, builder: StepBuilder, drafts: tuple[int, ...] = ()) -> None:
        """Add the sequence's next work if there is any, with as many of its `drafts` as find room."""
        if (
            seq.state is not State.RUNNING
            or seq.num_missing <= 0
            or seq.is_complete(self._max_context_tokens)
        ):
            return
        count = min(seq.num_missing, builder.budget)
        needed = num_blocks_for(seq.num_computed + count, self._config.block_size) - len(seq.block_ids)
        if count <= 0 or (needed > 0 and not self._grow(seq, needed)):
            return
        start = seq.num_computed
        samples = start + count == seq.num_planned_tokens
        if drafts:
            drafts = drafts[: self._ledger.room(seq, len(drafts), len(self._table.running))]
        if not seq.announced:
            builder.new.append(seq.as_new())
            seq.announced = True
        builder.add(
            SeqWork(
                key=seq.key,
                start=start,
                count=count + len(drafts),
                block_ids=seq.table,
                samples=samples,
                push=seq.next_push(start + count),
                drafts=drafts,
            )
        )
        seq.num_computed += count
        seq.num_pending += samples
        seq.num_in_flight += 1

    def _grow(self, seq: Sequence, count: int) -> bool:
        """Give a running sequence more blocks, taken from a victim when none are left."""
        while self.num_available_blocks < count:
            victims = [s for s in self._table.running if s.push is None and s.state is State.RUNNING]
            victim = self._policy.victim(victims) if victims else None
            if victim is None:
                return False
            self._preempt(victim)
            if victim is seq or victim.num_in_flight:
                return False
        self._ledger.grow(seq, count)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._table.running.remove(seq)
        self.num_preempted += 1
        seq.state = State.PREEMPTED
        self._settle(seq)

    def _admit(self, seq: Sequence, builder: StepBuilder) -> bool:
        """Begin a sequence. Returns False where it must wait for a slot or for blocks, as must all that come after it."""
        if len(self._table.running) >= self._config.max_num_seqs:
            return False
        match = self._find(seq, builder)
        if not self._ledger.admit(seq, match, len(seq.tokens), len(self._table.running)):
            made_room = self.make_room(seq.request)
            # The source of a shared part is one block more; alone, a request may need them all.
            match = PrefixMatch(blocks=match.blocks)
            if self._table.running and not made_room:
                return False
            if not self._ledger.admit(seq, match, len(seq.tokens), len(self._table.running)):
                return False
        if match.partial_tokens:
            builder.copies.append(self._ledger.copy_partial(seq, match, builder.step))
        self._table.waiting.remove(seq)
        self._run(seq)
        self._plan_one(seq, builder)
        return True

    def _find(self, seq: Sequence, builder: StepBuilder) -> PrefixMatch:
        """What is here of its KV: in the prefix cache, and in the blocks of its sibling."""
        match = self._ledger.find(seq.request, seq.tokens, partial=True)
        sibling = self._table.all.get(seq.request.sibling)
        if sibling is None or sibling.state is not State.RUNNING:
            return match
        num_computed = builder.num_computed_before(sibling.key, sibling.num_computed)
        return self._ledger.find_at(sibling, num_computed, seq, match)

    def _disown(self, seq: Sequence) -> None:
        """Forget a sequence that is not here any more."""
        self._table.remove(seq)
        if self._speculator is not None:
            self._speculator.left(seq)

    def _reserved(self, key: str) -> Sequence:
        seq = self._table.all[key]
        if seq.state is not State.RESERVED:
            raise Bug(f"{key} holds no reservation (it is {seq.state.name})")
        return seq

    def _run(self, seq: Sequence) -> None:
        seq.state = State.RUNNING
        self._table.running.append(seq)

    def _finish(self, seq: Sequence) -> None:
        self._table.running = [s for s in self._table.running if s is not seq]
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        """Stop computing: a pushed sequence keeps its blocks for the pusher, others lose theirs when nothing is in flight."""
        seq.state = State.HELD if seq.push is not None else State.DONE
        self._settle(seq)

    def _settle(self, seq: Sequence) -> None:
        """Give back the blocks of a sequence that has left and has nothing more in flight."""
        if seq.num_in_flight:
            return
        if seq.state is State.DONE:
            if seq.key in self._table.all:
                self._forget(seq)
        elif seq.state is State.PREEMPTED:
            self._give_up_blocks(seq)
            seq.state = State.WAITING
            self._table.waiting.append(seq)

    def _forget(self, seq: Sequence) -> None:
        self._give_up_blocks(seq)
        seq.state = State.DONE
        self._disown(seq)

    def _give_up_blocks(self, seq: Sequence) -> None:
        self._ledger.strip(seq)
        if seq.announced:
            self._drop.append(seq.key)
            seq.announced = False
            seq.num_unmasked = seq.num_masked = 0  # of a matcher that goes away

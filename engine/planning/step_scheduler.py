"""Plans an engine's steps: continuous batching, chunked prefill, prefix sharing, preemption, lookahead.

There is no prefill phase and no decode phase, only tokens computed versus tokens known. `plan` advances counters; `commit`
only learns what was drawn, so the next step can be planned while one runs. Steps are committed in the order of their plans.

Invariant: a block is given back only when no planned, uncommitted step can write it and no grant or pusher uses it."""

from collections import deque
from collections.abc import Sequence as SeqOf

from core.config.cluster_config import EngineConfig
from core.cost.steps import UNKNOWN_STEPS, StepModels
from core.errors import Bug, RequestError
from core.messages import Grant
from core.plan import StepPlan, StepResult
from core.ports import SchedulerPolicy
from core.types import Request, TokenOut
from engine.cache.block_pool import BlockPool
from engine.cache.radix_cache import Kept, PrefixMatch, RadixCache
from engine.cache.state_checkpoints import CheckpointKept
from engine.planning.block_ledger import BlockLedger, CachedPrefix, Reservation, Restore
from engine.planning.block_lending import Lending
from engine.planning.committing import Committing
from engine.planning.lifecycle import Lifecycle
from engine.planning.pinning import Pinning
from engine.planning.preemption import Preemption
from engine.planning.returning import Keep, ReadBack, Returning
from engine.planning.sequence import Sequence, State
from engine.planning.sequence_table import SequenceTable
from engine.planning.sessions import Sessions
from engine.planning.speculation.speculator import Speculator
from engine.planning.step_builder import StepBuilder
from engine.planning.step_composer import StepComposer
from engine.planning.step_limits import StepLimits
from engine.planning.step_time_fit import expected_s
from engine.planning.undoing import TakenBack, Undoing


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
        num_state_blocks: int = 0,
    ) -> None:
        """`whole_prompts`: a prompt is computed in one step, for which `config` has room, and nothing decodes. `speculator`: who
        guesses what sequences draw next, if anybody. `num_state_blocks`: each sequence's first blocks, which have its recurrent
        state (ADR 028)."""
        self._config, self._speculator = config, speculator
        self._max_context_tokens = max_context_tokens
        self._pool = BlockPool(num_blocks, first_block)
        self._cache = RadixCache(
            self._pool, config.block_size, enabled=config.prefix_cache, has_states=num_state_blocks > 0
        )
        self._ledger = BlockLedger(self._pool, self._cache, config.block_size, num_state_blocks)
        state_tokens = num_state_blocks * config.block_size
        self._table = SequenceTable(max_context_tokens, state_tokens, config.block_size)
        self._lifecycle = Lifecycle(self._table, self._ledger, speculator)
        self._limits = StepLimits(config, whole_prompts=whole_prompts)
        self._returning = Returning(self, self._table, self._ledger, self._lifecycle)
        self._lending = Lending(self._table, self._ledger, self._returning, config.longest_pause_s)
        self._preemption = Preemption(
            self._limits, policy, self._table, self._ledger, self._lifecycle, self._lending
        )
        self._composer = StepComposer(
            limits=self._limits,
            policy=policy,
            table=self._table,
            ledger=self._ledger,
            lifecycle=self._lifecycle,
            preemption=self._preemption,
            returning=self._returning,
            lending=self._lending,
            whole_prompts=whole_prompts,
            speculator=speculator,
        )
        pinning = Pinning(self._cache, int(config.pinned_share * num_blocks))
        self.sessions = Sessions(
            self._cache, self._ledger, self._table, self._returning, pinning, config.longest_pin_s
        )
        self._lifecycle.on_left = self.sessions.ends
        self._committing = Committing(self._table, self._ledger, self._lifecycle, speculator)
        self._undoing = Undoing(self._table, self._ledger, self._lifecycle)
        self._next_step = 0
        self._in_flight: deque[StepPlan] = deque()

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_used

    @property
    def num_preempted(self) -> int:
        return self._lifecycle.num_preempted

    @property
    def num_returned(self) -> int:
        return self._returning.num_returned

    @property
    def prefix_tokens(self) -> tuple[int, int]:
        """(known tokens of the sequences that came, of these found in the prefix cache)."""
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
        return self._table.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """The number of tokens to compute before everything here decodes."""
        return self._table.num_waiting_tokens

    def num_late_tokens(self, now: float, steps: StepModels) -> int:
        """Return the tokens of `num_waiting_tokens` of prompts that are late, which let others pass (`core.pacing.lateness`)."""
        return self._table.num_late_tokens(now, steps)

    def lendable_blocks(self, now: float) -> int:
        """Return the blocks of sequences so far ahead of their pace that others may have them (`core.pacing.overcommit`)."""
        return self._lending.lendable_blocks(now)

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

    def drop_cache(self) -> int:
        """Give up every cached block that nothing here has. Returns how many those were."""
        return self._cache.drop()

    def knows(self, key: str) -> bool:
        return key in self._table.all

    def check_fits(self, request: Request) -> None:
        """Raise RequestError for a request that could never be served here."""
        size = len(request.prompt) + request.sampling.max_tokens
        # A text to embed may fill the context: the token drawn after it is thrown away.
        most_known = self._max_context_tokens - (not request.sampling.pooling)
        if len(request.tokens) > most_known:
            raise RequestError(
                f"{len(request.tokens)} tokens do not fit a context of {self._max_context_tokens}"
            )
        capacity = (self.num_blocks - self._ledger.num_state_blocks) * self._config.block_size
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
        self._table.waiting.append(self._table.new(request, push))

    def abort(self, key: str) -> None:
        """Compute no more of it. Blocks that a pusher or a writer uses stay until `release`. Idempotent."""
        if (seq := self._table.all.get(key)) is not None:
            self._lifecycle.abort(seq)

    def reserve(self, request: Request) -> Reservation | None:
        """Blocks for all known tokens and the next one, or None while there are not enough. Raises RequestError."""
        self.check_fits(request)
        match = self._ledger.find(request, request.tokens, partial=False)
        is_near = self._ledger.begins_near(request, match)
        seq = self._table.new(request, None)
        if match.state and is_near:
            # It finds blocks, and has its state copied, as others do that are computed here.
            seq.state = State.RESERVED
            return Reservation.of(seq, len(match.blocks) * self._config.block_size, computes_rest=True)
        if self._ledger.num_state_blocks:
            # A state is written as a whole, and with it all tokens that it has taken in.
            match = PrefixMatch(blocks=())
        # One block more than is known: the prefill instance may generate while it sends.
        least, most = len(seq.tokens) + 1, seq.num_prompt + request.sampling.max_tokens
        wanted = max(least, min(least + self._config.block_size, most))
        if not (
            self._ledger.admit(seq, match, wanted, self._table.headroom)
            or self._ledger.admit(seq, match, least, self._table.headroom)
        ):
            self._lifecycle.disown(seq)
            return None
        seq.state = State.RESERVED
        return Reservation.of(seq, seq.num_computed, computes_rest=is_near)

    def make_room(self, request: Request, now: float) -> bool:
        """Preempt sequences of lower classes until `request` finds blocks here. Returns False, having preempted none, if that
        does not suffice."""
        return self._preemption.make_room(request, len(request.tokens) + 1, now)

    def has_room(self, key: str) -> bool:
        """Return whether a pushed sequence can draw one more token without another block. It must not wait for one, since it
        gives none back itself."""
        seq = self._table.all[key]
        # One more token would change a recurrent state while it is being sent.
        may_go_on = seq.state is State.RUNNING and not seq.state_tokens
        return may_go_on and self._ledger.capacity(seq) >= len(seq.tokens)

    def hold(self, key: str) -> None:
        """Compute no more of a pushed sequence, which has drawn enough, and keep its blocks until `release`. Idempotent."""
        if self._table.all[key].state is State.RUNNING:
            self._lifecycle.finish(self._table.all[key])

    def activate(self, key: str, drawn: SeqOf[TokenOut], now: float) -> None:
        """Go on with a sequence. The reserved blocks have the KV of all known tokens and of all of `drawn` but the last."""
        seq = self._reserved(key)
        seq.know((token.token for token in drawn), now)
        seq.num_computed = len(seq.tokens) - 1
        self._ledger.has_come(seq)
        if drawn[-1].finish is not None:
            self._ledger.leave_state(seq)
            self._lifecycle.forget(seq)
        else:
            self._lifecycle.run(seq)

    def compute(self, key: str) -> None:
        """Compute the missing tokens here, since nobody will write the reserved blocks."""
        seq = self._reserved(key)
        if seq.block_ids:
            self._lifecycle.run(seq)
        else:
            self._lifecycle.wait(seq)

    def release(self, key: str) -> None:
        """Give back a reservation, or a sequence whose blocks the pusher has read. Its users are gone."""
        if (seq := self._table.all.get(key)) is not None:
            self._lifecycle.release(seq)

    def on_kept(self, hear: Kept, hear_checkpoint: CheckpointKept) -> None:
        """Call `hear` with each block whose KV is complete and kept, and `hear_checkpoint` with each checkpoint of a state."""
        self._cache.on_kept, self._cache.checkpoints.on_kept = hear, hear_checkpoint

    def on_return(self, read: ReadBack, keep: Keep | None = None) -> None:
        """Have `keep` keep the KV of preempted sequences, and `read` read it before they are computed again."""
        self._returning.use(read, keep)

    def cached_prefix(self, request: Request) -> CachedPrefix:
        """Return how much of the request's prefix is cached."""
        return self._ledger.cached_prefix(request)

    def begin_restore(self, request: Request, num_full: int) -> Restore | None:
        """Reserve blocks for those of the request's first `num_full` blocks that are not cached, and for the recurrent state
        behind them. Returns None while there are not enough to spare."""
        return self._ledger.begin_restore(request, num_full, self._table.headroom)

    def publish_restore(self, restore: Restore, count: int) -> None:
        """Put the first `count` of a restore's fresh blocks into the cache, with the state's checkpoint if these are all. They
        hold their KV, or will before a step reads it."""
        self._ledger.publish_restore(restore, count)

    def end_restore(self, restore: Restore) -> None:
        """End a restore, which fills its blocks no more. Those that are not in the cache are free."""
        self._ledger.end_restore(restore)

    def plan(self, now: float, steps: StepModels = UNKNOWN_STEPS) -> StepPlan | None:
        """Plan the next step. Returns None when nothing can be computed now. `steps` says how long this instance's steps take."""
        self.sessions.pass_by(now)
        if self.awaits_tokens:
            return None
        builder = StepBuilder(step=self._next_step, now=now, budget=self._config.max_batch_tokens)
        # A step is planned when another has just ended or none is in flight, so the whole time of those in flight is to come.
        starts_s = now + sum(expected_s(plan, steps) for plan in self._in_flight)
        self._composer.compose(builder, now, steps, starts_s)
        if not builder.work:
            return None
        self._next_step += 1
        plan = builder.plan(self._lifecycle.take_dropped())
        self._in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenOut]:
        """Learn what `plan` has drawn. Sequences that it could not compute are aborted, before anything of them is kept."""
        self.sessions.pass_by(now)
        self._in_flight.popleft()
        self._limits.computed()
        return self._committing.commit(plan, result, now)

    def take_back(self) -> TakenBack:
        """Undo all plans that are not committed: the ranks had no memory for the first of them. Its number is planned again."""
        if not self._in_flight:
            return TakenBack(goes_on=False, paused=[], lost=[])
        first = self._in_flight[0]
        goes_on = self._shrink(first)
        seqs: dict[str, Sequence] = {}
        while self._in_flight:
            seqs |= {seq.key: seq for seq in self._undoing.undo(self._in_flight.pop())}
        self._next_step = first.step
        paused, lost = self._undoing.settle([*seqs.values()])
        self._preemption.fit_slots()
        return TakenBack(goes_on=goes_on, paused=paused, lost=lost)

    def go_on(self, key: str) -> None:
        """Compute a paused sequence again: nobody reads any more what its work that was taken back has written. Idempotent."""
        if (seq := self._table.all.get(key)) is not None and seq.state is State.PAUSED:
            self._lifecycle.run(seq)

    def mask_ready(self, key: str, num_tokens: int) -> None:
        """The draw behind this many tokens of a sequence, which a result lacks or will lack, can be made."""
        if (seq := self._table.all.get(key)) is not None:
            seq.num_masked = max(seq.num_masked, num_tokens)

    def check_integrity(self) -> None:
        """Raise Bug where the sequences, the pool and the prefix cache disagree."""
        self._ledger.check_integrity(self._table.all.values())
        self._table.check_integrity()

    def _shrink(self, plan: StepPlan) -> bool:
        """Have the next step ask for less than `plan`. Returns False where it cannot."""
        if self._speculator is not None and any(work.drafts for work in plan.work):
            self._speculator.rest()
            return True
        return self._limits.shrink(plan)

    def _reserved(self, key: str) -> Sequence:
        seq = self._table.all[key]
        if seq.state is not State.RESERVED:
            raise Bug(f"{key} holds no reservation (it is {seq.state.name})")
        return seq

"""Fills a step: first with what decodes, then with prompts, in the order of a policy. Owned by StepScheduler.

It computes sequences that run. Those that wait begin in StepAdmission, and those that give way leave through Preemption."""

from collections.abc import Sequence as SeqOf

from core.cost.steps import StepModels
from core.pacing.priority import taking_part
from core.pacing.slots import decode_slots
from core.plan import SeqWork
from core.ports import SchedulerPolicy
from engine.planning.preemption import Preemption
from engine.planning.sequence import Sequence, State
from engine.planning.speculation.speculator import Drafts, Speculator
from engine.planning.step_admission import StepAdmission
from engine.planning.step_builder import StepBuilder
from engine.planning.step_limits import StepLimits
from engine.planning.whole_runs import Run, missing_runs, uncut


class StepComposer:
    def __init__(
        self,
        limits: StepLimits,
        policy: SchedulerPolicy[Sequence],
        preemption: Preemption,
        admission: StepAdmission,
        speculator: Speculator | None,
        *,
        whole_prompts: bool,
    ) -> None:
        self._limits, self._policy, self._whole_prompts = limits, policy, whole_prompts
        self._preemption, self._admission, self._speculator = preemption, admission, speculator
        self._table, self._ledger = preemption.lifecycle.table, preemption.lifecycle.ledger

    def compose(self, builder: StepBuilder, now: float, steps: StepModels, starts_at: float) -> None:
        """Add the work of the step that is planned at `now` and begins at `starts_at`. Changes the sequences, and may preempt."""
        self._preemption.free_slots(now)
        decoding = self._table.decoding
        has_begun_prompts = len(decoding) < len(self._table.running)
        # The next sample of the others waits for a mask.
        decoding = [seq for seq in decoding if seq.num_unmasked <= seq.num_masked]
        taking = self._taking_part(decoding, steps, starts_at)
        computed, drafts = taking[: self._num_slots(len(taking))], Drafts()
        if self._speculator is not None:
            drafts = self._speculator.draft(computed, self._table, steps)
        self._plan_decoding(computed, drafts, builder)
        if has_begun_prompts or self._table.waiting:
            planned = {work.key for work in builder.work}
            self._plan_prompts(
                [seq for seq in computed if seq.key in planned], builder, now, steps, starts_at
            )
        if not builder.work and len(taking) < len(decoding):
            # No sequence of a higher class can go on, so nothing is gained by waiting for it.
            for seq in decoding[: self._limits.num_seqs]:
                self._plan_one(seq, builder)

    def _plan_decoding(self, decoding: SeqOf[Sequence], drafts: Drafts, builder: StepBuilder) -> None:
        """Plan the next token of each sequence, and its `drafts`.

        Mostly that is all there is to do: the token has room in the sequence's last block, and the ranks know the sequence. Those
        are planned here, for hundreds of them each step; the others as prompts are."""
        block_size, running = self._ledger.block_size, State.RUNNING
        for seq in decoding:
            start, end = seq.num_computed, len(seq.tokens) + seq.num_pending
            has_room = start + seq.state_tokens < len(seq.table) * block_size
            if (
                drafts
                or not (has_room and seq.announced and end - start == 1 and end < seq.end)
                or seq.state is not running
                or seq.push is not None
                or seq.checkpoints
                or seq.request.images
                or builder.budget <= 0
            ):
                self._plan_one(seq, builder, drafts.get(seq.key, ()))
                continue
            builder.add(
                SeqWork(
                    key=seq.key,
                    start=start,
                    count=1,
                    block_ids=seq.table,
                    samples=True,
                    adapter=seq.request.adapter,
                )
            )
            seq.num_computed = end
            seq.num_pending += 1
            seq.num_in_flight += 1

    def _num_slots(self, num_decoding: int) -> int:
        """Return how many sequences a step decodes."""
        begun = (seq for seq in self._table.running if seq.num_missing > 1)
        return decode_slots(self._limits.num_seqs, num_decoding, begun, self._table.waiting)

    def _taking_part(self, decoding: list[Sequence], steps: StepModels, starts_at: float) -> SeqOf[Sequence]:
        """Return those of `decoding` that this step computes: all, unless a class of higher priority needs the time."""
        if self._table.num_priorities <= 1:
            return decoding
        return taking_part(decoding, steps, starts_at, self._policy.tuning)

    def _plan_prompts(
        self, decoding: SeqOf[Sequence], builder: StepBuilder, now: float, steps: StepModels, starts_at: float
    ) -> None:
        """Plan prompts by the policy's order. Among equals, those that have been begun come before those that wait for room.

        `decoding` are the sequences that the step decodes. One whose last token a step in flight samples is none of them."""

        def turn(seq: Sequence) -> tuple[float, bool]:
            return self._policy.turn(seq, now, steps)

        prompts = sorted((seq for seq in self._table.running if seq.num_missing > 1), key=turn)
        if not prompts and not self._table.waiting:
            return
        if decoding and builder.step % 2 and steps.lacks_reading:
            return  # a step that only decodes shows how long reading takes; without a pause in prompts there is no other
        context = sum(len(seq.tokens) for seq in decoding)
        builder.most_whole = builder.budget
        builder.budget = min(builder.budget, self._limits.prompt_tokens)
        if not self._whole_prompts:
            builder.budget = self._policy.prompt_tokens(
                decoding, context, [*prompts, *self._table.waiting], steps, builder.budget, starts_at
            )
        waiting = self._admission.in_order(now) if builder.budget > 0 else ()
        may_admit = True
        for seq in sorted((*prompts, *waiting), key=turn):
            if builder.budget <= 0 or len(builder.work) >= self._limits.num_seqs:
                return
            if self._whole_prompts and len(seq.tokens) > builder.budget:
                continue  # those after it may fit; in the next step it comes before them
            if may_admit and seq.state is State.WAITING:
                may_admit = self._admission.begin(seq, builder)
            self._plan_one(seq, builder)

    def _plan_one(self, seq: Sequence, builder: StepBuilder, drafts: tuple[int, ...] = ()) -> None:
        """Add the sequence's next work if there is any, with as many of its `drafts` as find room."""
        missing = seq.num_missing
        if seq.state is not State.RUNNING or missing <= 0 or seq.is_complete:
            return
        start = seq.num_computed
        count, both_ways = self._next_piece(seq, missing, builder)
        needed = self._ledger.num_needed(start + count) - len(seq.block_ids)
        if count <= 0 or (needed > 0 and not self._preemption.grow(seq, needed, builder.now)):
            return
        samples = count == missing
        if drafts:
            drafts = drafts[: self._ledger.checkpointing.before(seq, count + len(drafts)) - count]
        if drafts:
            drafts = drafts[: self._ledger.room(seq, len(drafts), len(self._table.running))]
        if seq.checkpoints:
            builder.copies += self._ledger.checkpoint(seq, builder.step, len(self._table.running))
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
                push=seq.next_push(start + count) if seq.push is not None else None,
                drafts=drafts,
                adapter=seq.request.adapter,
                has_image=seq.has_image_from(start),
                both_ways=both_ways,
            )
        )
        seq.num_computed += count
        seq.num_pending += samples
        seq.num_in_flight += 1

    def _next_piece(self, seq: Sequence, missing: int, builder: StepBuilder) -> tuple[int, tuple[Run, ...]]:
        """Return how many of its `missing` tokens to compute next, and the runs among them that see each other."""
        count = self._ledger.checkpointing.before(seq, min(missing, builder.budget))
        if not seq.request.images:
            return count, ()
        start = seq.num_computed
        runs = missing_runs(seq.request.images, start)
        count = uncut(runs, start, count, max(builder.budget, builder.most_whole))
        return count, tuple(run for run in runs if run[0] < start + count)

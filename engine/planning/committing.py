"""Gives sequences what a computed step has sampled, and their new blocks to the prefix cache. Owned by StepScheduler."""

from core.errors import Bug
from core.plan import Sampled, SeqWork, StepPlan, StepResult
from core.types import TokenOut
from engine.planning.lifecycle import Lifecycle
from engine.planning.sequence import OVER, Sequence
from engine.planning.speculation.speculator import Speculator


class Committing:
    def __init__(self, lifecycle: Lifecycle, speculator: Speculator | None) -> None:
        self._table, self._ledger = lifecycle.table, lifecycle.ledger
        self._lifecycle, self._speculator = lifecycle, speculator

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenOut]:
        """Return the tokens that `plan` has sampled. Sequences that failed are aborted, before anything of them is kept."""
        if self._speculator is not None:
            self._speculator.committed(plan, result, now)
        out: list[TokenOut] = []
        sampled = {own.key: own for own in result.sampled}
        failed = {failure.key for failure in result.failed}
        self._ledger.committed(plan.step)
        for item in plan.work:
            seq = self._table.all.get(item.key)
            if seq is None:
                raise Bug(f"{item.key} was forgotten while a step computed it")
            seq.num_in_flight -= 1
            own = sampled.get(item.key) if item.samples else None
            self._note_sample(seq, item, own)
            if item.key in failed:
                self._lifecycle.abort(seq)
            if not seq.aborted and seq.state not in OVER:
                out += self._learn(seq, item, own, now)
            self._lifecycle.settle(seq)
        return out

    def _note_sample(self, seq: Sequence, item: SeqWork, own: Sampled | None) -> None:
        """Note that a sample is not pending any more, or that the ranks have put it off."""
        if own is not None:
            seq.num_pending -= 1
            if item.drafts and self._speculator is not None:
                self._speculator.verified(seq, len(item.drafts) - own.num_unmade, len(own.more))
        elif item.samples and item.known_end == len(seq.tokens):
            seq.put_off()

    def _learn(self, seq: Sequence, item: SeqWork, own: Sampled | None, now: float) -> list[TokenOut]:
        out: list[TokenOut] = []
        if own is not None:
            out = seq.learn(own, now)
            self._ledger.offer(seq, len(seq.tokens) - 1)
            if out[-1].finish is not None:
                self._lifecycle.finish(seq)
        elif not item.samples:
            self._ledger.offer(seq, item.start + item.count)
        return out

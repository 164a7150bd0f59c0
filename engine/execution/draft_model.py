"""Guesses by a small model of its own weights and its own KV, on the rank that draws, before each step that asks for some.

Position p's token is drawn with (seed, p)'s own number. The draft model draws its guess of it with the same number and settings:
so two distributions that are alike give the same token at any temperature."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from core.plan import PROPOSED, NewSeq, SeqWork, StepPlan, StepResult
from core.types import TokenId
from engine.execution.batch import RankSeq, build_batch
from engine.execution.draft_kv import DraftBlocks, DraftSeq
from engine.execution.sampler import RowDraws
from engine.execution.step_memory import HostSteps, Pack
from engine.execution.verifying import LongerHistory
from kernels.ops import KVLayer
from models.causal_model import CausalModel

CATCH_UP_TOKENS = 512
"""Tokens that the draft model reads before one step, so that what it has not seen does not hold the step up."""

_FEW_TOKENS = 16
"""A sequence of which the draft model has not seen more is read, which says nothing of how long guesses take."""
_CPU = torch.device("cpu")
Step = Callable[[StepPlan], StepResult]


@dataclass(slots=True)
class _Asked:
    """A sequence whose next tokens are asked for."""

    work: SeqWork
    draft: DraftSeq
    guesses: list[int] = field(default_factory=list[int])

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self.work.block_ids


class DraftModel:
    """Makes the guesses that plans ask for, and has `step` execute the plans. One thread calls it."""

    def __init__(
        self,
        step: Step,
        model: CausalModel,
        layers: list[KVLayer],
        block_size: int,
        vocab_size: int,
        *,
        device: torch.device = _CPU,
        most_read: int = CATCH_UP_TOKENS,
    ) -> None:
        """`layers` are a pool's of as many blocks as the target's. `vocab_size` is the target's. `most_read`: tokens before one
        step."""
        self._step, self._model, self._layers = step, model, layers
        self._block_size, self._vocab_size, self._most_read = block_size, vocab_size, most_read
        self._device = device
        self._blocks = DraftBlocks(block_size)
        self._seqs: dict[str, DraftSeq] = {}

    def step(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        for key in plan.drop:
            self._seqs.pop(key, None)
        for new in plan.new:
            self._seqs[new.key] = DraftSeq(RankSeq(_unscored(new)), self._blocks)
        asked = [_Asked(work, self._seqs[work.key]) for work in plan.work if PROPOSED in work.drafts[:1]]
        proposing_s = 0.0
        if asked:
            has_read = self._guess(asked)
            plan = _with_guesses(plan, asked)
            proposing_s = 0.0 if has_read else time.perf_counter() - started
        result = self._step(plan)
        for drawn in result.sampled:
            seq = self._seqs[drawn.key].seq
            for one in drawn.drawn:
                seq.append(one.token)
        if not asked:
            return result
        unmade = {one.work.key: len(one.work.drafts) - len(one.guesses) for one in asked}
        sampled = tuple(replace(one, num_unmade=unmade.get(one.key, 0)) for one in result.sampled)
        return replace(result, sampled=sampled, proposing_s=proposing_s)

    @torch.inference_mode()
    def _guess(self, asked: Sequence[_Asked]) -> bool:
        """Make the guesses. Returns whether much had to be read first."""
        missing = [one.draft.seq.num_tokens - one.draft.find(one.block_ids) for one in asked]
        going = self._read(asked)
        while going := [one for one in going if len(one.guesses) < len(one.work.drafts)]:
            self._go_on(going)
        return max(missing) > _FEW_TOKENS

    def _read(self, asked: Sequence[_Asked]) -> list[_Asked]:
        """Compute what is missing of the KV of known tokens, as far as there is time. Returns the sequences of which nothing is
        missing any more, each with its first guess."""
        allowance = self._most_read
        work: list[SeqWork] = []
        reading: list[_Asked] = []
        for one in asked:
            seq, start = one.draft.seq, one.draft.find(one.block_ids)
            is_short = seq.num_tokens + len(one.work.drafts) <= self._model.spec.max_context_tokens
            if (count := min(seq.num_tokens - start, allowance)) <= 0 or not is_short:
                continue
            allowance -= count
            reading.append(one)
            work.append(_piece(one, start, count, samples=start + count == seq.num_tokens))
        if not reading:
            return []
        drawing = [one for one, item in zip(reading, work, strict=True) if item.samples]
        self._draw(reading, work, drawing)
        for one, item in zip(reading, work, strict=True):
            one.draft.computed(item.count, one.block_ids)
        return drawing

    def _go_on(self, going: Sequence[_Asked]) -> None:
        """Guess the token behind each one's last guess."""
        work: list[SeqWork] = []
        for one in going:
            place = one.draft.seq.num_tokens + len(one.guesses) - 1
            one.draft.seq.tokens[place] = one.guesses[-1]
            one.draft.guessed(one.guesses[-1], one.block_ids)
            work.append(_piece(one, place, 1, samples=True))
        self._draw(going, work, going)

    def _draw(self, computed: Sequence[_Asked], work: Sequence[SeqWork], drawing: Sequence[_Asked]) -> None:
        """Compute `work`, and give each of `drawing` one more guess."""
        batch = build_batch(work, [one.draft.seq for one in computed], self._block_size, self._device)
        tokens = batch.tokens
        if (known := self._model.spec.vocab_size) < self._vocab_size:
            tokens = torch.where(tokens < known, tokens, 0)  # it has no such tokens
        hidden = self._model.forward(tokens, batch.positions, self._layers, batch.meta)
        if not drawing:
            return
        logits = _wide(self._model.logits(hidden[batch.sample_rows]), self._vocab_size)
        longer = [
            LongerHistory(one.draft.seq, one.draft.seq.num_tokens + len(one.guesses)) for one in drawing
        ]
        pack, io = Pack(), HostSteps(logits.device).begin()
        rows = RowDraws(longer, pack)
        pack.send(io.upload)
        for one, token in zip(drawing, rows.draw(logits, self._model.ops, io)[0].tolist(), strict=True):
            one.guesses.append(token)


def _with_guesses(plan: StepPlan, asked: Sequence[_Asked]) -> StepPlan:
    """Return the plan with the guesses in their places. What was asked for and is not there is left out."""
    guesses = {one.work.key: tuple(one.guesses) for one in asked}
    return replace(plan, work=tuple(_filled(work, guesses.get(work.key)) for work in plan.work))


def _filled(work: SeqWork, guesses: tuple[TokenId, ...] | None) -> SeqWork:
    if guesses is None:
        return work
    return replace(work, drafts=guesses, count=work.count - len(work.drafts) + len(guesses))


def _piece(one: _Asked, start: int, count: int, *, samples: bool) -> SeqWork:
    return SeqWork(key=one.work.key, start=start, count=count, block_ids=one.block_ids, samples=samples)


def _unscored(new: NewSeq) -> NewSeq:
    """Return the sequence without log-probabilities, which nobody hears of."""
    return replace(new, sampling=replace(new.sampling, num_logprobs=-1, num_prompt_logprobs=-1))


def _wide(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the logits of the target's tokens: of those that the draft model lacks none is drawn."""
    missing = vocab_size - logits.shape[1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

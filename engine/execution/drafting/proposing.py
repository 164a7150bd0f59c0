"""Has the rank make the draft tokens that a plan asks for, and then execute the plan with them.

A `Proposer` makes them: a draft model, or a head of the model. What it proposes is verified like any other draft token, so that
no token depends on it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from core.plan import PROPOSED, NewSeq, Sampled, SeqWork, StepPlan, StepResult
from core.types import TokenId
from engine.execution.batch.batch import RankSeq
from engine.execution.batch.step_memory import HostSteps, Pack
from engine.execution.sampling.sampler import RowSampling
from engine.execution.sampling.verifying import LongerHistory
from kernels.ops import Ops

Step = Callable[[StepPlan], StepResult]
Agree = Callable[[torch.Tensor], torch.Tensor]
"""(N,) int64 draft tokens -> those of the rank that decides."""


@dataclass(slots=True)
class Proposal:
    """The draft tokens of one sequence, and how many the plan asks for."""

    work: SeqWork
    seq: RankSeq
    drafts: list[int] = field(default_factory=list[int])

    @property
    def key(self) -> str:
        return self.work.key

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self.work.block_ids

    @property
    def is_done(self) -> bool:
        return len(self.drafts) == len(self.work.drafts)

    def add(self, token: TokenId) -> None:
        """Add a draft token, and put it where the sampled token will be."""
        self.seq.tokens[self.seq.num_tokens + len(self.drafts)] = token
        self.drafts.append(token)


class Proposer(Protocol):
    """For one thread."""

    def begin(self, key: str, seq: RankSeq) -> None:
        """Take in a sequence. `seq` learns what it samples."""
        ...

    def end(self, key: str) -> None:
        """Forget a sequence, known or not."""
        ...

    def propose(self, asked: Sequence[Proposal]) -> bool:
        """Propose what each of `asked` samples next, as far as there is something to go by. Returns whether much had to be read
        first, so that the time that it took says nothing of the next."""
        ...

    def hear(self, hidden: torch.Tensor) -> None:
        """Take (T, hidden_size), the model's states of the tokens of a step, which the next step may overwrite."""
        ...

    def computed(self, plan: StepPlan) -> None:
        """Take note that a plan is executed. Its states were heard, and its sequences have what they have sampled."""
        ...


class Proposing:
    def __init__(self, step: Step, proposer: Proposer, num_state_blocks: int = 0) -> None:
        """`num_state_blocks`: the first of each sequence, which have its recurrent state. A proposer sees the others."""
        self._step, self._proposer, self._num_state_blocks = step, proposer, num_state_blocks
        self._seqs: dict[str, RankSeq] = {}

    def step(self, plan: StepPlan) -> StepResult:
        self._take_in(plan)
        started = time.perf_counter()
        asked = self._asked(plan)
        has_read = bool(asked) and self._proposer.propose(asked)
        proposing_s = time.perf_counter() - started if asked else 0.0
        plan = _with_drafts(plan, asked)
        result = self._step(plan)
        self._learn(result)
        since = time.perf_counter()
        self._proposer.computed(self._of_tokens(plan))
        took_s = result.duration_s + time.perf_counter() - since
        return replace(
            result,
            sampled=_with_unmade(result.sampled, asked),
            duration_s=took_s,
            proposing_s=0.0 if has_read else proposing_s,
            reading_s=proposing_s if has_read else 0.0,
        )

    def _asked(self, plan: StepPlan) -> list[Proposal]:
        if not any(work.drafts for work in plan.work):
            return []
        return [
            Proposal(work, self._seqs[work.key])
            for work in self._of_tokens(plan).work
            if PROPOSED in work.drafts[:1]
        ]

    def _learn(self, result: StepResult) -> None:
        for sampled in result.sampled:
            seq = self._seqs[sampled.key]
            seq.append(sampled.token)
            for one in sampled.more:
                seq.append(one.token)

    def _of_tokens(self, plan: StepPlan) -> StepPlan:
        """Return the plan without the blocks of states."""
        if not (count := self._num_state_blocks):
            return plan
        work = tuple(replace(item, block_ids=item.block_ids[count:]) for item in plan.work)
        return replace(plan, work=work)

    def _take_in(self, plan: StepPlan) -> None:
        for key in plan.drop:
            self._seqs.pop(key, None)
            self._proposer.end(key)
        for new in plan.new:
            seq = self._seqs[new.key] = RankSeq(_for_drafting(new))
            self._proposer.begin(new.key, seq)


def sample_drafts(
    asked: Sequence[Proposal], logits: torch.Tensor, ops: Ops, agree: Agree | None = None
) -> None:
    """Sample one more draft token of each from its row of (N, vocab_size) floats, by the settings and the number that the token
    itself is sampled with: two distributions that are alike then give the same token at any temperature. `agree` says what all
    ranks of the instance take in place of what each has sampled."""
    longer = [LongerHistory(one.seq, one.seq.num_tokens + len(one.drafts)) for one in asked]
    pack, io = Pack(), HostSteps(logits.device).begin()
    rows = RowSampling(longer, pack)
    pack.send(io.upload)
    tokens = rows.sample(logits, ops, io)[0]
    for one, token in zip(asked, (agree(tokens) if agree is not None else tokens).tolist(), strict=True):
        one.add(token)


def _with_drafts(plan: StepPlan, asked: Sequence[Proposal]) -> StepPlan:
    """Return the plan with the draft tokens in their places. What was asked for and is not there is left out."""
    if not asked:
        return plan
    drafts = {one.key: tuple(one.drafts) for one in asked}
    return replace(plan, work=tuple(_filled(work, drafts.get(work.key)) for work in plan.work))


def _with_unmade(sampled: tuple[Sampled, ...], asked: Sequence[Proposal]) -> tuple[Sampled, ...]:
    """Say how many of the draft tokens that were asked for are not there."""
    unmade = {one.key: missing for one in asked if (missing := len(one.work.drafts) - len(one.drafts))}
    if not unmade:
        return sampled
    return tuple(replace(one, num_unmade=unmade.get(one.key, 0)) for one in sampled)


def _filled(work: SeqWork, drafts: tuple[TokenId, ...] | None) -> SeqWork:
    if drafts is None:
        return work
    return replace(work, drafts=drafts, count=work.count - len(work.drafts) + len(drafts))


def _for_drafting(new: NewSeq) -> NewSeq:
    """Return the sequence without log-probabilities, which nobody hears of, and with text's positions: a drafter sees no
    images."""
    sampling = replace(new.sampling, num_logprobs=-1, num_prompt_logprobs=-1)
    return replace(new, sampling=sampling, position_shift=0)

"""The sequences of one instance: which are here, which of them run, and which wait. Owned by StepScheduler.

Invariant: a sequence is listed as running, waiting or returning exactly while its state says so."""

import itertools
from collections import Counter
from collections.abc import Iterator

from core.cost.steps import StepModels
from core.errors import Bug, RequestError
from core.kv import num_blocks_for
from core.messages import Grant
from core.pacing.lateness import late_tokens
from core.pacing.priority import tokens_by_priority
from core.scheduler_tuning import SchedulerTuning
from core.types import Request
from engine.planning.sequence import Sequence, State


class SequenceTable:
    def __init__(self, max_context_tokens: int, capacity: int, state_tokens: int, block_size: int) -> None:
        """`capacity`: the most tokens whose KV has room here. `state_tokens`: of each sequence, as `Sequence` says."""
        self._max_context_tokens, self._capacity = max_context_tokens, capacity
        self._state_tokens = state_tokens
        self._block_size = block_size
        self.all: dict[str, Sequence] = {}
        """By the sequence's key."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.returning: dict[Sequence, int] = {}
        """How many tokens each is still to compute when its KV has been read."""
        self._priorities: Counter[int] = Counter()
        """The number of sequences here of each priority."""
        self._arrivals = itertools.count()

    @property
    def num_priorities(self) -> int:
        return len(self._priorities)

    @property
    def num_placed(self) -> int:
        """The number of sequences that run or return. Each takes a slot."""
        return len(self.running) + len(self.returning)

    @property
    def headroom(self) -> int:
        """The number of blocks to leave for those that are placed. Each may soon need one more, and those that return need some
        for what is not read."""
        rest = [
            num_blocks_for(count + self._state_tokens, self._block_size) for count in self.returning.values()
        ]
        return self.num_placed + sum(rest)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.returning)

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences whose prompt is computed."""
        # `Sequence.num_missing`, without a call for each of them in each step.
        return [s for s in self.running if len(s.tokens) + s.num_pending - s.num_computed <= 1]

    @property
    def has_prompts(self) -> bool:
        """Whether prompts are being computed, or wait."""
        return bool(self.waiting) or any(seq.num_missing > 1 for seq in self.running)

    @property
    def has_pending(self) -> bool:
        """Whether a step in flight samples what a running sequence goes on with."""
        return any(seq.num_pending for seq in self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """The number of tokens to compute before everything here decodes."""
        return sum(count for _, count in self.waiting_by_priority)

    def num_late_tokens(self, now: float, steps: StepModels, tuning: SchedulerTuning) -> int:
        """Return the tokens of `num_waiting_tokens` of prompts that are late, which let others pass (`core.pacing.lateness`)."""
        return late_tokens(self._to_compute(), now, steps, tuning)

    @property
    def waiting_by_priority(self) -> tuple[tuple[int, int], ...]:
        """(priority, tokens of `num_waiting_tokens`) of each class that is here, the lowest first."""
        return tokens_by_priority(self._priorities, self._to_compute())

    def check_fits(self, request: Request) -> None:
        """Raise RequestError for a request that could never be served here, or is here."""
        size = len(request.prompt) + request.sampling.max_tokens
        # A text to embed may fill the context: the token sampled after it is thrown away.
        most_known = self._max_context_tokens - (not request.sampling.pooling)
        if len(request.tokens) > most_known:
            raise RequestError(
                f"{len(request.tokens)} tokens do not fit a context of {self._max_context_tokens}"
            )
        if min(size, self._max_context_tokens) > self._capacity:
            raise RequestError(
                f"prompt and output of {size} tokens exceed this instance's KV cache of {self._capacity}"
            )
        if request.key in self.all:
            raise RequestError(f"request {request.key} is already here")

    def below(self, priority: int) -> list[Sequence]:
        """Return the running sequences of lower classes that can be preempted."""
        return [
            seq
            for seq in self.running
            if seq.request.slo.priority < priority and seq.push is None and seq.state is State.RUNNING
        ]

    def new(self, request: Request, push: Grant | None) -> Sequence:
        seq = Sequence(
            request=request,
            tokens=list(request.tokens),
            num_prompt=len(request.prompt),
            arrival=next(self._arrivals),
            push=push,
            state_tokens=self._state_tokens,
            end=self._max_context_tokens,
        )
        self.all[seq.key] = seq
        self._priorities[request.slo.priority] += 1
        return seq

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence that is not here any more."""
        del self.all[seq.key]
        priority = seq.request.slo.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]

    def _to_compute(self) -> Iterator[tuple[Sequence, int]]:
        """Yield each sequence that does not decode yet, with how many of its tokens are to be computed before it does."""
        for seq in self.running:
            if seq.num_missing > 1:
                yield seq, seq.num_missing
        for seq in self.waiting:
            yield seq, len(seq.tokens) - (seq.num_below if seq.is_lost else 0)
        yield from self.returning.items()

    def check_integrity(self) -> None:
        """Raise Bug where states and lists disagree."""
        lists = {State.RUNNING: self.running, State.WAITING: self.waiting, State.RETURNING: [*self.returning]}
        for state, listed in lists.items():
            here = {id(seq) for seq in self.all.values() if seq.state is state}
            if here != {id(seq) for seq in listed} or len(here) != len(listed):
                raise Bug(f"{len(here)} sequences are {state.name}, {len(listed)} are listed so")

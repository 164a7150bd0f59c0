"""The sequences of one instance: which are here, which of them run, and which wait. Owned by StepScheduler.

Invariant: a sequence is listed as running or waiting exactly while its state says so."""

import itertools
from collections import Counter

from core.errors import Bug
from core.lateness import is_late
from core.messages import Grant
from core.steps import StepModels
from core.types import Request
from engine.planning.sequence import Sequence, State


class SequenceTable:
    def __init__(self, max_context_tokens: int, state_tokens: int) -> None:
        """`state_tokens`: of each sequence, as `Sequence` says."""
        self._max_context_tokens, self._state_tokens = max_context_tokens, state_tokens
        self.all: dict[str, Sequence] = {}
        """By the sequence's key."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._priorities: Counter[int] = Counter()
        """The number of sequences here of each priority."""
        self._arrivals = itertools.count()

    @property
    def num_priorities(self) -> int:
        return len(self._priorities)

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
        """Whether a step in flight draws what a running sequence goes on with."""
        return any(seq.num_pending for seq in self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """The number of tokens to compute before everything here decodes."""
        missing = sum(seq.num_missing for seq in self.running if seq.num_missing > 1)
        return missing + sum(len(seq.tokens) for seq in self.waiting)

    def num_late_tokens(self, now: float, steps: StepModels) -> int:
        """Return the tokens of `num_waiting_tokens` of prompts that are late, which let others pass (`core.lateness`)."""
        running = sum(s.num_missing for s in self.running if s.num_missing > 1 and is_late(s, now, steps))
        return running + sum(len(seq.tokens) for seq in self.waiting if is_late(seq, now, steps))

    @property
    def waiting_by_priority(self) -> tuple[tuple[int, int], ...]:
        """(priority, tokens of `num_waiting_tokens`) of each class that is here, the lowest first."""
        tokens = dict.fromkeys(sorted(self._priorities), 0)
        for seq in self.running:
            if seq.num_missing > 1:
                tokens[seq.request.slo.priority] += seq.num_missing
        for seq in self.waiting:
            tokens[seq.request.slo.priority] += len(seq.tokens)
        return tuple(tokens.items())

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

    def check_integrity(self) -> None:
        """Raise Bug where states and lists disagree."""
        listed = {id(seq) for seq in self.running} | {id(seq) for seq in self.waiting}
        for seq in self.all.values():
            if (seq.state in (State.RUNNING, State.WAITING)) != (id(seq) in listed):
                raise Bug(f"{seq.key} is {seq.state.name} but not listed so")

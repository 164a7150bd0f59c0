"""A rank that knows which token every KV slot holds."""

import random

from core.plan import Sampled, SampledToken, SeqWork, StepPlan, StepResult
from core.types import Request
from engine.planning.planned_reservations import Reservation

NONSENSE = -7
"""In place of a token, in a slot that a step without memory has written."""


def next_token(tokens: list[int]) -> int:
    """What the fake model says after `tokens`: depends on all of them."""
    return hash(tuple(tokens)) % 50


class FakeRank:
    """Stores tokens instead of KV and refuses to read a slot that holds anything but its sequence's token.

    Puts a share of the samples off, as a rank does whose masks are late, and knows behind a share what must follow."""

    def __init__(
        self, num_blocks: int, block_size: int, rng: random.Random, put_off: float, forced: float = 0.0
    ) -> None:
        self.rng, self.put_off, self.forced = rng, put_off, forced
        self.late: dict[str, int] = {}
        """Sequences whose masks are still to be made, and behind how many tokens."""
        self.off: dict[str, int] = {}
        """Sequences whose samples are put off, and behind how many tokens."""
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.size = block_size
        self.seqs: dict[str, list[int]] = {}
        self.pushed: dict[str, list[int]] = {}

    def step(self, plan: StepPlan) -> StepResult:
        self.announce(plan)
        for copy in plan.copies:
            self.slots[copy.dst][: copy.num_tokens] = self.slots[copy.src][: copy.num_tokens]
        for work in plan.work:
            tokens = [*self.seqs[work.key], *work.drafts]
            assert not work.drafts or work.start + work.count == len(tokens)
            assert work.start + work.count <= len(tokens) or self.is_beyond(work)
            for i in range(work.start, work.start + work.count):
                token = tokens[i] if i < len(tokens) else None
                self.slots[work.block_ids[i // self.size]][i % self.size] = token
        sampled = []
        for work in plan.work:
            tokens = [*self.seqs[work.key], *work.drafts]
            if self.is_beyond(work):
                continue
            read = [
                self.slots[work.block_ids[i // self.size]][i % self.size]
                for i in range(work.start + work.count)
            ]
            assert read == tokens[: work.start + work.count], f"{work.key} reads somebody else's KV"
            if work.push:
                self.pushed.setdefault(work.key, []).extend(
                    range(work.push.start, work.push.start + work.push.count)
                )
            if work.samples and self.rng.random() < self.put_off:
                self.late[work.key] = self.off[work.key] = work.known_end
            elif work.samples:
                answer = [next_token(tokens[: work.known_end])]
                for draft in work.drafts:
                    if draft != answer[-1]:
                        break
                    answer.append(next_token(tokens[: work.known_end + len(answer)]))
                self.seqs[work.key] += answer
                more = tuple(SampledToken(token) for token in answer[1:])
                run = self.run_behind(self.seqs[work.key])
                sampled.append(Sampled(work.key, answer[0], more=more, run=run))
        return StepResult(step=plan.step, sampled=tuple(sampled))

    def run_behind(self, tokens: list[int]) -> tuple[int, ...]:
        """What is said to be forced behind `tokens`."""
        if not self.forced or self.rng.random() >= self.forced:
            return ()
        longer = list(tokens)
        for _ in range(self.rng.randint(1, 6)):
            longer.append(next_token(longer))
        return tuple(longer[len(tokens) :])

    def announce(self, plan: StepPlan) -> None:
        for key in plan.drop:
            self.seqs.pop(key, None)  # a step that had no memory may have forgotten it before
            self.late.pop(key, None)
            self.off.pop(key, None)
        for new in plan.new:
            assert new.key not in self.seqs
            self.seqs[new.key] = list(new.tokens)

    def run_out(self, plan: StepPlan) -> None:
        """Find no memory half-way through a step, having written some of what it writes, and nonsense."""
        if self.rng.random() < 0.3:
            return
        self.announce(plan)
        for copy in plan.copies[: self.rng.randrange(3)]:
            self.slots[copy.dst][: copy.num_tokens] = self.slots[copy.src][: copy.num_tokens]
        for work in plan.work:
            for i in range(work.start, work.start + work.count):
                if self.rng.random() < 0.7:
                    self.slots[work.block_ids[i // self.size]][i % self.size] = NONSENSE

    def receive(self, request: Request, reservation: Reservation) -> None:
        """Write the KV of a prompt that another instance has computed, but for what was here."""
        for i in range(reservation.matched_tokens, len(request.tokens)):
            self.slots[reservation.block_ids[i // self.size]][i % self.size] = request.tokens[i]

    def is_beyond(self, work: SeqWork) -> bool:
        """Planned before it was known that the sample of its token is put off."""
        known = len(self.seqs[work.key])
        return self.off.get(work.key) == known and (work.start, work.count) == (known, 1)

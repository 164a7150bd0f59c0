"""The sequences that decode on a device of the coarse simulation: when each of them ends, needs another block or is long
enough to be named in a report.

Invariant: `context` is the sum of known tokens over the batch after `steps` decode steps."""

import heapq
from collections.abc import Iterator

from core.output_marks import next_mark
from sim.coarse.simulated_sequence import SimulatedSequence

MAX_BURST = 4096
"""Steps that are taken at once, at most."""


class DecodeBatch:
    def __init__(self, block_size: int, state_blocks: int = 0) -> None:
        self._block_size, self._state_blocks = block_size, state_blocks
        self._seqs: dict[int, SimulatedSequence] = {}
        self._grow: list[tuple[int, int, SimulatedSequence]] = []
        self._finish: list[tuple[int, int, SimulatedSequence]] = []
        self._marks: list[tuple[int, int, SimulatedSequence]] = []
        self.context = 0
        self.steps = 0

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[SimulatedSequence]:
        return iter(self._seqs.values())

    def __contains__(self, seq: SimulatedSequence) -> bool:
        return seq.arrival in self._seqs

    def steps_to_change(self) -> int:
        """Return the steps until a sequence ends or needs another block."""
        next_step = min(self._next_step(self._finish), self._next_step(self._grow))
        return min(next_step - self.steps, MAX_BURST)

    def advance(self, num_steps: int) -> None:
        self.steps += num_steps
        self.context += len(self._seqs) * num_steps

    def insert(self, seq: SimulatedSequence) -> None:
        self._seqs[seq.arrival] = seq
        self.context += seq.num_known
        seq.joined_step = self.steps
        seq.finish_step = self.steps + seq.job.max_tokens - seq.num_output
        heapq.heappush(self._finish, (seq.finish_step, seq.arrival, seq))
        self.note_growth(seq)
        self._note_mark(seq, seq.num_output)

    def note_growth(self, seq: SimulatedSequence) -> None:
        """Note how long a sequence has blocks. Step i of its decoding here writes token `num_known + i`."""
        room = (len(seq.blocks.block_ids) - self._state_blocks) * self._block_size - seq.num_known
        seq.grow_step = seq.joined_step + room + 1
        if seq.grow_step < seq.finish_step:
            heapq.heappush(self._grow, (seq.grow_step, seq.arrival, seq))

    def remove(self, seq: SimulatedSequence) -> None:
        del self._seqs[seq.arrival]
        self.count_tokens(seq)
        self.context -= seq.num_known

    def counted(self) -> list[SimulatedSequence]:
        """Return all sequences, with their counters brought up to now."""
        seqs = [*self._seqs.values()]
        for seq in seqs:
            self.count_tokens(seq)
        return seqs

    def count_tokens(self, seq: SimulatedSequence) -> None:
        """Bring a sequence's counters up to this step."""
        seq.num_known += self.steps - seq.joined_step
        seq.num_computed = seq.num_known - 1
        seq.joined_step = self.steps

    def pop_finished(self) -> SimulatedSequence | None:
        """Take one that has ended out of the batch, and return it."""
        step = self._next_step(self._finish)
        if step > self.steps:
            return None
        assert step == self.steps, "a burst went over the end of a sequence"
        seq = heapq.heappop(self._finish)[2]
        self.remove(seq)
        return seq

    def pop_growing(self) -> SimulatedSequence | None:
        """Return one that needs another block before the next step."""
        return heapq.heappop(self._grow)[2] if self._next_step(self._grow) <= self.steps else None

    def grown(self, num_done: int) -> tuple[tuple[str, int], ...]:
        """Return (attempt, output tokens) of those that have come to a mark since the last call, `num_done` steps after
        `steps`."""
        found: list[tuple[str, int]] = []
        while self._marks and self._marks[0][0] <= self.steps + num_done:
            step, number, seq = heapq.heappop(self._marks)
            if self._seqs.get(number) is seq and seq.mark_step == step:
                num_output = seq.num_output + step - seq.joined_step
                found.append((seq.request.key, num_output))
                self._note_mark(seq, num_output)
        return tuple(found)

    def _note_mark(self, seq: SimulatedSequence, num_output: int) -> None:
        """Note when a sequence with so many output tokens will have come to the next mark, if it lives that long."""
        seq.mark_step = seq.joined_step + next_mark(num_output) - seq.num_output
        if seq.mark_step < seq.finish_step:
            heapq.heappush(self._marks, (seq.mark_step, seq.arrival, seq))

    def _next_step(self, heap: list[tuple[int, int, SimulatedSequence]]) -> int:
        """Return the first step in `heap` of a sequence that still decodes. Others are dropped from it."""
        while heap:
            step, number, seq = heap[0]
            current = seq.finish_step if heap is self._finish else seq.grow_step
            if self._seqs.get(number) is seq and current == step:
                return step
            heapq.heappop(heap)
        return self.steps + MAX_BURST

"""The sequences that decode on a device of the coarse simulation: when each of them ends or needs another block.

Invariant: `context` is the sum of known tokens over the batch after `steps` decode steps."""

import heapq
from collections.abc import Iterator

from sim.coarse.simulated_sequence import SimulatedSequence

MAX_STRETCH = 4096
"""Steps that are taken at once, at most."""


class DecodeBatch:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._stays: dict[int, SimulatedSequence] = {}
        self._grow: list[tuple[int, int, SimulatedSequence]] = []
        self._finish: list[tuple[int, int, SimulatedSequence]] = []
        self.context = 0
        self.steps = 0

    def __len__(self) -> int:
        return len(self._stays)

    def __iter__(self) -> Iterator[SimulatedSequence]:
        return iter(self._stays.values())

    def __contains__(self, stay: SimulatedSequence) -> bool:
        return stay.arrival in self._stays

    def steps_to_change(self) -> int:
        """Return the steps until a sequence ends or needs another block."""
        next_step = min(self._next_step(self._finish), self._next_step(self._grow))
        return min(next_step - self.steps, MAX_STRETCH)

    def advance(self, num_steps: int) -> None:
        self.steps += num_steps
        self.context += len(self._stays) * num_steps

    def insert(self, stay: SimulatedSequence) -> None:
        self._stays[stay.arrival] = stay
        self.context += stay.num_known
        stay.joined_step = self.steps
        stay.finish_step = self.steps + stay.job.max_tokens - stay.num_output
        heapq.heappush(self._finish, (stay.finish_step, stay.arrival, stay))
        self.note_growth(stay)

    def note_growth(self, stay: SimulatedSequence) -> None:
        """Note how long a sequence has blocks. Step i of its decoding here writes token `num_known + i`."""
        room = len(stay.blocks.block_ids) * self._block_size - stay.num_known
        stay.grow_step = stay.joined_step + room + 1
        if stay.grow_step < stay.finish_step:
            heapq.heappush(self._grow, (stay.grow_step, stay.arrival, stay))

    def remove(self, stay: SimulatedSequence) -> None:
        del self._stays[stay.arrival]
        self.count_tokens(stay)
        self.context -= stay.num_known

    def counted(self) -> list[SimulatedSequence]:
        """Return all sequences, with their counters brought up to now."""
        stays = [*self._stays.values()]
        for stay in stays:
            self.count_tokens(stay)
        return stays

    def count_tokens(self, stay: SimulatedSequence) -> None:
        """Bring a sequence's counters up to this step."""
        stay.num_known += self.steps - stay.joined_step
        stay.num_computed = stay.num_known - 1
        stay.joined_step = self.steps

    def pop_finished(self) -> SimulatedSequence | None:
        """Take one that has ended out of the batch, and return it."""
        step = self._next_step(self._finish)
        if step > self.steps:
            return None
        assert step == self.steps, "a stretch went over the end of a sequence"
        stay = heapq.heappop(self._finish)[2]
        self.remove(stay)
        return stay

    def pop_growing(self) -> SimulatedSequence | None:
        """Return one that needs another block before the next step."""
        return heapq.heappop(self._grow)[2] if self._next_step(self._grow) <= self.steps else None

    def _next_step(self, heap: list[tuple[int, int, SimulatedSequence]]) -> int:
        """Return the first step in `heap` of a sequence that still decodes. Others are dropped from it."""
        while heap:
            step, number, stay = heap[0]
            current = stay.finish_step if heap is self._finish else stay.grow_step
            if self._stays.get(number) is stay and current == step:
                return step
            heapq.heappop(heap)
        return self.steps + MAX_STRETCH

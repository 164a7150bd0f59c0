"""Moves sequences from state to state, and gives their blocks back. Owned by StepScheduler.

Invariant: a block is given back only when no planned, uncommitted step can write it and no grant or pusher uses it."""

from engine.planning.block_ledger import BlockLedger
from engine.planning.sequence import Sequence, State
from engine.planning.sequence_table import SequenceTable
from engine.planning.speculation.speculator import Speculator


class Lifecycle:
    def __init__(self, table: SequenceTable, ledger: BlockLedger, speculator: Speculator | None) -> None:
        self._table, self._ledger, self._speculator = table, ledger, speculator
        self.num_preempted = 0
        self._drop: list[str] = []

    def run(self, seq: Sequence) -> None:
        seq.state = State.RUNNING
        self._table.running.append(seq)

    def wait(self, seq: Sequence) -> None:
        """Let a sequence that has no blocks wait for them."""
        seq.state = State.WAITING
        self._table.waiting.append(seq)

    def preempt(self, seq: Sequence) -> None:
        """Let a running sequence wait again. It loses its blocks when nothing is in flight."""
        self._table.running.remove(seq)
        self.num_preempted += 1
        seq.state = State.PREEMPTED
        self.settle(seq)

    def finish(self, seq: Sequence) -> None:
        """Stop computing a running sequence."""
        self._table.running = [s for s in self._table.running if s is not seq]
        self.leave(seq)

    def pause(self, seq: Sequence) -> None:
        """Let a running sequence, which is pushed, sit out until `run`. It keeps its blocks."""
        self._table.running.remove(seq)
        seq.state = State.PAUSED

    def leave(self, seq: Sequence) -> None:
        """Stop computing: a pushed sequence keeps its blocks for the pusher, others lose theirs when nothing is in flight."""
        seq.state = State.HELD if seq.push is not None else State.DONE
        self.settle(seq)

    def settle(self, seq: Sequence) -> None:
        """Give back the blocks of a sequence that has left and has nothing more in flight."""
        if seq.num_in_flight:
            return
        if seq.state is State.DONE:
            if seq.key in self._table.all:
                self.forget(seq)
        elif seq.state is State.PREEMPTED:
            self._give_up_blocks(seq)
            self.wait(seq)

    def forget(self, seq: Sequence) -> None:
        self._give_up_blocks(seq)
        seq.state = State.DONE
        self.disown(seq)

    def disown(self, seq: Sequence) -> None:
        """Forget a sequence that has no blocks."""
        self._table.remove(seq)
        if self._speculator is not None:
            self._speculator.left(seq)

    def take_dropped(self) -> tuple[str, ...]:
        """Return the keys of sequences that the ranks are to forget, each once."""
        dropped = tuple(dict.fromkeys(self._drop))
        self._drop.clear()
        return dropped

    def drop_again(self, keys: tuple[str, ...]) -> None:
        """Let the ranks forget these: the plan that said so was taken back."""
        self._drop += keys

    def unannounce(self, seq: Sequence) -> None:
        """Let the ranks forget a sequence. They are told of it anew with its next work."""
        if seq.announced:
            self._drop.append(seq.key)
            seq.announced = False
            seq.num_unmasked = seq.num_masked = 0  # the ranks forget the matcher with the sequence

    def _give_up_blocks(self, seq: Sequence) -> None:
        self._ledger.strip(seq)
        self.unannounce(seq)

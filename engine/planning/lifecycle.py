"""Moves sequences from state to state, and gives their blocks back. Owned by StepScheduler.

Invariant: a block is given back only when no planned, uncommitted step can write it and no grant or pusher uses it."""

from collections.abc import Callable
from math import inf

from core.errors import Bug
from engine.planning.block_ledger import BlockLedger
from engine.planning.prefixes import Prefixes
from engine.planning.sequence import Sequence, State
from engine.planning.sequence_table import SequenceTable
from engine.planning.speculation.speculator import Speculator


class Lifecycle:
    def __init__(
        self, table: SequenceTable, ledger: BlockLedger, prefixes: Prefixes, speculator: Speculator | None
    ) -> None:
        self.table, self.ledger, self.prefixes, self._speculator = table, ledger, prefixes, speculator
        self.num_preempted = 0
        self.on_left: Callable[[Sequence], None] = lambda _: None
        """Called with each sequence that leaves before it gives its blocks back."""
        self._drop: list[str] = []

    def run(self, seq: Sequence) -> None:
        """Let a sequence that has blocks be computed."""
        seq.state, seq.is_lost, seq.rests_until = State.RUNNING, False, -inf
        self.table.running.append(seq)

    def wait(self, seq: Sequence) -> None:
        """Let a sequence that has no blocks wait for them."""
        seq.state = State.WAITING
        self.table.waiting.append(seq)

    def await_kv(self, seq: Sequence, num_missing: int) -> None:
        """Let a waiting sequence sit out while its KV is read, but for that of `num_missing` tokens. One that has
        paused need not come last any more: those that came later would take what has been read."""
        self._unlist(seq)
        seq.state, seq.rests_until = State.RETURNING, -inf
        self.table.returning[seq] = num_missing

    def has_kv(self, seq: Sequence) -> None:
        """Let a sequence wait again, whose KV has been read. One that has left meanwhile is not here any more."""
        if seq.state is State.RETURNING:
            self._unlist(seq)
            self.wait(seq)

    def preempt(self, seq: Sequence) -> None:
        """Let a running sequence wait again. It loses its blocks when nothing is in flight."""
        self.table.running.remove(seq)
        self.num_preempted += 1
        seq.state = State.PREEMPTED
        self.settle(seq)

    def finish(self, seq: Sequence) -> None:
        """Stop computing a running sequence."""
        self.table.running = [s for s in self.table.running if s is not seq]
        self.leave(seq)

    def pause(self, seq: Sequence) -> None:
        """Let a running sequence, which is pushed, sit out until `run`. It keeps its blocks."""
        self.table.running.remove(seq)
        seq.state = State.PAUSED

    def leave(self, seq: Sequence) -> None:
        """Stop computing: a pushed sequence keeps its blocks for the pusher, others lose theirs when nothing is in flight."""
        seq.state = State.HELD if seq.push is not None else State.DONE
        self.settle(seq)

    def abort(self, seq: Sequence) -> None:
        """Compute no more of it. Blocks that a pusher or a writer uses stay until `release`. Idempotent."""
        if seq.aborted or seq.state in (State.RESERVED, State.HELD):
            return
        seq.aborted = True
        if seq.state in (State.WAITING, State.RETURNING):
            self._unlist(seq)
            self.forget(seq)
        elif seq.state is State.RUNNING:
            self.table.running.remove(seq)
            self.leave(seq)
        elif seq.state in (State.PREEMPTED, State.PAUSED):
            self.leave(seq)

    def release(self, seq: Sequence) -> None:
        """Give back a reservation, or a sequence whose blocks the pusher has read."""
        if seq.state is State.RUNNING:
            raise Bug(f"{seq.key} is released while it runs")
        self._unlist(seq)
        seq.push = None
        if seq.num_in_flight == 0:
            self.forget(seq)
        else:
            seq.aborted = True
            seq.state = State.DONE

    def settle(self, seq: Sequence) -> None:
        """Give back the blocks of a sequence that has left and has nothing more in flight."""
        if seq.num_in_flight:
            return
        if seq.state is State.DONE:
            if seq.key in self.table.all:
                self.forget(seq)
        elif seq.state is State.PREEMPTED:
            self.prefixes.keep_below(seq)
            self._give_up_blocks(seq)
            seq.is_lost = True
            self.wait(seq)

    def forget(self, seq: Sequence) -> None:
        self.on_left(seq)
        self._give_up_blocks(seq)
        seq.state = State.DONE
        self.disown(seq)

    def disown(self, seq: Sequence) -> None:
        """Forget a sequence that has no blocks."""
        self.table.remove(seq)
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

    def _unlist(self, seq: Sequence) -> None:
        """Take a sequence off the list of those that wait or return, if it is on one."""
        if seq.state is State.WAITING:
            self.table.waiting.remove(seq)
        elif seq.state is State.RETURNING:
            del self.table.returning[seq]

    def _give_up_blocks(self, seq: Sequence) -> None:
        self.ledger.strip(seq)
        self.unannounce(seq)

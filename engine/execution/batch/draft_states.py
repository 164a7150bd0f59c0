"""Brings recurrent states behind those of a step's draft tokens that were right.

A step leaves states as they are behind its known tokens. Invariant: when a step's result is known, the pool has each sequence's
states behind the tokens that are computed of it, whatever was proposed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.plan import SeqWork
from engine.execution.batch.batch import Batch
from engine.execution.pools.kv_pool import DevicePool


@dataclass(frozen=True, slots=True)
class DraftStates:
    """A step with draft tokens of sequences that have states."""

    work: Sequence[SeqWork]
    batch: Batch

    def take_in(self, num_right: Mapping[str, int], pool: DevicePool, block_size: int) -> None:
        """Learn how many draft tokens of each sequence were right. Returns when all writes are in the pool."""
        if not self.batch.meta.take_in([num_right.get(item.key, 0) for item in self.work]):
            return
        if pool.is_told:
            slots = self.batch.state_slots(block_size)
            for layer in range(len(pool.layers)):
                pool.written(layer, slots)
        pool.finish()


def draft_states(work: Sequence[SeqWork], batch: Batch) -> DraftStates | None:
    """Return what is to be done behind a step; None where nothing is."""
    states = batch.meta.states
    return DraftStates(work, batch) if states is not None and states.num_drafts else None

"""The blocks of one instance of the coarse simulation: the production pool, prefix tree, eviction and ledger.

To them a block of the simulation is one token. Invariant: who has blocks is in `_holding`, from `admit` to `strip`."""

from collections.abc import Callable, Sequence

from core.kv import hash_chain, num_blocks_for
from engine.cache.block_pool import BlockPool
from engine.cache.radix_cache import RadixCache
from engine.planning.block_ledger import BlockLedger
from sim.coarse.simulated_sequence import SimulatedSequence

FINE_BLOCK_TOKENS = 16
"""A production block: each running sequence keeps one free."""


class Blocks:
    def __init__(
        self, num_blocks: int, block_tokens: int, new_name: Callable[[], int], state_blocks: int = 0
    ) -> None:
        """`new_name` names a block of output, which no prompt has. `state_blocks`: those that each sequence has beside those of
        its tokens, for its recurrent state. A prefix is found here at any block, also where production has no checkpoint."""
        self._block_tokens, self._new_name, self._state_blocks = block_tokens, new_name, state_blocks
        pool = BlockPool(num_blocks)
        self._cache = RadixCache(pool, 1, hashes_of=self._hashes_of)
        self._ledger = BlockLedger(pool, self._cache, 1)
        self._holding: dict[int, SimulatedSequence] = {}
        self._hashes: tuple[int, ...] = ()
        """Hashes of a prompt's blocks that are being offered; the last of them are new."""

    @property
    def num_available(self) -> int:
        return self._ledger.num_available

    def admit(self, seq: SimulatedSequence, num_tokens: int, num_running: int) -> bool:
        """Give blocks for the first `num_tokens` tokens, of which the cached ones need not be computed."""
        size = self._block_tokens
        match = self._cache.match(seq.blocks.tokens, seq.request.prefix_salt, partial=False)
        headroom = num_blocks_for(num_running * FINE_BLOCK_TOKENS, size)
        wanted = num_blocks_for(num_tokens, size) + self._state_blocks
        if not self._ledger.admit(seq.blocks, match, wanted, headroom):
            return False
        seq.num_computed = len(match.blocks) * size
        self._holding[seq.arrival] = seq
        return True

    def grow(self, seq: SimulatedSequence) -> None:
        """Add one block. The caller has checked `num_available`."""
        self._ledger.grow(seq.blocks, 1)

    def strip(self, seq: SimulatedSequence) -> None:
        self._ledger.strip(seq.blocks)
        del self._holding[seq.arrival]

    def offer(self, seq: SimulatedSequence) -> None:
        """Offer the full blocks of what is computed of the prompt to the prefix cache, where another prompt may find them."""
        if seq.job.may_recur:
            self._keep_prompt(seq)

    def preempt(self, seq: SimulatedSequence) -> None:
        """Take a sequence's blocks for now. It comes back, and may then find its former prompt, followed by what it has
        generated."""
        self._keep_prompt(seq)
        self._name_output(seq)
        self.strip(seq)

    def keep_output(self, seq: SimulatedSequence) -> None:
        """Keep what was generated in the cache, too."""
        if not seq.job.may_recur:
            return
        self._name_output(seq)
        self._ledger.offer(seq.blocks, (seq.num_known - 1) // self._block_tokens)

    def _keep_prompt(self, seq: SimulatedSequence) -> None:
        job = seq.job
        num_full = min(seq.num_computed, job.num_prompt) // self._block_tokens
        if num_full > seq.blocks.num_kept:
            self._hashes = job.hashes[:num_full]
            self._ledger.offer(seq.blocks, num_full)
            self._hashes = ()

    def _name_output(self, seq: SimulatedSequence) -> None:
        """Give what was generated names of its own, or those that the next turn of its session knows it by."""
        names, known = seq.blocks.tokens, seq.job.answer_ids
        if known:
            first = seq.job.num_prompt // self._block_tokens
            named = known[: num_blocks_for(seq.num_known, self._block_tokens) - first]
            names[first : first + len(named)] = named
        for _ in range(num_blocks_for(seq.num_known, self._block_tokens) - len(names)):
            names.append(self._new_name())

    def _hashes_of(self, parent: int, names: Sequence[int], size: int) -> list[int]:
        known = self._hashes
        return [*known[len(known) - len(names) :]] if known else hash_chain(parent, names, size)

    def drain_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._cache.drain_events()

    def check_integrity(self) -> None:
        """Raise Bug where the production ledger, pool and prefix tree disagree with the sequences that are here."""
        self._ledger.check_integrity([seq.blocks for seq in self._holding.values()])

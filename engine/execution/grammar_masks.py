"""Which tokens the grammars of a rank's sequences allow next. Threads work it out while the model computes.

A drawn token goes to a thread at once, and the next draw takes the mask that the thread has made of it. A draw whose mask is not
made yet is put off: the step goes on without it, and a listener hears when the mask is made. A mask that takes long holds up
neither a step nor the masks of others."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np

from core.plan import StepPlan
from core.ports import OnReady
from core.types import TokenId
from engine.execution.matching import Matchers, Matching

_GRACE_S = 0.001
"""How long a draw waits for masks of sequences that are mostly quick. Putting it off costs more: a token is computed again."""
_SLOW_S = 0.002
"""The processor time of a mask from which on its sequence counts as slow."""
_LARGE_BYTES = 16 << 10
"""The size from which on a grammar may take long to compile."""


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of those rows of a batch that have a grammar."""

    rows: list[int]
    bits: np.ndarray
    """(len(rows), words) int32, as in `Ops.mask`"""
    complete: frozenset[int]
    """The rows whose output can only end."""


@dataclass(frozen=True, slots=True)
class _Made:
    matching: Matching
    took_s: float
    """Processor time; 0 for a sequence's first mask, which includes the compilation of its grammar."""


@dataclass(frozen=True, slots=True)
class _NextMask:
    made: Future[_Made]
    num_tokens: int
    """The number of the sequence's tokens before the one that this mask is for."""
    is_slow: bool
    """Whether an earlier mask of the sequence took long."""


class GrammarMasks:
    """One rank's grammars. Call `begin` before a step's forward pass, `late` and `masks` at its draw and `drawn` behind it. One
    thread calls them all."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        # What is slow has threads of its own, and two go through what is quick: one may meet what turns out to be slow.
        self._starting = {is_large: ThreadPoolExecutor(1, "grammar-start") for is_large in (False, True)}
        self._advancing = {False: ThreadPoolExecutor(2, "grammar"), True: ThreadPoolExecutor(1, "grammar")}
        self._sequences: dict[str, _NextMask] = {}
        self._hear: OnReady = lambda key, num_tokens: None

    def on_ready(self, hear: OnReady) -> None:
        """`hear` is called, on any thread, for each sequence that `late` has named, when its mask is made."""
        self._hear = hear

    def begin(self, plan: StepPlan) -> None:
        """Take note of the sequences that have left and come."""
        for key in plan.drop:
            self._sequences.pop(key, None)
        for new in plan.new:
            if (grammar := new.sampling.grammar) is not None:
                thread = self._starting[len(grammar.text) > _LARGE_BYTES]
                made = thread.submit(_started, partial(self._matchers.start, new, grammar))
                self._sequences[new.key] = _NextMask(made, len(new.tokens), is_slow=False)

    def late(self, keys: Iterable[str]) -> frozenset[str]:
        """Return those of these sequences whose next mask is not made yet. The listener of `on_ready` will hear of each."""
        awaited = {key: mask for key in keys if (mask := self._sequences.get(key)) and not mask.made.done()}
        wait([mask.made for mask in awaited.values() if not mask.is_slow], _GRACE_S)
        late = {key: mask for key, mask in awaited.items() if not mask.made.done()}
        for key, mask in late.items():
            mask.made.add_done_callback(partial(self._tell, key, mask.num_tokens))
        return frozenset(late)

    def masks(self, keys: Sequence[str]) -> RowMasks | None:
        """Return the masks for this batch; None where no sequence has a grammar. Waits for masks that are late."""
        found = [
            (row, self._sequences[key].made.result().matching)
            for row, key in enumerate(keys)
            if key in self._sequences
        ]
        if not found:
            return None
        complete = frozenset(row for row, matching in found if matching.is_complete)
        return RowMasks([row for row, _ in found], np.stack([one.bits for _, one in found]), complete)

    def drawn(self, key: str, token: TokenId) -> None:
        """Advance the sequence's matcher by the drawn `token`."""
        if (mask := self._sequences.get(key)) is not None:
            made = mask.made.result()
            is_slow = mask.is_slow or made.took_s > _SLOW_S
            advanced = self._advancing[is_slow].submit(_advanced, made.matching, token)
            self._sequences[key] = _NextMask(advanced, mask.num_tokens + 1, is_slow)

    def _tell(self, key: str, num_tokens: int, _: "Future[_Made]") -> None:
        self._hear(key, num_tokens)


def _started(start: Callable[[], Matching]) -> _Made:
    return _Made(start(), 0.0)


def _advanced(matching: Matching, token: TokenId) -> _Made:
    started = time.thread_time()
    matching.advance(token)
    return _Made(matching, time.thread_time() - started)

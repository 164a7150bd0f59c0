"""Which tokens the grammars of a rank's sequences allow next. Threads work it out while the model computes.

Invariant: a mask is a function of the grammar and the output tokens. So a sequence that was handed over or preempted gets the
same mask. A drawn token goes to a thread at once, and the next draw takes the mask that the thread has made of it."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from core.plan import NewSeq, StepPlan
from core.types import Grammar, TokenId

_log = logging.getLogger(__name__)

_MAX_COMPILED = 64
"""The number of compiled grammars kept for the next sequence that asks for the same one."""
_LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own limits on states, items and the work for one mask."""


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of those rows of a batch that have a grammar."""

    rows: list[int]
    bits: np.ndarray
    """(len(rows), words) int32, as in `Ops.mask`"""
    complete: frozenset[int]
    """The rows whose output can only end."""


class GrammarMasks:
    """One rank's grammars. Call `begin` before a step's forward pass, `masks` at its draw and `drawn` behind it."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`folder` is the checkpoint's, with its tokenizer.json; `vocab_size` is the width of the logits."""
        self._folder, self._vocab_size = folder, vocab_size
        self._starting = ThreadPoolExecutor(1, "grammar-start")
        """Compiles grammars. It is separate so that a slow compilation holds up no mask of a running sequence."""
        self._advancing = ThreadPoolExecutor(1, "grammar")
        self._sequences: dict[str, Future[_Matching]] = {}
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def begin(self, plan: StepPlan) -> None:
        """Take note of the sequences that have left and come."""
        for key in plan.drop:
            self._sequences.pop(key, None)
        for new in plan.new:
            if new.sampling.grammar is not None:
                self._sequences[new.key] = self._starting.submit(self._start, new, new.sampling.grammar)

    def masks(self, keys: Sequence[str]) -> RowMasks | None:
        """Return the masks for this batch; None where no sequence has a grammar. Waits for the threads."""
        found = [
            (row, self._sequences[key].result()) for row, key in enumerate(keys) if key in self._sequences
        ]
        if not found:
            return None
        complete = frozenset(row for row, matching in found if matching.is_complete)
        return RowMasks([row for row, _ in found], np.stack([one.bits for _, one in found]), complete)

    def drawn(self, key: str, token: TokenId) -> None:
        """Advance the sequence's matcher by the drawn `token`."""
        if (before := self._sequences.get(key)) is not None:
            self._sequences[key] = self._advancing.submit(lambda: before.result().advance(token))

    def _start(self, new: NewSeq, grammar: Grammar) -> "_Matching":
        matching = _Matching(new, grammar, self._matcher(grammar.text), self._vocab_size)
        for token in new.tokens[new.num_prompt :]:
            matching.follow(token)
        return matching.fill()

    def _matcher(self, text: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = load_vocabulary(self._folder, self._vocab_size)
        compiled = self._compiled.pop(text, None)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        self._compiled[text] = compiled
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()


class _Matching:
    """One sequence's matcher and the mask of its next draw. One thread at a time changes it, and none while a draw reads it."""

    def __init__(self, new: NewSeq, grammar: Grammar, matcher: LLMatcher, vocab_size: int) -> None:
        self._key, self._grammar, self._matcher = new.key, grammar, matcher
        self._stops = new.sampling.stop_token_ids
        self._is_free = grammar.think_end is not None and grammar.think_begin is None
        """True within the reasoning, which the grammar does not constrain."""
        self._may_think = grammar.think_begin is not None
        self.bits = np.empty((vocab_size + 31) // 32, np.int32)
        self.is_complete = False

    def advance(self, token: TokenId) -> "_Matching":
        self.follow(token)
        return self.fill()

    def follow(self, token: TokenId) -> None:
        grammar = self._grammar
        if self._is_free:
            self._is_free = token != grammar.think_end
        elif self._may_think and token == grammar.think_begin:
            self._is_free = True
        elif token not in self._stops:
            self._matcher.consume_token(token)
        self._may_think = False

    def fill(self) -> "_Matching":
        """Fill the mask of the next draw. A stop token is allowed only where the output may end. A matcher that has hit one of
        its limits allows nothing else."""
        matcher = self._matcher
        if self._is_free:
            self.bits.fill(-1)
            self._allow(self._stops, False)
            return self
        self.is_complete = matcher.is_stopped()
        if not self.is_complete:
            matcher.unsafe_compute_mask_ptr(self.bits.ctypes.data, self.bits.nbytes)
            self.is_complete = matcher.is_error()
        if self.is_complete:
            self.bits.fill(0)
        if matcher.is_error():
            _log.warning(
                "request %s ends early: its grammar has hit a limit: %s", self._key, matcher.get_error()
            )
        self._allow(self._stops, self.is_complete or matcher.is_accepting())
        if self._may_think and self._grammar.think_begin is not None:
            self._allow((self._grammar.think_begin,), True)
        return self

    def _allow(self, tokens: Sequence[TokenId], allowed: bool) -> None:
        words = self.bits.view(np.uint32)
        for token in tokens:
            bit = np.uint32(1 << (token % 32))
            words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit


def load_vocabulary(folder: Path, vocab_size: int) -> LLTokenizer:
    """Return the checkpoint's tokens as bytes. Raises ValueError where llguidance cannot read its tokenizer.json."""
    return LLTokenizer(str(folder / "tokenizer.json"), n_vocab=vocab_size)

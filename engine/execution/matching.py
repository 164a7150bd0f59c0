"""One sequence's grammar: which tokens may follow its output. llguidance stands behind the seam `Matchers`.

Invariant: a mask is a function of the grammar and the output tokens. So a sequence that was handed over or preempted gets the
same mask."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from core.plan import NewSeq
from core.types import Grammar, TokenId

_log = logging.getLogger(__name__)

_MAX_COMPILED = 64
"""The number of compiled grammars kept for the next sequence that asks for the same one."""
_LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own limits on states, items and the work for one mask."""


class Matching(Protocol):
    """What a sequence may say next. One thread at a time changes it, and none while a draw reads it."""

    @property
    def bits(self) -> np.ndarray:
        """(words,) int32, as in `Ops.mask`"""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the output can only end."""
        ...

    def advance(self, token: TokenId) -> None:
        """Follow the drawn `token`. Returns when `bits` are those of the next draw."""
        ...


class Matchers(Protocol):
    def start(self, new: NewSeq, grammar: Grammar) -> Matching:
        """Return the matching of a sequence behind its output so far. May take seconds. Several threads call it."""
        ...


class GuidanceMatchers:
    """Matchers of llguidance. Keeps the grammars that were used last."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`folder` is the checkpoint's, with its tokenizer.json; `vocab_size` is the width of the logits."""
        self._folder, self._vocab_size = folder, vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def start(self, new: NewSeq, grammar: Grammar) -> "GuidanceMatching":
        return GuidanceMatching(new, grammar, self._matcher(grammar.text), self._vocab_size)

    def _matcher(self, text: str) -> LLMatcher:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = load_vocabulary(self._folder, self._vocab_size)
            compiled = self._compiled.get(text)
        if compiled is None:  # outside the lock: others need not wait for it
            compiled = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        with self._lock:
            self._compiled[text] = compiled
            self._compiled.move_to_end(text)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()


class GuidanceMatching:
    def __init__(self, new: NewSeq, grammar: Grammar, matcher: LLMatcher, vocab_size: int) -> None:
        self._key, self._grammar, self._matcher = new.key, grammar, matcher
        self._stops = new.sampling.stop_token_ids
        self._is_free = grammar.think_end is not None and grammar.think_begin is None
        """True within the reasoning, which the grammar does not constrain."""
        self._may_think = grammar.think_begin is not None
        self.bits = np.empty((vocab_size + 31) // 32, np.int32)
        self.is_complete = False
        for token in new.tokens[new.num_prompt :]:
            self._follow(token)
        self._fill()

    def advance(self, token: TokenId) -> None:
        self._follow(token)
        self._fill()

    def _follow(self, token: TokenId) -> None:
        grammar = self._grammar
        if self._is_free:
            self._is_free = token != grammar.think_end
        elif self._may_think and token == grammar.think_begin:
            self._is_free = True
        elif token not in self._stops:
            self._matcher.consume_token(token)
        self._may_think = False

    def _fill(self) -> None:
        """Fill the mask of the next draw. A stop token is allowed only where the output may end. A matcher that has hit one of
        its limits allows nothing else."""
        matcher = self._matcher
        if self._is_free:
            self.bits.fill(-1)
            self._allow(self._stops, False)
            return
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

    def _allow(self, tokens: Sequence[TokenId], allowed: bool) -> None:
        words = self.bits.view(np.uint32)
        for token in tokens:
            bit = np.uint32(1 << (token % 32))
            words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit


def load_vocabulary(folder: Path, vocab_size: int) -> LLTokenizer:
    """Return the checkpoint's tokens as bytes. Raises ValueError where llguidance cannot read its tokenizer.json."""
    return LLTokenizer(str(folder / "tokenizer.json"), n_vocab=vocab_size)

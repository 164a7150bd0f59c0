"""One sequence's grammar: which tokens may follow its output. llguidance stands behind the seam `Matchers`.

Invariant: a mask is a function of the grammar and the output tokens. So a sequence that was handed over or preempted gets the
same mask."""

import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from core.plan import NewSeq
from core.types import Grammar, TokenId

_log = logging.getLogger(__name__)

_MAX_COMPILED = 64
"""The number of compiled grammars kept for the next sequence that asks for the same one."""
_NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""The number of threads that make the masks of one step, which leave most processors to the model."""
_LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own limits on states, items and the work for one mask."""


@dataclass(frozen=True, slots=True)
class Mask:
    """What one draw may give."""

    bits: np.ndarray
    """(words,) int32, as in `kernels.sampling.Masks`"""
    is_complete: bool = False
    """Whether the output can only end."""
    run: tuple[TokenId, ...] = ()
    """Tokens of which each is all that is allowed behind those before it: this draw gives the first one."""


class Matching(Protocol):
    """What a sequence may say next. One thread at a time calls it."""

    @property
    def mask(self) -> Mask:
        """The mask of the next draw."""
        ...

    def advance(self, tokens: Sequence[TokenId]) -> None:
        """Follow the drawn `tokens`. Returns when `mask` is that of the next draw."""
        ...

    def behind(self, guesses: Sequence[TokenId]) -> list[Mask]:
        """Return the masks of the draws behind each of `guesses`, up to the first one that cannot be drawn. Nothing changes."""
        ...


class Matchers(Protocol):
    """Several threads call it, each for other sequences."""

    def start(self, new: NewSeq, grammar: Grammar) -> Matching:
        """Return the matching of a sequence behind its output so far. May take seconds."""
        ...

    def advance(self, drawn: Sequence[tuple[Any, Sequence[TokenId]]]) -> None:
        """Follow what was drawn in each of some matchings that `start` gave, as `Matching.advance` does for one."""
        for matching, tokens in drawn:
            matching.advance(tokens)


class GuidanceMatchers(Matchers):
    """Matchers of llguidance. Keeps the grammars that were used last. Other threads of Python run on while masks are made."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`folder` is the checkpoint's, with its tokenizer.json; `vocab_size` is the width of the logits."""
        self._num_words = (vocab_size + 31) // 32
        self._executor = LLExecutor(_NUM_THREADS)
        # Read now: a large one takes more than a second, in which no other thread runs.
        self._vocabulary = _vocabulary(folder, vocab_size)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def start(self, new: NewSeq, grammar: Grammar) -> "GuidanceMatching":
        return GuidanceMatching(new, grammar, self._matcher(grammar.text), self._num_words)

    def advance(self, drawn: Sequence[tuple["GuidanceMatching", Sequence[TokenId]]]) -> None:
        computed = [matching.follow(tokens) for matching, tokens in drawn]
        bits = np.zeros((len(drawn), self._num_words), np.int32)
        wanted = [(matcher, row) for row, matcher in enumerate(computed) if matcher is not None]
        if wanted:
            self._executor.unsafe_compute_mask_ptr(wanted, bits.ctypes.data, bits.strides[0], len(drawn))
        for (matching, _), of_row in zip(drawn, bits, strict=True):
            matching.finish(of_row)

    def _matcher(self, text: str) -> LLMatcher:
        if isinstance(self._vocabulary, ValueError):
            raise self._vocabulary
        with self._lock:
            compiled = self._compiled.get(text)
        if compiled is None:  # outside the lock: others need not wait for it
            compiled = LLMatcher(self._vocabulary, text, log_level=0, limits=_LIMITS)
        with self._lock:
            self._compiled[text] = compiled
            self._compiled.move_to_end(text)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()


class GuidanceMatching:
    def __init__(self, new: NewSeq, grammar: Grammar, matcher: LLMatcher, num_words: int) -> None:
        self._key, self._grammar, self._matcher = new.key, grammar, matcher
        self._stops = new.sampling.stop_token_ids
        self._is_free = grammar.think_end is not None and grammar.think_begin is None
        """True within the reasoning, which the grammar does not constrain."""
        self._may_think = grammar.think_begin is not None
        self._num_words = num_words
        self.advance(new.tokens[new.num_prompt :])

    def advance(self, tokens: Sequence[TokenId]) -> None:
        self.finish(self._computed(tokens))

    def follow(self, tokens: Sequence[TokenId]) -> LLMatcher | None:
        """Follow the drawn `tokens`. Returns what has to compute the next mask before `finish`, if anything has."""
        for token in tokens:
            self._follow(token)
        return None if self._is_free or self._matcher.is_stopped() else self._matcher

    def finish(self, computed: np.ndarray) -> None:
        """Make the next draw's mask of (words,) int32 that the matcher has `computed`, or of zeros. Overwrites and keeps it."""
        self.mask = self._made(computed)
        if self._matcher.is_error():
            _log.warning(
                "request %s ends early: its grammar has hit a limit: %s", self._key, self._matcher.get_error()
            )

    def behind(self, guesses: Sequence[TokenId]) -> list[Mask]:
        ahead = copy(self)
        ahead._matcher = self._matcher.deep_copy()  # one that has hit a limit cannot be rolled back
        masks: list[Mask] = []
        for token in guesses:
            if ahead.mask.is_complete or not _allows(ahead.mask.bits, token):
                break
            ahead.mask = ahead._made(ahead._computed((token,)))
            masks.append(ahead.mask)
        return masks

    def _computed(self, tokens: Sequence[TokenId]) -> np.ndarray:
        bits = np.zeros(self._num_words, np.int32)
        if (matcher := self.follow(tokens)) is not None:
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits

    def _follow(self, token: TokenId) -> None:
        grammar = self._grammar
        if self._is_free:
            self._is_free = token != grammar.think_end
        elif self._may_think and token == grammar.think_begin:
            self._is_free = True
        elif token not in self._stops:
            self._matcher.consume_token(token)
        self._may_think = False

    def _made(self, bits: np.ndarray) -> Mask:
        """Return the mask of the next draw. A stop token is allowed only where the output may end. A matcher that has hit one of
        its limits allows nothing else."""
        matcher = self._matcher
        if self._is_free:
            bits.fill(-1)
            _allow(bits, self._stops, False)
            return Mask(bits)
        is_complete = matcher.is_stopped() or matcher.is_error()
        if is_complete:
            bits.fill(0)
        _allow(bits, self._stops, is_complete or matcher.is_accepting())
        if self._may_think and self._grammar.think_begin is not None:
            _allow(bits, (self._grammar.think_begin,), True)
        run = matcher.compute_ff_tokens() if not is_complete and _is_single(bits) else ()
        return Mask(bits, is_complete, tuple(run))


def _allow(bits: np.ndarray, tokens: Sequence[TokenId], allowed: bool) -> None:
    words = bits.view(np.uint32)
    for token in tokens:
        bit = np.uint32(1 << (token % 32))
        words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit


def _allows(bits: np.ndarray, token: TokenId) -> bool:
    return bool(int(bits[token // 32]) >> (token % 32) & 1)


def _is_single(bits: np.ndarray) -> bool:
    """Return whether one token alone is allowed."""
    if np.count_nonzero(bits) != 1:
        return False
    words = bits[bits != 0]
    return (int(words[0]) & 0xFFFFFFFF).bit_count() == 1


def _vocabulary(folder: Path, vocab_size: int) -> LLTokenizer | ValueError:
    """Return the checkpoint's tokens, or why no grammar can be followed. The ingress refuses grammars then."""
    try:
        return load_vocabulary(folder, vocab_size)
    except (OSError, ValueError) as error:
        return ValueError(f"{folder}: its tokenizer cannot be constrained: {error}")


def load_vocabulary(folder: Path, vocab_size: int) -> LLTokenizer:
    """Return the checkpoint's tokens as bytes. Raises ValueError or OSError where llguidance cannot read its tokenizer.json."""
    return LLTokenizer(str(folder / "tokenizer.json"), n_vocab=vocab_size)

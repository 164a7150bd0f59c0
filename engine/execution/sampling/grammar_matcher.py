"""One sequence's grammar: which tokens may follow its output. llguidance stands behind the seam `Matchers`.

Invariant: a mask is a function of the grammar and the output tokens. So a sequence that was handed over or preempted gets the
same mask."""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from core.plan import NewSeq
from core.types import Grammar, TokenId
from kernels.cpu.pages import give_back_freed
from models.text.grammar_vocabulary import load_vocabulary

_MAX_COMPILED = 64
"""The number of compiled grammars kept for the next sequence that asks for the same one."""
_NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""The number of threads that make the masks of one step, which leave most processors to the model."""
_LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own limits on states, items and the work for one mask."""
_SHOWN_TOKENS = 12
"""The number of output tokens that say where a grammar has come to a dead end."""
_vocabularies: WeakValueDictionary[tuple[Path, int], "Future[LLTokenizer]"] = WeakValueDictionary()
_vocabularies_lock = Lock()


@dataclass(frozen=True, slots=True)
class Mask:
    """What one sample may give."""

    bits: np.ndarray
    """(words,) int32, as in `kernels.sampling.Masks`"""
    is_complete: bool = False
    """Whether the output can only end."""
    dead_end: str = ""
    """Why the output can neither go on nor be complete; empty where it can."""
    run: tuple[TokenId, ...] = ()
    """Tokens of which each is all that is allowed behind those before it: this sample gives the first one."""


class Matching(Protocol):
    """What a sequence may say next. One thread at a time calls it."""

    @property
    def mask(self) -> Mask:
        """The mask of the next sample."""
        ...

    def advance(self, tokens: Sequence[TokenId]) -> None:
        """Follow the sampled `tokens`. Returns when `mask` is that of the next sample."""
        ...

    def behind(self, drafts: Sequence[TokenId]) -> list[Mask]:
        """Return the masks of the samples behind each of `drafts`, up to the first one that cannot be sampled, or behind which is
        a dead end. Nothing changes."""
        ...


class Matchers(Protocol):
    """Several threads call it, each for other sequences."""

    def start(self, new: NewSeq, grammar: Grammar) -> Matching:
        """Return the matching of a sequence behind its output so far. May take seconds."""
        ...

    def advance(self, sampled: Sequence[tuple[Any, Sequence[TokenId]]]) -> None:
        """Follow what was sampled in each of some matchings that `start` gave, as `Matching.advance` does for one."""
        for matching, tokens in sampled:
            matching.advance(tokens)


class GuidanceMatchers(Matchers):
    """Matchers of llguidance. Keeps the grammars that were used last. Other threads of Python run on while masks are made."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`folder` is the checkpoint's, with its tokenizer; `vocab_size` is the width of the logits. Waits for nothing: the first
        `start` waits for the tokenizer."""
        self._num_words = (vocab_size + 31) // 32
        self._executor = LLExecutor(_NUM_THREADS)
        self._vocabulary = _vocabulary(folder, vocab_size)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def start(self, new: NewSeq, grammar: Grammar) -> "GuidanceMatching":
        matcher, decode = self._matcher(grammar.text), self._vocabulary.result().decode_str
        return GuidanceMatching(new, grammar, matcher, self._num_words, decode)

    def advance(self, sampled: Sequence[tuple["GuidanceMatching", Sequence[TokenId]]]) -> None:
        computed = [matching.follow(tokens) for matching, tokens in sampled]
        bits = np.zeros((len(sampled), self._num_words), np.int32)
        wanted = [(matcher, row) for row, matcher in enumerate(computed) if matcher is not None]
        if wanted:
            self._executor.unsafe_compute_mask_ptr(wanted, bits.ctypes.data, bits.strides[0], len(sampled))
        for (matching, _), of_row in zip(sampled, bits, strict=True):
            matching.finish(of_row)

    def _matcher(self, text: str) -> LLMatcher:
        vocabulary = self._vocabulary.result()
        with self._lock:
            compiled = self._compiled.get(text)
        if compiled is None:  # outside the lock: others need not wait for it
            compiled = LLMatcher(vocabulary, text, log_level=0, limits=_LIMITS)
        with self._lock:
            self._compiled[text] = compiled
            self._compiled.move_to_end(text)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()


class GuidanceMatching:
    def __init__(
        self,
        new: NewSeq,
        grammar: Grammar,
        matcher: LLMatcher,
        num_words: int,
        decode: Callable[[list[TokenId]], str],
    ) -> None:
        self._grammar, self._matcher, self._decode = grammar, matcher, decode
        self._stops = new.sampling.stop_token_ids
        self._is_free = grammar.think_end is not None and grammar.think_begin is None
        """True within the reasoning, which the grammar does not constrain."""
        self._may_think = grammar.think_begin is not None
        self._num_words = num_words
        self._num_tokens, self._last = 0, deque[TokenId](maxlen=_SHOWN_TOKENS)
        self.advance(new.tokens[new.num_prompt :])

    def advance(self, tokens: Sequence[TokenId]) -> None:
        self.finish(self._computed(tokens))

    def follow(self, tokens: Sequence[TokenId]) -> LLMatcher | None:
        """Follow the sampled `tokens`. Returns what has to compute the next mask before `finish`, if anything has."""
        for token in tokens:
            self._follow(token)
        self._num_tokens += len(tokens)
        self._last.extend(tokens)
        return None if self._is_free or self._matcher.is_stopped() else self._matcher

    def finish(self, computed: np.ndarray) -> None:
        """Make the next sample's mask of (words,) int32 that the matcher has `computed`, or of zeros. Overwrites and keeps it."""
        self.mask = self._made(computed)

    def behind(self, drafts: Sequence[TokenId]) -> list[Mask]:
        ahead = copy(self)
        ahead._matcher = self._matcher.deep_copy()  # one that has hit a limit cannot be rolled back
        ahead._last = self._last.copy()
        masks: list[Mask] = []
        for token in drafts:
            if ahead.mask.is_complete or not _allows(ahead.mask.bits, token):
                break
            ahead.mask = ahead._made(ahead._computed((token,)))
            if ahead.mask.dead_end:
                break
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
        """Return the mask of the next sample. A stop token is allowed only where the output may end, or can do nothing else."""
        matcher = self._matcher
        if self._is_free:
            bits.fill(-1)
            _allow(bits, self._stops, allowed=False)
            return Mask(bits)
        is_over = matcher.is_stopped() or matcher.is_error()
        if is_over:
            bits.fill(0)
        _allow(bits, self._stops, allowed=False)
        if self._may_think and self._grammar.think_begin is not None:
            _allow(bits, (self._grammar.think_begin,), allowed=True)
        may_end = matcher.is_accepting()
        dead_end = "" if may_end or bits.any() else self._dead_end()
        _allow(bits, self._stops, allowed=may_end or bool(dead_end))
        run = matcher.compute_ff_tokens() if not is_over and _is_single(bits) else ()
        return Mask(bits, is_over or bool(dead_end), dead_end, tuple(run))

    def _dead_end(self) -> str:
        why = self._matcher.get_error().partition("\n")[0] or "no token of this model goes on with it"
        where = f"after {self._num_tokens} tokens of output"
        if self._last:
            where += f", the last of which are {self._decode([*self._last])!r}"
        return f"the grammar has come to a dead end {where}: {why}"


def _allow(bits: np.ndarray, tokens: Sequence[TokenId], *, allowed: bool) -> None:
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


def _vocabulary(folder: Path, vocab_size: int) -> "Future[LLTokenizer]":
    """Return this process's vocabulary of a checkpoint. A thread of its own reads it, unless one has, or does. The future raises
    ValueError for a tokenizer that cannot be constrained; the ingress refuses grammars then."""
    key = folder.resolve(), vocab_size
    with _vocabularies_lock:
        found = _vocabularies.get(key)
        if found is None:
            found = _vocabularies[key] = Future[LLTokenizer]()
            Thread(target=_read, args=(*key, found), name="grammar-vocabulary", daemon=True).start()
    return found


def _read(folder: Path, vocab_size: int, read: "Future[LLTokenizer]") -> None:
    try:
        read.set_result(load_vocabulary(folder, vocab_size))
    except BaseException as error:
        read.set_exception(error)
    give_back_freed()

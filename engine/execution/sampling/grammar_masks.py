"""Which tokens the grammars of a rank's sequences allow next. Threads work it out while the model computes.

Sampled tokens go to a thread at once, and the next sample takes the mask that the thread has made of them. A sample whose mask is
not made yet is put off: the step goes on without it, and a listener hears when the mask is made. Draft tokens behind which no
mask is made yet are not verified.

Masks that are quick are made together, since every switch between threads of Python costs the thread that computes the step. A
mask that takes long holds up neither a step nor the masks of others: where masks that were made together took long, each of their
sequences has its next mask made alone, and its processor time says whether it goes on so."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from core.plan import StepPlan
from core.ports import OnReady
from core.types import TokenId
from engine.execution.sampling.grammar_matcher import Mask, Matchers, Matching

GRACE_S = 0.001
"""Putting a sample off costs more than to wait for so long: a token is computed again."""
_SLOW_S = 0.002
"""The processor time of a mask from which on its sequence counts as slow; also what one of those made together may take."""
_NUM_QUICK = 2
"""The number of threads that make masks of sequences that are not slow: one may meet what turns out to be slow."""
_EACH_S = 0.0002
"""The time that each of the masks made together may take in the mean. llguidance says of its own: 0.05 ms."""
_LARGE_BYTES = 16 << 10
"""The size from which on a grammar may take long to compile."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of those rows of a batch that have a grammar."""

    rows: list[int]
    bits: np.ndarray
    """(len(rows), words) int32, as in `kernels.sampling.Masks`"""
    complete: frozenset[int]
    """The rows whose output can only end."""
    runs: dict[int, tuple[TokenId, ...]]
    """What must come next, by row, where a row can sample one token alone."""
    dead_ends: dict[int, str]
    """Why rows can neither go on nor be complete."""

    def run_behind(self, row: int, token: TokenId) -> tuple[TokenId, ...]:
        """Return what must follow `token`, if the row has sampled it."""
        run = self.runs.get(row, ())
        return run[1:] if run and run[0] == token else ()


class _Pace(Enum):
    """How long a sequence's masks take, as far as is known."""

    QUICK = "made together with others"
    UNKNOWN = "made alone, once"
    SLOW = "made alone from now on, by a thread for such"


@dataclass(frozen=True, slots=True)
class _Made:
    matching: Matching
    pace: _Pace


@dataclass(frozen=True, slots=True)
class _Advance:
    """What a sequence has sampled, and who waits for the mask behind it."""

    matching: Matching
    tokens: Sequence[TokenId]
    made: Future[_Made]


@dataclass(frozen=True, slots=True)
class _NextMask:
    made: Future[_Made]
    num_tokens: int
    """The number of the sequence's tokens before the one that this mask is for."""
    is_slow: bool = False
    """Whether an earlier mask of the sequence took long."""
    behind: Future[list[Mask]] | None = None
    """The masks behind the draft tokens that the step verifies, if it has any."""

    def all(self) -> list[Mask]:
        """Return the masks of the rows that can be sampled: waits for the first one, not for those behind draft tokens."""
        first = self.made.result().matching.mask
        return [first, *(self.behind.result() if self.behind is not None and self.behind.done() else ())]


class GrammarMasks:
    """One rank's grammars. Call `begin` before a step's forward pass, `late` and `masks` at its sample and `sampled` behind it.
    One thread calls them all."""

    def __init__(self, matchers: Matchers, *, puts_off: bool = True, grace_s: float = GRACE_S) -> None:
        """`puts_off`: whether samples may be. Otherwise they wait for their masks: what a recurrent state has been told once
        cannot be computed again. `grace_s`: how long a sample waits for masks of sequences that are mostly quick."""
        self._matchers, self._puts_off, self._grace_s = matchers, puts_off, grace_s
        # What is slow has threads of its own.
        self._starting = {is_large: ThreadPoolExecutor(1, "grammar-start") for is_large in (False, True)}
        self._advancing = {
            False: ThreadPoolExecutor(_NUM_QUICK, "grammar"),
            True: ThreadPoolExecutor(1, "grammar"),
        }
        self._sequences: dict[str, _NextMask] = {}
        self._hear: OnReady = lambda key, num_tokens: None

    def on_ready(self, hear: OnReady) -> None:
        """`hear` is called, on any thread, for each sequence that `late` has named, when its mask is made."""
        self._hear = hear

    def begin(self, plan: StepPlan) -> None:
        """Take note of the sequences that have left and come, and of the draft tokens of those that are here."""
        for key in plan.drop:
            self._sequences.pop(key, None)
        for new in plan.new:
            if (grammar := new.sampling.grammar) is not None:
                thread = self._starting[len(grammar.text) > _LARGE_BYTES]
                made = thread.submit(_started, partial(self._matchers.start, new, grammar))
                self._sequences[new.key] = _NextMask(made, len(new.tokens))
        for item in plan.work:
            if item.drafts and (mask := self._sequences.get(item.key)) is not None:
                behind = self._after(
                    mask.made, partial(_behind, mask.made, item.drafts), is_slow=mask.is_slow
                )
                self._sequences[item.key] = replace(mask, behind=behind)

    def late(self, keys: Iterable[str]) -> frozenset[str]:
        """Return those of these sequences whose next mask is not made yet. The listener of `on_ready` will hear of each."""
        asked = {key: mask for key in keys if (mask := self._sequences.get(key)) is not None}
        if not self._puts_off:
            wait([mask.made for mask in asked.values()])
        quick = [mask for mask in asked.values() if not mask.is_slow]
        awaited: list[Future[Any]] = [mask.made for mask in quick]
        awaited += [mask.behind for mask in quick if mask.behind is not None]
        wait(awaited, self._grace_s)
        late = {key: mask for key, mask in asked.items() if not mask.made.done()}
        for key, mask in late.items():
            mask.made.add_done_callback(partial(self._tell, key, mask.num_tokens))
        return frozenset(late)

    def num_rows(self, key: str) -> int | None:
        """Return how many rows of a sequence that is not late have a mask: one, and one for each draft token that could be right
        as far as is known. None where it has no grammar."""
        return len(mask.all()) if (mask := self._sequences.get(key)) is not None else None

    def masks(self, keys: Sequence[str]) -> RowMasks | None:
        """Return the masks for this batch; None where no sequence has a grammar. The rows of one sequence stand together: its
        sample and those behind its draft tokens, at most `num_rows` of them. Waits for masks that are late."""
        found: dict[int, Mask] = {}
        for key, rows in groupby(range(len(keys)), keys.__getitem__):
            if (mask := self._sequences.get(key)) is not None:
                found |= zip(rows, mask.all(), strict=False)
        if not found:
            return None
        return RowMasks(
            list(found),
            np.stack([mask.bits for mask in found.values()]),
            frozenset(row for row, mask in found.items() if mask.is_complete),
            {row: mask.run for row, mask in found.items() if mask.run},
            {row: mask.dead_end for row, mask in found.items() if mask.dead_end},
        )

    def sampled(self, tokens_of: Mapping[str, Sequence[TokenId]]) -> None:
        """Advance the matchers of the sequences that have sampled tokens: those of quick ones together, so that a step hands over
        one task and not one for each sequence."""
        together: list[_Advance] = []
        for key, tokens in tokens_of.items():
            if (mask := self._sequences.get(key)) is None:
                continue
            made, before = mask.made.result(), mask.behind or mask.made
            is_slow = made.pace is _Pace.SLOW
            if made.pace is _Pace.QUICK and before.done():
                advanced = Future[_Made]()
                together.append(_Advance(made.matching, tokens, advanced))
            else:
                advanced = self._after(before, partial(_advanced, made, tokens), is_slow=is_slow)
            self._sequences[key] = _NextMask(advanced, mask.num_tokens + len(tokens), is_slow)
        if together:
            self._advancing[False].submit(self._advance, together)

    def _advance(self, together: Sequence[_Advance]) -> None:
        started = time.monotonic()
        try:
            self._matchers.advance([(one.matching, one.tokens) for one in together])
        except BaseException as error:
            for one in together:
                one.made.set_exception(error)
            return
        is_quick = time.monotonic() - started < _SLOW_S + _EACH_S * len(together)
        for one in together:
            one.made.set_result(_Made(one.matching, _Pace.QUICK if is_quick else _Pace.UNKNOWN))

    def _after(self, before: Future[Any], task: Callable[[], _T], *, is_slow: bool) -> Future[_T]:
        """Give `task` to a thread when `before` is done, so that no thread waits for another one."""
        out: Future[_T] = Future()
        before.add_done_callback(lambda _: self._advancing[is_slow].submit(_fulfil, out, task))
        return out

    def _tell(self, key: str, num_tokens: int, _: "Future[_Made]") -> None:
        self._hear(key, num_tokens)


def tell_on_loop(hear: OnReady) -> OnReady:
    """Return what lets the running event loop call `hear`, for any thread."""
    loop = asyncio.get_running_loop()

    def tell(key: str, num_tokens: int) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
            loop.call_soon_threadsafe(hear, key, num_tokens)

    return tell


def _started(start: Callable[[], Matching]) -> _Made:
    return _Made(start(), _Pace.UNKNOWN)  # the time includes the compilation of its grammar


def _advanced(made: _Made, tokens: Sequence[TokenId]) -> _Made:
    """Advance the matching of one sequence alone. One that was slow stays so."""
    started = time.thread_time()
    made.matching.advance(tokens)
    is_slow = made.pace is _Pace.SLOW or time.thread_time() - started > _SLOW_S
    return _Made(made.matching, _Pace.SLOW if is_slow else _Pace.QUICK)


def _behind(made: Future[_Made], drafts: Sequence[TokenId]) -> list[Mask]:
    return made.result().matching.behind(drafts)


def _fulfil(out: Future[_T], task: Callable[[], _T]) -> None:
    try:
        out.set_result(task())
    except BaseException as error:
        out.set_exception(error)

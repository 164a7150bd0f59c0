"""How a rank executes what its instance says: one word after the other, or with a step launched behind the one that computes.

All ranks of an instance execute the same words in the same order. Where they meet in a launch, they do so in that order, whatever
each of them knows of earlier steps by then; where they meet over what a step has sampled, nothing is launched behind that step
before (`LaunchedStep.ends_first`)."""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from core.plan import StepPlan, StepResult
from device.poller import Poller
from engine.execution.launched_steps import LaunchedSteps, Launcher
from engine.execution.runner import LaunchedStep
from engine.ranks.rank_messages import Relocate

Word = StepPlan | Relocate
"""A rank's share of a plan, or experts that move."""
Answer = Callable[[StepResult], None]
"""Raises OSError where the instance has ended."""
Move = Callable[[Relocate], None]


class RankSteps(Protocol):
    """For one thread, which computes."""

    def serve(self, words: Iterable[Word], move: Move, answer: Answer) -> None:
        """Execute all `words`, and answer each plan, in their order. Raises what a step, an answer or the words raise."""
        ...


class StepsInTurn:
    """Takes the next word when the one before it is done."""

    def __init__(self, step: Callable[[StepPlan], StepResult]) -> None:
        self._step = step

    def serve(self, words: Iterable[Word], move: Move, answer: Answer) -> None:
        for word in words:
            if isinstance(word, Relocate):
                move(word)
            else:
                answer(self._step(word))


class StepsAhead:
    """Takes words on a thread of its own, and launches each step while the one before it may still compute."""

    def __init__(
        self, launcher: Launcher, finish: Callable[[LaunchedStep], StepResult], poller: Poller
    ) -> None:
        """`finish` is the launcher's."""
        self._to_do = SimpleQueue[Callable[[], None] | None]()
        self._steps = LaunchedSteps(launcher, finish, poller, lambda: self._to_do.put(self._steps.take))

    def serve(self, words: Iterable[Word], move: Move, answer: Answer) -> None:
        threading.Thread(target=self._read, args=(words, move, answer), name="words", daemon=True).start()
        while (do := self._to_do.get()) is not None:
            do()
        self._steps.close()

    def _read(self, words: Iterable[Word], move: Move, answer: Answer) -> None:
        say = partial(_say, answer)
        try:
            for word in words:
                if isinstance(word, Relocate):
                    self._to_do.put(partial(move, word))
                else:
                    self._to_do.put(partial(self._steps.execute, word, say))
        except Exception as error:
            self._to_do.put(partial(_raise, error))
        self._to_do.put(None)


def _say(answer: Answer, what: StepResult | BaseException) -> None:
    if isinstance(what, BaseException):
        raise what
    answer(what)


def _raise(error: Exception) -> None:
    raise error

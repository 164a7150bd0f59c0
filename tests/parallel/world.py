"""A few processes that stand ready to be ranks; starting them once serves many tests."""

import itertools
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import FORKED

DEADLINE_S = 100.0
_LAST_WORDS_S = 2.0
"""How long the others may still say what they know when one has failed."""


class World:
    """`run(work, *args)` calls `work(rank, store, *args)` in the first so many processes; `work` is a module's function."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-test-")
        self._numbers = itertools.count()
        self._ranks = [_Rank(rank) for rank in range(size)]

    def run(self, size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what each rank returned. Raises AssertionError, which says why each of them failed. One that does not answer may
        wait for ever for what another one was to do, and is replaced."""
        store = str(Path(self._folder.name) / f"store-{next(self._numbers)}")
        for rank in self._ranks[:size]:
            rank.pipe.send((work, store, args))
        answers = self._answers(size)
        errors = [f"rank {number}: {value}" for number, (good, value) in answers.items() if not good]
        for number, rank in enumerate(self._ranks[:size]):
            if number not in answers:
                errors.append(f"rank {number} has not answered")
            if number not in answers or rank.pipe.closed:
                rank.end()
                self._ranks[number] = _Rank(number)
        assert not errors, "\n".join(errors)
        return [answers[number][1] for number in range(size)]

    def _answers(self, size: int) -> dict[int, tuple[bool, Any]]:
        """Return whether each answer is good, and the value or the error, in the order in which they came."""
        waiting = {rank.pipe: number for number, rank in enumerate(self._ranks[:size])}
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + DEADLINE_S
        while waiting and (ready := wait(list(waiting), deadline - time.monotonic())):
            for pipe in ready:
                answer = answers[waiting.pop(pipe)] = _received(pipe)
                if not answer[0]:
                    deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
        return answers

    def close(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._folder.cleanup()


class _Rank:
    def __init__(self, number: int) -> None:
        self.pipe, theirs = FORKED.Pipe()
        self._process = FORKED.Process(target=_serve, args=(number, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def end(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join()


def _received(pipe: Any) -> tuple[bool, Any]:
    """Read an answer. The pipe of a process that has ended is closed."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        pipe.close()
        return False, "its process has ended"


def _serve(rank: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            work, store, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, work(rank, dist.FileStore(store), *args))
        except BaseException:  # pytest's own failures are no Exceptions
            answer = (False, traceback.format_exc())
        pipe.send(answer)

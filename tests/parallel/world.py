"""A few processes that stand ready to be ranks; starting them once serves many tests."""

import itertools
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import FORKED

DEADLINE_S = 100.0


class World:
    """`run(work, *args)` calls `work(rank, store, *args)` in the first so many processes; `work` is a module's function."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-test-")
        self._numbers = itertools.count()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = FORKED.Pipe()
            process = FORKED.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned; an exception in any of them is raised here."""
        store = str(Path(self._folder.name) / f"store-{next(self._numbers)}")
        for pipe in self.pipes[:size]:
            pipe.send((work, store, args))
        answers = []
        for rank, pipe in enumerate(self.pipes[:size]):
            assert pipe.poll(DEADLINE_S), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        for rank, (good, value) in enumerate(answers):
            assert good, f"rank {rank}: {value}"
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            work, store, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, work(rank, dist.FileStore(store), *args))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)

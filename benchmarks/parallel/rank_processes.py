"""Processes that measure together, each as one rank."""

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch


def on_ranks(work: Callable[[int, str], Any], num_ranks: int) -> list[Any]:
    """What `work(rank, path)` returns in each; `path` is that of a file store to meet at."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(num_ranks)]
        processes = [
            context.Process(target=_in_process, args=(work, rank, f"{folder}/store", pipes[rank][1]))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        answers = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
    return answers


def _in_process(work: Callable[[int, str], Any], rank: int, path: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.send(work(rank, path))

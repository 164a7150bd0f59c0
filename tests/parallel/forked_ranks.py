"""Ranks for many servers in a row: forked from a process that has loaded torch and the models' code once.

From its first word on such a rank is what a child of an instance is (`engine/ranks/rank_process.py`)."""

import multiprocessing
import os
import socket
from collections.abc import Sequence

from engine.ranks.rank import Rank, rank_name
from engine.ranks.rank_messages import RankSetup
from engine.ranks.rank_process import serve_instance

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["engine.ranks.rank_process"])


class ForkedRank:
    def __init__(self, setup: RankSetup) -> None:
        self.name = rank_name(setup)
        self.sock, theirs = socket.socketpair()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def obituary(self) -> str:
        self._process.join(3.0)
        return f"{self.name} ended with exit code {self._process.exitcode}"

    def end(self, patience_s: float = 0.0) -> None:
        self._process.join(patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.sock.close()


def start_forked(setups: Sequence[RankSetup], deadline_s: float) -> list[Rank]:
    """engine.ranks.rank.Start."""
    return [ForkedRank(setup) for setup in setups]


def _serve(sock: socket.socket) -> None:
    os._exit(serve_instance(sock))

"""Ranks for many servers in a row, forked: starting a rank as an instance does takes it several seconds of a processor.

From its first word on such a rank is what a child of an instance is (`engine/ranks/rank_process.py`)."""

import os
import signal
import socket
from collections.abc import Sequence

import psutil

from engine.ranks.rank import Rank, rank_name
from engine.ranks.rank_messages import RankSetup
from engine.ranks.rank_process import serve_instance
from tests.forked import FORKED
from tests.patience import PATIENCE_S


class ForkedRank:
    def __init__(self, setup: RankSetup) -> None:
        self.name = rank_name(setup)
        self.sock, theirs = socket.socketpair()
        self._process = FORKED.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        _started.append(self)

    @property
    def pid(self) -> int:
        """0 where it has ended."""
        return self._process.pid or 0 if self._process.is_alive() else 0

    def obituary(self) -> str:
        self._process.join(PATIENCE_S)
        code = self._process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with {code}"
        return f"{self.name} {how}"

    def end(self, patience_s: float = 0.0) -> None:
        self._process.join(patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.sock.close()
        if self in _started:
            _started.remove(self)


_started: list[ForkedRank] = []


def start_forked(setups: Sequence[RankSetup], deadline_s: float) -> list[Rank]:
    """engine.ranks.rank.Start."""
    return [ForkedRank(setup) for setup in setups]


def forked_ranks() -> list[psutil.Process]:
    """Return the living ones in the order in which they were started."""
    return [psutil.Process(rank.pid) for rank in _started if rank.pid]


def _serve(sock: socket.socket) -> None:
    os._exit(serve_instance(sock))

"""The seam between an instance and what starts its ranks: child processes on this host, or Ray actors.

However a rank came to be, the instance speaks with it over one connected socket, and its end is the socket's end."""

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.cost.memory_model import DeviceMemory
from core.errors import ConfigError, ReplicaLost
from engine.ranks.rank_messages import FROM_RANK, RankFailed, RankSetup, Ready, frame, read_frame


class Rank(Protocol):
    """One rank's process, as its instance sees it."""

    name: str
    sock: socket.socket

    def obituary(self) -> str:
        """Return how it ended, or that it had to be ended, and its last words where there are any."""
        ...

    def end(self, patience_s: float = 0.0) -> None:
        """Wait until it has ended by itself, and kill it after `patience_s`."""
        ...


class Companion(Protocol):
    """A process beside the ranks without which they are of no use."""

    async def lost(self) -> Exception:
        """Wait until it has ended, or does not do its part any more."""
        ...


Start = Callable[[Sequence[RankSetup], float], list[Rank]]
"""(setups, deadline in seconds) -> all ranks, each waiting for its setup. Starts all or none, and blocks. Raises ConfigError and
ReplicaLost."""


@dataclass(frozen=True, slots=True)
class Spawner:
    """Starts an instance's ranks, and knows what they will compute on."""

    start: Start
    devices: tuple[str, ...]
    """Each rank's device, under the name that the rank itself gives it."""
    memory: tuple[DeviceMemory, ...]
    """The memory of each device."""
    memories: tuple[int, ...] = ()
    """The number of the host of each rank within the instance. 0 is the instance's own, and () means that all ranks are there."""
    addresses: tuple[str, ...] = ("127.0.0.1",)
    """Where ranks on each of the hosts are reached by the others."""
    encrypts: bool = True
    """Whether ranks on several hosts find each other through TLS."""

    @property
    def num_far(self) -> int:
        """The number of hosts beside the instance's own."""
        return max(self.memories, default=0)

    def address_of(self, rank: int) -> str:
        """Return where the other ranks reach this one."""
        return self.addresses[self.memories[rank] if self.memories else 0]


def rank_name(setup: RankSetup) -> str:
    return f"rank {setup.rank} of {setup.mesh.size} ({setup.mesh.place(setup.rank)})"


def start_all(start: Start, setups: Sequence[RankSetup], deadline_s: float) -> tuple[list[Rank], list[Ready]]:
    """Start all ranks, or none. Blocks until they are ready. Raises ConfigError and ReplicaLost."""
    deadline = time.monotonic() + deadline_s
    ranks = start(setups, deadline_s)
    try:
        for rank, setup in zip(ranks, setups, strict=True):
            rank.sock.sendall(frame(setup))
        return ranks, _all_ready(ranks, deadline, deadline_s)
    except BaseException:
        for rank in ranks:
            rank.end()
        raise


def _all_ready(ranks: Sequence[Rank], deadline: float, deadline_s: float) -> list[Ready]:
    """Wait until all ranks are ready. The first failure ends the waiting."""
    ready: dict[int, Ready] = {}
    with selectors.DefaultSelector() as selector:
        for number, rank in enumerate(ranks):
            selector.register(rank.sock, selectors.EVENT_READ, number)
        while len(ready) < len(ranks):
            found = selector.select(max(0.0, deadline - time.monotonic()))
            if not found:
                late = ", ".join(rank.name for number, rank in enumerate(ranks) if number not in ready)
                raise ReplicaLost(f"{late}: not ready after {deadline_s:.0f} s")
            for key, _ in found:
                ready[key.data] = _read_ready(ranks[key.data])
                selector.unregister(key.fileobj)
    return [ready[number] for number in range(len(ranks))]


def _read_ready(rank: Rank) -> Ready:
    """Read a rank's first message, which has begun to arrive. Raises ConfigError for what it cannot do, ReplicaLost if it
    ended."""
    try:
        answer = read_frame(rank.sock, FROM_RANK)
    except OSError:
        answer = None
    match answer:
        case Ready():
            return answer
        case RankFailed(reason):
            raise ConfigError(f"{rank.name} did not start: {reason}")
        case _:
            raise ReplicaLost(rank.obituary())

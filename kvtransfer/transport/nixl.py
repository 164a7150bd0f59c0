"""NIXL (UCX): RDMA, NVLink or CUDA IPC where the hardware has them; cross-memory attach or TCP for host memory.

The holder reads from the writer's registered memory (`kvtransfer/transport/pull.py` says why not the other way round: UCX may
carry a write by means that deregistration does not revoke). A read whose writer is gone ends in an error, or is ended by
disconnecting; until it has ended, by NIXL's own word, the fence does not return.

Needs the packages `nixl-cu12` or `nixl-cu13` (extra `nixl`); `load` refuses by name without them."""

import contextlib
import importlib
import importlib.util
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from core.errors import ConfigError, TransferError
from kvtransfer.copies import CopyRun
from kvtransfer.transport.pull import SCRATCH_BYTES, Exchange

_BUILDS = ("nixl_cu13", "nixl_cu12")
_POLL_S = 50e-6
"""The time between two questions whether a transfer has ended, since NIXL has no way to wait for it."""


@dataclass(frozen=True, slots=True)
class RegisteredMemory:
    """A pool by address. `device` is a GPU's number, or -1 for host memory, which `view` then shows."""

    address: int
    num_bytes: int
    device: int = -1
    view: memoryview | None = None

    @classmethod
    def of(cls, view: memoryview) -> "RegisteredMemory":
        return cls(np.frombuffer(view, np.uint8).ctypes.data, len(view), -1, view)


def available() -> bool:
    return any(importlib.util.find_spec(name) for name in _BUILDS)


def load() -> Any:
    """Load NIXL's Python API, without the CUDA detection of its meta package (which imports torch). Raises ConfigError."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in _BUILDS:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{name}._api")
    raise ConfigError(
        "transfer.transport nixl needs NIXL: pip install nixl-cu12 --no-deps (or nixl-cu13), or use auto, shm or tcp"
    )


class NixlMedium:
    name = "nixl"
    host = ""
    needs_go = False

    def __init__(self, memory: RegisteredMemory, before: Callable[[], None] = lambda: None) -> None:
        """`before` is called, on a thread, before each read into the pool.

        Register the pool. Raises ConfigError without NIXL, TransferError when it cannot register."""
        api = load()
        self.memory, self.num_bytes = memory.view, memory.num_bytes
        self.pool, self.before = memory, before
        self._scratch = np.zeros(SCRATCH_BYTES, np.uint8)
        try:
            # Its progress thread would keep a core busy for ever: both sides make progress while something is on its way.
            config = api.nixl_agent_config(
                enable_prog_thread=False,
                backends=["UCX"],
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            self.agent = api.nixl_agent(f"baton-{os.getpid()}-{uuid.uuid4().hex[:12]}", config)
            self.kind = "DRAM" if memory.device < 0 else "VRAM"
            pool = (memory.address, memory.num_bytes, max(0, memory.device), "")
            scratch = (self._scratch.ctypes.data, SCRATCH_BYTES, 0, "")
            self._registered = [
                self.agent.register_memory([pool], self.kind),
                self.agent.register_memory([scratch], "DRAM"),
            ]
        except Exception as error:
            raise TransferError(f"NIXL cannot use the KV pool: {error}") from error

    def local(self, runs: Sequence[CopyRun], *, scratch: bool) -> Any:
        base, kind, device = (
            (self._scratch.ctypes.data, "DRAM", 0)
            if scratch
            else (self.pool.address, self.kind, max(0, self.pool.device))
        )
        return self._descriptors([(base + run.destination, run.num_bytes, device) for run in runs], kind)

    def remote(self, runs: Sequence[CopyRun], base: int, device: int) -> Any:
        kind = "DRAM" if device < 0 else "VRAM"
        return self._descriptors([(base + run.source, run.num_bytes, max(0, device)) for run in runs], kind)

    def take(self, exchange: Exchange) -> "_NixlIntake":
        offer: Any = msgpack.unpackb(exchange.recv())
        metadata, base, num_bytes, device = offer
        try:
            peer = self.agent.add_remote_agent(metadata)
            peer = peer.decode() if isinstance(peer, bytes) else peer
        except Exception as error:
            exchange.send(b"")
            raise TransferError(f"NIXL cannot connect: {error}") from error
        exchange.send(b"ready")
        return _NixlIntake(self, peer, base, num_bytes, device)

    def give(self, exchange: Exchange) -> "_NixlOutlet":
        offer = [self.agent.get_agent_metadata(), self.pool.address, self.pool.num_bytes, self.pool.device]
        exchange.send(msgpack.packb(offer))  # type: ignore[arg-type]
        if exchange.recv() != b"ready":
            raise TransferError("the holder cannot connect to this process by NIXL")
        return _NixlOutlet(self)

    def close(self) -> None:
        for registered in self._registered:
            self.agent.deregister_memory(registered)
        self._registered = []

    def _descriptors(self, rows: list[tuple[int, int, int]], kind: str) -> Any:
        return self.agent.get_xfer_descs(np.array(rows, dtype=np.uint64), kind)


class _NixlOutlet:
    def __init__(self, medium: NixlMedium) -> None:
        self._medium = medium

    def supply(self, runs: Sequence[CopyRun], answered: threading.Event) -> None:
        """Serve the holder's reads where UCX has only TCP. Otherwise the holder reads by itself."""
        while not answered.wait(_POLL_S):
            self._medium.agent.get_new_notifs()

    def close(self) -> None:
        """Do nothing: no state is kept for a holder."""


class _NixlIntake:
    def __init__(self, medium: NixlMedium, peer: str, base: int, num_bytes: int, device: int) -> None:
        self._medium, self._peer, self._base, self._num_bytes = medium, peer, base, num_bytes
        self._device = device
        self._lock = threading.Lock()
        """Held by a fetch from its first to its last touch of the pool."""
        self._aborted = False
        self._known = True

    def fetch(self, runs: Sequence[CopyRun], *, scratch: bool) -> None:
        if any(run.source + run.num_bytes > self._num_bytes for run in runs):
            raise TransferError("a run outside of the writer's pool")
        with self._lock:
            if self._aborted:
                raise TransferError("the writer was cut off")
            agent = self._medium.agent
            handle = None
            try:
                if not scratch:
                    self._medium.before()
                local = self._medium.local(runs, scratch=scratch)
                remote = self._medium.remote(runs, self._base, self._device)
                handle = agent.initialize_xfer("READ", local, remote, self._peer)
                self._finish(agent, handle, agent.transfer(handle))
            except TransferError:
                raise
            except Exception as error:
                raise TransferError(f"NIXL: {type(error).__name__}: {error}") from error
            finally:
                if handle is not None:
                    with contextlib.suppress(Exception):  # it has ended already: only its memory is left
                        agent.release_xfer_handle(handle)

    def abort(self) -> None:
        self._aborted = True
        with self._lock:  # waits for a fetch under way, which sees `_aborted` and ends
            self._disconnect()

    def close(self) -> None:
        self.abort()

    def _finish(self, agent: Any, handle: Any, state: str) -> None:
        """Wait until the read has ended, which alone makes the pool safe. Raises TransferError."""
        while state == "PROC":
            if self._aborted:
                self._disconnect()
            time.sleep(_POLL_S)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferError(f"the read from {self._peer} failed")

    def _disconnect(self) -> None:
        if self._known:
            self._known = False
            with contextlib.suppress(Exception):  # it may have left by itself
                self._medium.agent.remove_remote_agent(self._peer)

"""What one process of a chaos cluster does wrong when it is told to."""

import asyncio
import ctypes
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgpack

from core.messages import RegionKey
from kvtransfer.copies import CopyRun
from kvtransfer.transport import pull, tcp
from kvtransfer.transport.base import Sender
from tests.net.faulty import Fate

_DATA_HEAD_BYTES = 17
_FOR_EVER_S = 1_000_000


def tell(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class Faults:
    """What this process shall do wrong."""

    def __init__(self) -> None:
        self.traps: set[str] = set()
        self.fates: dict[str, Fate] = {}
        self.corrupt = 0
        self.write_s = 0.0
        self.hang: Literal["", "step", "interpreter"] = ""
        self.is_hung = False

    def step_begins(self) -> None:
        """Hang, on the compute thread, if that was asked for."""
        if self.hang:
            self.is_hung = True
            sleep = time.sleep if self.hang == "step" else ctypes.PyDLL(None).sleep
            sleep(_FOR_EVER_S)

    def fate(self, frame: bytes) -> Fate:
        if frame[0] != 1 or not self.fates:
            return "pass"
        kind = msgpack.unpackb(frame[_DATA_HEAD_BYTES:])[0]
        fate = self.fates.pop(kind, "pass")
        if fate != "pass":
            tell(event="fated", message=kind, kind=fate)
        return fate

    def entered(self, side: str, state: str) -> None:
        name = f"{side}.{state}"
        if name in self.traps:
            self.traps.remove(name)
            tell(event="trapped", state=name)
            os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = Faults()


def watch(side: str, kind: Any) -> None:
    """Have FAULTS told of every state that a hand-over of this kind enters."""
    plain_on, plain_init = kind.on, kind.__init__

    def on(self: Any, fact: Any) -> Any:
        before = self.state
        action = plain_on(self, fact)
        if self.state is not before:
            FAULTS.entered(side, self.state.name)
        return action

    def init(self: Any) -> None:
        plain_init(self)
        FAULTS.entered(side, self.state.name)

    kind.on, kind.__init__ = on, init


def wrong_checksums() -> None:
    right = tcp.source_crc

    def source_crc(source: memoryview, runs: Sequence[CopyRun]) -> int:
        if not FAULTS.corrupt:
            return right(source, runs)
        FAULTS.corrupt -= 1
        return right(source, runs) ^ 1

    tcp.source_crc = pull.source_crc = source_crc


def no_space(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


_TIME = time.time


def step_clock(offset_s: float) -> None:
    """Have the wall clock of this process be so far off. A host's other clock, which counts from its start, never jumps."""
    time.time = lambda: _TIME() + offset_s


class SlowSender:
    def __init__(self, inner: Sender) -> None:
        self._inner = inner

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        if FAULTS.write_s:
            await asyncio.sleep(FAULTS.write_s)
        await self._inner.write(grant_id, region, runs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

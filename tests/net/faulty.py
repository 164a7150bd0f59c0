"""A connection that treats mail frames badly, as a test says: under the numbering, so that it must be made good."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

from net.channel import Channel
from net.session import Session

Fate = Literal["pass", "drop", "double", "delay", "swap", "cut"]
_HELLO_KIND = Session(bytes(16)).hello()[0]


class FaultyChannel:
    """Asks `fate(frame)` about every frame that is sent, but hellos. A swapped frame goes behind the next one."""

    def __init__(self, inner: Channel, fate: Callable[[bytes], Fate], delay_s: float = 0.05) -> None:
        self.inner, self.peer = inner, inner.peer
        self._fate, self._delay_s = fate, delay_s
        self._swapped: list[bytes] = []

    async def send_many(self, headers: Sequence[bytes]) -> None:
        for frame in headers:
            fate = "pass" if frame[0] == _HELLO_KIND else self._fate(frame)
            match fate:
                case "drop":
                    continue
                case "swap":
                    self._swapped.append(frame)
                    continue
                case "delay":
                    await asyncio.sleep(self._delay_s)
                case "cut":
                    self.inner.close()
                case _:
                    pass
            copies = [frame, frame] if fate == "double" else [frame]
            swapped, self._swapped = self._swapped, []
            await self.inner.send_many([*copies, *swapped])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

"""Questions to other processes, by mail. Each has a number, which its answer repeats."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from core.errors import ReplicaLost
from core.messages import (
    AdapterChanged,
    CacheDropped,
    Message,
    SessionHinted,
    SharesGranted,
)
from core.ports import Mail
from core.reports import Status
from core.sleep_messages import SleepAnswer
from core.stream_messages import StreamFound

_TIMEOUT_S = 2.0


class Questions:
    def __init__(self, mail: Mail) -> None:
        self._mail = mail
        self._nonces = itertools.count()
        self._open: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        """By number, who is asked."""

    async def ask(
        self, address: str, question: Callable[[int], Message], whom: str, timeout_s: float = _TIMEOUT_S
    ) -> Any:
        """Ask the process at `address`, and return its answer. `question` makes the message from its number. `whom` says in words
        who that is. Raises ReplicaLost when it is lost, or none comes in time."""
        nonce, answer = next(self._nonces), asyncio.get_running_loop().create_future()
        self._open[nonce] = address, answer
        self._mail.send(address, question(nonce))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise ReplicaLost(f"{whom} did not answer within {timeout_s:g} s") from None
        finally:
            del self._open[nonce]

    def answered(
        self,
        answer: Status
        | CacheDropped
        | SessionHinted
        | AdapterChanged
        | SleepAnswer
        | StreamFound
        | SharesGranted,
    ) -> None:
        """Take an answer in. One that nobody waits for any more is dropped."""
        _, asked = self._open.get(answer.nonce, ("", None))
        if asked is not None and not asked.done():
            asked.set_result(answer)

    def lost(self, peer: str) -> None:
        """Nobody answers there any more."""
        for address, asked in self._open.values():
            if address == peer and not asked.done():
                asked.set_exception(ReplicaLost(f"{peer} was lost before it answered"))

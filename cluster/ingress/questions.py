"""Questions to other processes, by mail. Each has a number, which its answer repeats."""

import asyncio
import itertools
from typing import Any

from core.errors import ReplicaLost
from core.messages import AskStatus, CacheDropped, DropCache
from core.ports import Mail
from core.reports import Status

_TIMEOUT_S = 2.0


class Questions:
    def __init__(self, mail: Mail) -> None:
        self._mail = mail
        self._nonces = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, address: str, question: type[AskStatus | DropCache], whom: str) -> Any:
        """Ask the process at `address`, and return its answer. `whom` says in words who that is. Raises ReplicaLost when none
        comes in time."""
        nonce = next(self._nonces)
        answer = self._open[nonce] = asyncio.get_running_loop().create_future()
        self._mail.send(address, question(nonce))
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise ReplicaLost(f"{whom} did not answer within {_TIMEOUT_S:g} s") from None
        finally:
            del self._open[nonce]

    def answered(self, answer: Status | CacheDropped) -> None:
        """Take an answer in. One that nobody waits for any more is dropped."""
        asked = self._open.get(answer.nonce)
        if asked is not None and not asked.done():
            asked.set_result(answer)

"""kvtransfer.memory.Memory on another host: each word to it, and each answer, takes effect when the test says so, in order."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from core.kv import RankPool
from core.messages import RegionKey
from kvtransfer.memory import OwnMemory

Act = Callable[[], object]


class LateMemory:
    def __init__(self, own: OwnMemory) -> None:
        self.own = own
        self.words: deque[Act] = deque()
        self.answers: deque[Act] = deque()
        self._fencing: set[asyncio.Task[None]] = set()

    def regions(self, pool: RankPool) -> list[RegionKey]:
        return self.own.regions(pool)

    def open(self, grant_id: str, blocks: Sequence[int]) -> None:
        self.words.append(lambda: self.own.open(grant_id, blocks))

    def when_open(self, then: Act) -> None:
        self.words.append(lambda: self.answers.append(then))

    def refuse(self, grant_id: str) -> None:
        self.words.append(lambda: self.own.refuse(grant_id))

    def when_idle(self, grant_id: str, then: Act) -> None:
        self.words.append(lambda: self.own.when_idle(grant_id, lambda: self.answers.append(then)))

    def ended(self, grant_id: str) -> None:
        self.words.append(lambda: self.own.ended(grant_id))

    async def fence(self, writer: str, grant_id: str) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def fenced() -> None:
            await self.own.fence(writer, grant_id)
            self.answers.append(lambda: over.done() or over.set_result(None))

        def start() -> None:
            task = asyncio.ensure_future(fenced())
            self._fencing.add(task)
            task.add_done_callback(self._fencing.discard)

        self.words.append(start)
        await over

    async def close(self) -> None:
        pass

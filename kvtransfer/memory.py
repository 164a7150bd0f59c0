"""One host's memory in which pools of an instance's ranks lie: how it is reached, and which writes into it are admitted.

An instance has a ledger of its grants and, on each of its hosts, a memory that admits what the ledger says. `OwnMemory` is this
process's. Memories that this process cannot map are reached through a process that can."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from core.kv import RankPool
from core.messages import RegionKey
from kvtransfer.transport.base import Receiver


class Memory(Protocol):
    """A memory on one host. Calls about a grant take effect in their order."""

    def regions(self, pool: RankPool) -> list[RegionKey]:
        """The regions of a pool in this memory, one for each way to it."""
        ...

    def open(self, grant_id: str, blocks: Sequence[int]) -> None:
        """Admit writes to these blocks (the instance's numbers) under this grant."""
        ...

    def when_open(self, then: Callable[[], None]) -> None:
        """Call `then` once every grant that has been opened so far is admitted."""
        ...

    def refuse(self, grant_id: str) -> None:
        """Admit no more writes under this grant."""
        ...

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        """Call `then` once no write under this grant, which is refused, is half done."""
        ...

    def ended(self, grant_id: str) -> None:
        """Note that the grant's writer is done with it. Unknown grants are allowed."""
        ...

    async def fence(self, writer: str, grant_id: str) -> None:
        """Wait until `writer` cannot change this memory under the grant, which is refused, any more."""
        ...

    async def close(self) -> None: ...


class OwnMemory:
    """Memory of this process. Make its receivers with `may_write`, then `attach` them. `may_write` is for any thread."""

    def __init__(self, pools: Sequence[RankPool]) -> None:
        self._pools = tuple(pools)
        self._granted: dict[str, frozenset[int]] = {}
        self._receivers: list[Receiver] = []

    def attach(self, receivers: Sequence[Receiver]) -> None:
        self._receivers = list(receivers)

    def may_write(self, grant_id: str, start: int, end: int) -> bool:
        """Return whether the memory's bytes [start, end) lie in blocks of this live grant, in one rank's pool."""
        granted = self._granted.get(grant_id)
        if granted is None:
            return False
        blocks = next((found for pool in self._pools if (found := pool.blocks_at(start, end))), range(0))
        return bool(blocks) and all(block in granted for block in blocks)

    def regions(self, pool: RankPool) -> list[RegionKey]:
        found = [receiver.region(pool.shard, pool.num_blocks) for receiver in self._receivers]
        return [replace(region, base_bytes=pool.base_bytes) for region in found]

    def open(self, grant_id: str, blocks: Sequence[int]) -> None:
        self._granted[grant_id] = frozenset(blocks)

    def when_open(self, then: Callable[[], None]) -> None:
        then()

    def refuse(self, grant_id: str) -> None:
        self._granted.pop(grant_id, None)

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        each = when_all(len(self._receivers) + 1, then)
        for receiver in self._receivers:
            receiver.when_idle(grant_id, each)
        each()

    def ended(self, grant_id: str) -> None:
        for receiver in self._receivers:
            receiver.ended(grant_id)

    async def fence(self, writer: str, grant_id: str) -> None:
        await asyncio.gather(*(receiver.fence(writer, grant_id) for receiver in self._receivers))

    async def close(self) -> None:
        for receiver in self._receivers:
            await receiver.close()


def when_all(count: int, then: Callable[[], None]) -> Callable[[], None]:
    """Return a function to be called `count` times. Its last call calls `then`."""

    def one() -> None:
        nonlocal count
        count -= 1
        if not count:
            then()

    return one

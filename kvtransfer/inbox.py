"""The holder's side of a transfer: offers its pool, counts what arrives, and says when a grant is complete.

A grant's blocks leave the ledger only when every byte is here, by the writer's last message (`end`), or by a fence of the
writer."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from core.kv import KVShard, RankPool
from core.messages import Commit, Grant, RegionKey
from kvtransfer.grants import GrantLedger
from kvtransfer.memory import Memory, OwnMemory, when_all
from kvtransfer.transport.base import Receiver
from kvtransfer.wire import content_of, pack


class Inbox:
    """The grants of one holder. `on_complete(commit)` is called once for a grant whose every byte is in the pool, which ends it.
    `on_corrupted(grant_id)` is called for one with damaged bytes.

    Receivers need `may_write`, `arrived` and `corrupted` of the inbox: create it first, then `attach` them. The number of a
    memory is 0 for this process's own, and counts from 1 in `remote` for the others."""

    def __init__(
        self,
        shard: KVShard,
        num_blocks: int,
        holder: str,
        incarnation: str,
        *,
        on_complete: Callable[[Commit], None],
        on_corrupted: Callable[[str], None],
        model: str = "",
        pools: Sequence[RankPool] = (),
        remote: Sequence[Memory] = (),
    ) -> None:
        """`model` is the weights' revision. `pools` are those of the instance's ranks; none means one rank with all of `shard`.
        `remote` are the memories of other hosts that some of them lie in."""
        self._shard = shard
        self._pools = tuple(pools) or (RankPool(shard=shard, num_blocks=num_blocks),)
        self._contents = [pack(content_of(pool.shard, model, pool.base_bytes)) for pool in self._pools]
        self._holder, self._incarnation = holder, incarnation
        self._on_complete, self.corrupted = on_complete, on_corrupted
        self._ledger = GrantLedger()
        self._commits: dict[str, Commit] = {}
        self._own = OwnMemory([pool for pool in self._pools if not pool.memory])
        self._memories: list[Memory] = [self._own, *remote]
        self.num_granted = self.num_fenced = 0
        """The number of grants since the inbox was made."""

    @property
    def num_live(self) -> int:
        return len(self._ledger)

    def attach(self, receivers: Sequence[Receiver]) -> None:
        """Attach the receivers of this process's memory."""
        self._own.attach(receivers)

    def open(
        self,
        key: str,
        epoch: int,
        writer: str,
        block_ids: Sequence[int],
        *,
        first_token: int,
        num_tokens: int,
        ttl_s: float,
    ) -> Grant:
        """Grant the right to write tokens [first_token, num_tokens), and what follows them as far as the blocks go. `block_ids`
        is the sequence's table. What a recurrent state takes the place of counts as tokens, which come before all others: where
        there is one, nothing is matched."""
        size = self._shard.layout.block_size
        num_tokens += self._shard.layout.state_tokens
        granted = tuple(block_ids[first_token // size :])
        holders = [rank for rank, pool in enumerate(self._pools) if pool.holds(block_ids[0])]
        grant = Grant(
            id=f"{key}@{epoch}@{self._incarnation}",
            key=key,
            epoch=epoch,
            holder=self._holder,
            incarnation=self._incarnation,
            regions=self.regions(holders),
            block_ids=self._pools[holders[0]].local(granted),
            first_token=first_token,
            num_tokens=num_tokens - first_token,
            ttl_s=ttl_s,
            room_tokens=len(block_ids) * size - num_tokens,
        )
        self._ledger.open(grant, writer, granted)
        self.num_granted += 1
        for memory in self._memories:
            memory.open(grant.id, granted)
        return grant

    def when_open(self, then: Callable[[], None]) -> None:
        """Call `then` once writes are admitted under every grant that has been opened. A grant may not be given away before."""
        each = when_all(len(self._memories), then)
        for memory in self._memories:
            memory.when_open(each)

    def regions(self, ranks: Sequence[int] | None = None) -> tuple[RegionKey, ...]:
        """Return how each transport reaches the pools of these ranks, or of all."""
        ranks = range(len(self._pools)) if ranks is None else ranks
        return tuple(
            replace(region, content=self._contents[rank], rank=rank)
            for rank in ranks
            for region in self._memories[self._pools[rank].memory].regions(self._pools[rank])
        )

    def may_write(self, grant_id: str, start: int, end: int) -> bool:
        """Return whether the bytes [start, end) of this process's memory lie in blocks of this live grant, in one rank's pool."""
        return self._own.may_write(grant_id, start, end)

    def arrived(self, grant_id: str, num_bytes: int) -> None:
        """Count bytes that are in the pool. Bytes of an unknown grant are not counted."""
        live = self._ledger.get(grant_id)
        if live is not None:
            live.arrived_bytes += num_bytes
            self._check(grant_id)

    def committed(self, commit: Commit) -> None:
        """Take the writer's last message. It may come before the last bytes, which travel on another connection."""
        live = self._ledger.get(commit.grant_id)
        if live is not None:
            live.expected_bytes = commit.num_bytes
            self._commits[commit.grant_id] = commit
            self._check(commit.grant_id)

    def refuse(self, grant_id: str) -> None:
        """Begin no more writes under this grant. Its blocks stay in the ledger."""
        for memory in self._memories:
            memory.refuse(grant_id)

    def end(self, grant_id: str, then: Callable[[], None]) -> None:
        """Note that the writer has sent its last message, and call `then` once nothing that it sent before is still being
        received.

        That is at once, unless a frame is half-way into the pool: the message travels on another connection."""
        self.refuse(grant_id)

        def idle() -> None:
            self._close(grant_id)
            self._forget(grant_id)
            then()

        each = when_all(len(self._memories), idle)
        for memory in self._memories:
            memory.when_idle(grant_id, each)

    async def fence(self, grant_id: str, writer: str) -> None:
        """Returns once `writer` cannot change the pool under this grant any more, by any transport."""
        self.refuse(grant_id)
        self.num_fenced += 1
        await asyncio.gather(*(memory.fence(writer, grant_id) for memory in self._memories))
        self._ledger.close(grant_id)
        self._commits.pop(grant_id, None)

    async def shut(self) -> None:
        for memory in self._memories:
            await memory.close()

    def check_integrity(self) -> None:
        self._ledger.check_integrity()

    def _check(self, grant_id: str) -> None:
        live, commit = self._ledger.get(grant_id), self._commits.get(grant_id)
        if live is not None and commit is not None and live.arrived_bytes >= live.expected_bytes:
            self._close(grant_id)
            self._on_complete(commit)
            self._forget(grant_id)

    def _close(self, grant_id: str) -> None:
        self.refuse(grant_id)
        self._ledger.close(grant_id)
        self._commits.pop(grant_id, None)

    def _forget(self, grant_id: str) -> None:
        for memory in self._memories:
            memory.ended(grant_id)

"""The writer's side of a transfer: after each layer, the fresh KV goes out while the next layer computes.

The compute thread only queues (grant, layer), and waits while too many bytes are queued. Writes go out in the order of
`kvtransfer/linkqueue.py`, two at a time to a holder, layers that have queued up together as one. How many bytes a grant takes is
known when the last layer is computed. So the Commit, with the token that decode goes on with, does not wait for the writes before
it, and the holder counts them. A grant's writes end before its Drained is sent; stopping it means dropping what is queued."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial

from core.errors import ReplicaLost, TransferError
from core.kv import KVShard, RankPool
from core.messages import Commit, Drained, Grant, PrefillFailed, RegionKey
from core.plan import StepPlan
from core.ports import DeviceWork, LayerDone, Mail
from core.reports import LinkSpeed
from core.types import TokenOut
from device.seam import Event
from kvtransfer.copies import CopyRun, as_bytes, at_layer, duties, same_storage
from kvtransfer.link_speeds import LinkSpeeds
from kvtransfer.linkqueue import LinkQueue, Turn, Urgency
from kvtransfer.pushes import ActivePush, Chunk, LinkWrite, TargetPlan, plan_target, take_writes
from kvtransfer.queue_room import QueueRoom
from kvtransfer.source import HostSource, Source
from kvtransfer.staging import Staging
from kvtransfer.transport.base import Sender
from kvtransfer.transport.routes import Routes
from kvtransfer.wire import check_compatible, check_grant

log = logging.getLogger(__name__)

_MAX_HOLDERS = 4
"""The number of holders that are written to at once."""
MAX_WRITES = 2
"""The number of writes under way to one holder: the second keeps the link busy while the end of the first is waited for."""
_SLOW_S = 0.25
"""A write that takes longer than this no longer keeps other holders waiting."""


class Pusher:
    """core.ports.LayerSink of an instance's ranks. All methods but the sink's are for the event loop's thread."""

    def __init__(
        self,
        shard: KVShard,
        num_blocks: int,
        mail: Mail,
        senders: Sequence[Sender],
        *,
        source: Source | None = None,
        staging: Staging | None = None,
        model: str = "",
        pools: Sequence[RankPool] = (),
        now: Callable[[], float] | None = None,
        remote_senders: Sequence[Sequence[Sender]] = (),
        remote_staging: Sequence[Staging | None] = (),
        room: QueueRoom | None = None,
    ) -> None:
        """`source` is how senders read the pool; none means where it lies.
        `staging` is where KV in this process's memory is converted for holders that store it otherwise, and each of
        `remote_staging` where it is in another's. Holders are refused where a pool's memory has none. `pools` are those of the
        instance's ranks; none means one rank with all of `shard`. `senders` read this process's memory, number 0, and each of
        `remote_senders` another process's, from 1 on. Ranks that hold the same share the work.

        `now` measures; the loop's own clock, the default, may count in milliseconds."""
        self._pools = tuple(pools) or (RankPool(shard=shard, num_blocks=num_blocks),)
        self._source = source or HostSource()
        self._shard, self._model = shard, model
        self._mail, self._staging = mail, (staging, *remote_staging)
        self._senders = [sender for memory in (senders, *remote_senders) for sender in memory]
        self._routes = [Routes(memory) for memory in (senders, *remote_senders)]
        self._memories = {pool.memory for pool in self._pools}
        self._agreed: dict[str, set[RegionKey]] = {}
        self._loop = asyncio.get_running_loop()
        self._now = now or self._loop.time
        self._loop_thread = threading.current_thread()
        self._pushes: dict[str, ActivePush] = {}
        self._queue: LinkQueue[LinkWrite] = LinkQueue(_MAX_HOLDERS, MAX_WRITES, take_writes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._speeds = LinkSpeeds(self._now)
        self.room = QueueRoom() if room is None else room

    @property
    def num_open(self) -> int:
        return len(self._pushes)

    def open(
        self,
        grant: Grant,
        on_delivered: Callable[[str], None],
        on_quiet: Callable[[str], None],
        on_failed: Callable[[str, str], None],
        urgency: Urgency = (0.0, math.inf),
    ) -> None:
        """Get ready to fill `grant`. Raises TransferError when the two sides do not fit or have no transport in common.

        Then exactly one of `on_delivered(grant_id)` and `on_quiet(grant_id)` is called, when no block is read any more;
        `on_failed(grant_id, reason)` may be called once before, and expects `stop`."""
        check_grant(grant)
        self._agree(grant)
        ways = [
            routes.choose(grant.holder, grant.regions) if memory in self._memories else []
            for memory, routes in enumerate(self._routes)
        ]
        duty = self._duties([region.shard for _, region in next(filter(None, ways))])
        self._pushes[grant.id] = ActivePush(
            grant=grant,
            ways=ways,
            urgency=urgency,
            on_delivered=on_delivered,
            on_quiet=on_quiet,
            on_failed=on_failed,
            opened_at=self._now(),
            duties=duty,
        )

    def remaining_s(self, grant_id: str) -> float:
        """Return how long the writes that are queued for this grant will take, by the last ones to its holder. It is no less than
        what the one under way has taken already."""
        push = self._pushes.get(grant_id)
        if push is None:
            return 0.0
        elapsed_s = self._now() - push.writing_since[0] if push.writing_since else 0.0
        return max(elapsed_s, push.queued_bytes * self._speeds.s_per_byte(push.grant.holder, push.transport))

    def links(self) -> tuple[LinkSpeed, ...]:
        """Return how fast writes to each holder lately were."""
        return self._speeds.known()

    def finish(self, grant_id: str, sampled: Sequence[TokenOut]) -> None:
        """Note that all layers of all chunks are queued, and send the Commit with the sampled tokens while the last ones are
        being written."""
        push = self._pushes.get(grant_id)
        if push is not None and not push.closing:
            commit = Commit(
                grant_id=grant_id,
                num_chunks=push.num_chunks,
                num_bytes=push.num_bytes,
                first=sampled[0],
                times=push.times(),
                more=tuple(sampled[1:]),
            )
            self._mail.send(push.grant.holder, commit)
            self._close(push)

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        """Call `then` when nothing that was computed for this grant is being read any more. The step that computed last was taken
        back, and is computed again: what it has sent counts, and so does what comes in its place."""
        push = self._pushes.get(grant_id)
        if push is not None:
            push.on_idle.append(then)
            self._loop.call_soon(self._end_if_quiet, push)

    def stop(self, grant_id: str, *, reason: str | None = None) -> None:
        """Write no more, and then tell the holder: Drained, or PrefillFailed with `reason`."""
        push = self._pushes.get(grant_id)
        if push is not None and not push.stopped:
            push.stopped, push.reason = True, reason
            for item in self._queue.drop(grant_id):
                self._over(push, item.num_bytes)
                push.num_writes -= 1
            self._close(push)

    def holder_lost(self, holder: str) -> None:
        for routes in self._routes:
            routes.forget(holder)
        self._agreed.pop(holder, None)
        self._speeds.forget(holder)
        for sender in self._senders:
            sender.forget(holder)

    async def close(self) -> None:
        for routes in self._routes:
            await routes.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sender in self._senders:
            await sender.close()
        await self._source.close()

    def _agree(self, grant: Grant) -> None:
        """Agree with a holder on each of its regions, once. Raises TransferError."""
        agreed = self._agreed.setdefault(grant.holder, set())
        for region in grant.regions:
            if region in agreed:
                continue
            us, them = f"prefill {self._mail.address}", f"decode {grant.holder}"
            check_compatible(self._shard, region, self._model, us, them)
            if not same_storage(self._shard, region.shard) and not all(
                self._staging_of(memory) for memory in self._memories
            ):
                raise TransferError(
                    f"KV cannot be handed over: {us} stores {self._shard.layout.dtype} and has no room to convert it "
                    f"to the {region.shard.layout.dtype} of {them}"
                )
            agreed.add(region)

    def _duties(self, targets: Sequence[KVShard]) -> list[list[int]]:
        """Return, for each of our ranks, the targets that it would write to if the sequence were in its blocks."""
        found: list[list[int]] = [[] for _ in self._pools]
        for first_block in {pool.first_block for pool in self._pools}:
            ranks = [rank for rank, pool in enumerate(self._pools) if pool.first_block == first_block]
            for rank, duty in zip(ranks, duties([self._pools[r].shard for r in ranks], targets), strict=True):
                found[rank] = duty
        return found

    def step_started(self, plan: StepPlan) -> LayerDone | None:
        """Plan the copies of every pushed work once. Layers only shift them."""
        chunks: list[Chunk] = []
        for work in plan.work:
            push = self._pushes.get(work.push.grant_id) if work.push else None
            if push is None or work.push is None or push.stopped:
                continue
            if push.started_at is None:
                push.started_at = self._now()
            part = work.push
            plans = {
                rank: [plan_target(pool, push, number, work.block_ids, part) for number in duty]
                for rank, (pool, duty) in enumerate(zip(self._pools, push.duties, strict=True))
                if pool.holds(work.block_ids[0])
            }
            num_layers = sum(self._pools[rank].shard.num_layers for rank in plans)
            chunks.append(
                Chunk(
                    push=push,
                    seq=push.num_chunks,
                    first_token=part.start,
                    num_tokens=part.count,
                    plans=plans,
                    num_left=num_layers,
                )
            )
            push.unfinished.append(chunks[-1])
            push.num_chunks += 1
        if not chunks:
            return None
        return lambda rank, layer, after=None: self._layer_done(
            [c for c in chunks if rank in c.plans], rank, layer, after
        )

    def _layer_done(self, chunks: list[Chunk], rank: int, layer: int, after: DeviceWork | None) -> None:
        if threading.current_thread() is self._loop_thread:
            # Modelled ranks, and ranks in processes of their own, are heard of on the loop's thread.
            self._queue_layer(chunks, rank, layer, ())
            return
        marks = self._source.mark() if after is None else (after,)
        size = sum(chunk.layer_bytes(rank) for chunk in chunks)
        self.room.take(size, partial(self._loop.call_soon_threadsafe, self._give_up_stalled))
        self._loop.call_soon_threadsafe(self._queue_layer, chunks, rank, layer, marks)

    def _give_up_stalled(self) -> None:
        """Fail the grants whose writes take too long, so that computing goes on for the others."""
        now, stall_s = self._now(), self.room.stall_s
        for push in list(self._pushes.values()):
            if push.writing_since and now - push.writing_since[0] >= stall_s:
                self._failed(push, f"a write to {push.grant.holder} has not ended for {stall_s:g} s")

    def _queue_layer(self, chunks: list[Chunk], rank: int, layer: int, after: tuple[Event, ...]) -> None:
        for chunk in chunks:
            push, write = chunk.push, LinkWrite(chunk, rank, layer, after)
            if not push.closing:
                push.num_bytes += write.written_bytes
                push.queued_bytes += write.num_bytes
                push.num_writes += 1
                self._queue.add(push.grant.id, push.grant.holder, push.urgency, write)
            else:
                self.room.give_back(write.num_bytes)
        self._serve()

    def _serve(self) -> None:
        """Start the writes that may start now."""
        while turn := self._queue.next():
            task = self._loop.create_task(self._work(turn))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, turn: Turn[LinkWrite]) -> None:
        """Send one long write."""
        push = turn.items[0].chunk.push
        slow = self._loop.call_later(_SLOW_S, self._slow, turn)
        try:
            await self._write(push, turn.items)
        finally:
            slow.cancel()
            push.num_writes -= len(turn.items)
            self._queue.done(turn)
            self._serve()
            self._end_if_quiet(push)

    def _slow(self, turn: Turn[LinkWrite]) -> None:
        turn.slow = True
        self._serve()

    async def _write(self, push: ActivePush, items: list[LinkWrite]) -> None:
        """Write layers of one grant."""
        size = sum(item.num_bytes for item in items)
        started_at = self._now()
        push.writing_since.append(started_at)
        try:
            if not push.stopped:
                with self._speeds.writing(push.grant.holder, push.transport, size, push.carried):
                    await self._write_layers(push, items)
        except (ReplicaLost, TransferError) as error:
            self._failed(push, str(error))
        except Exception as error:
            log.exception("grant %s: writing KV failed", push.grant.id)
            self._failed(push, f"{type(error).__name__}: {error}")
        finally:
            push.writing_since.remove(started_at)
            self._over(push, size)

    def _failed(self, push: ActivePush, why: str) -> None:
        if not push.stopped:  # another write of this push has failed before, and that was reported
            push.on_failed(push.grant.id, why)

    def _over(self, push: ActivePush, num_bytes: int) -> None:
        push.queued_bytes -= num_bytes
        self.room.give_back(num_bytes)

    async def _write_layers(self, push: ActivePush, items: list[LinkWrite]) -> None:
        """Write the layers. What goes from one memory to one rank of the holder leaves as one write."""
        after = tuple(dict.fromkeys(event for item in items for event in item.after))
        for sender, region in (way for ways in push.ways for way in ways):
            copies: list[CopyRun] = []
            for item in items:
                for plan in item.chunk.plans[item.rank]:
                    if plan.sender is sender and plan.region is region:
                        copies += await self._layer_copies(push, item, plan)
            if copies:
                await self._source.write(sender, push.grant.id, region, copies, after)
        if push.written_at is None:
            push.written_at = self._now()
        for item in items:
            item.chunk.num_left -= 1
            if not item.chunk.num_left and not push.stopped:
                self._chunk_done(item.chunk)

    async def _layer_copies(self, push: ActivePush, item: LinkWrite, plan: TargetPlan) -> list[CopyRun]:
        """Return what is to be written as it is stored. What must be converted has been written on return."""
        runs = at_layer(plan.runs, plan.source, plan.side, item.layer)
        if not len(runs):
            return []
        direct: list[CopyRun] = []
        if same_storage(self._shard, plan.region.shard):
            direct = as_bytes(runs, plan.source, plan.side)
            num_bytes = sum(copy.num_bytes for copy in direct)
        else:
            pool = self._pools[item.rank]
            staging = self._staging_of(pool.memory)
            assert staging is not None, "refused in `open`"
            grant_id, region = push.grant.id, plan.region
            num_bytes = await staging.push(plan.sender, grant_id, region, runs, pool, item.after)
        item.chunk.vouched_bytes += num_bytes if plan.sender.vouches else 0
        return direct

    def _staging_of(self, memory: int) -> Staging | None:
        return self._staging[memory] if memory < len(self._staging) else None

    def _chunk_done(self, chunk: Chunk) -> None:
        chunk.push.unfinished.remove(chunk)
        self._mail.send(chunk.push.grant.holder, chunk.done())

    def _close(self, push: ActivePush) -> None:
        """Close a grant with its last write, in a later turn of the loop at the soonest."""
        push.closing = True
        self._loop.call_soon(self._end_if_quiet, push)

    def _idle(self, push: ActivePush) -> None:
        """End the chunks of a step that was taken back, and tell those who wait for that."""
        for chunk in [] if push.stopped else list(push.unfinished):
            self._chunk_done(chunk)
        while push.on_idle:
            push.on_idle.pop()()

    def _end_if_quiet(self, push: ActivePush) -> None:
        grant_id = push.grant.id
        if push.num_writes or self._pushes.get(grant_id) is not push:
            return
        if push.on_idle:
            self._idle(push)
        if not push.closing:
            return
        del self._pushes[grant_id]
        for sender in {id(sender): sender for ways in push.ways for sender, _ in ways}.values():
            sender.ended(grant_id)
        if push.stopped:
            last = PrefillFailed(grant_id, push.reason) if push.reason else Drained(grant_id)
            self._mail.send(push.grant.holder, last)
            push.on_quiet(grant_id)
        else:
            push.on_delivered(grant_id)

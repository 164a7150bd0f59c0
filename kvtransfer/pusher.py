"""The writer's side of a transfer: after each layer, the fresh KV goes out while the next layer computes.

The compute thread only queues (grant, layer); while there is something for a holder, one task writes it, in order. So a grant's
writes end before its Commit or Drained is sent, and stopping it means skipping what is queued. Back-pressure: the compute thread
waits while too many bytes are queued."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.errors import ReplicaLost, TransferError
from core.kv import KVShard
from core.messages import ChunkDone, Commit, Drained, Grant, PrefillFailed, RegionKey
from core.plan import StepPlan
from core.ports import Mail
from core.types import TokenOut
from kvtransfer.copies import CopyRun, Side, plan_copies, shift
from kvtransfer.transport.base import Sender, choose
from kvtransfer.wire import check_grant

log = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 256 << 20
_MAX_WAIT_S = 60.0


@dataclass(slots=True, eq=False)
class _Push:
    """One grant that is being filled. `targets` are the holder's ranks and how each is reached."""

    grant: Grant
    targets: list[tuple[Sender, RegionKey]]
    on_delivered: Callable[[str], None]
    on_quiet: Callable[[str], None]
    on_failed: Callable[[str, str], None]
    stopped: bool = False
    num_chunks: int = 0
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Chunk:
    """One work of a step: its copies for the first layer, for each target."""

    push: _Push
    first_token: int
    num_tokens: int
    source: Side
    plans: list[tuple[Sender, RegionKey, Side, list[CopyRun]]]
    layer_bytes: int
    vouched_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Write:
    chunk: _Chunk
    layer: int


@dataclass(slots=True, eq=False)
class _Word:
    """Something to say to the holder once all writes before it are done."""

    push: _Push
    first: TokenOut | None
    reason: str | None


@dataclass(slots=True, eq=False)
class _Lane:
    """What waits to go to one holder, and the task that sends it."""

    items: deque[_Write | _Word]
    task: "asyncio.Task[None]"


class Pusher:
    """core.ports.LayerSink of a prefill rank. All methods but the sink's are for the event loop's thread."""

    def __init__(self, shard: KVShard, num_blocks: int, mail: Mail, senders: Sequence[Sender]) -> None:
        self._shard, self._num_blocks = shard, num_blocks
        self._mail, self._senders = mail, senders
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.current_thread()
        self._pushes: dict[str, _Push] = {}
        self._lanes: dict[str, _Lane] = {}
        self._chunks: list[_Chunk] = []
        self._queued_bytes = 0
        self._room = threading.Condition()

    @property
    def num_open(self) -> int:
        return len(self._pushes)

    # The event loop's side ------------------------------------------------------------------------------------------

    def open(
        self,
        grant: Grant,
        on_delivered: Callable[[str], None],
        on_quiet: Callable[[str], None],
        on_failed: Callable[[str, str], None],
    ) -> None:
        """Get ready to fill `grant`. Raises TransferError when the two sides do not fit or have no transport in common.

        Then exactly one of `on_delivered(grant_id)` and `on_quiet(grant_id)` is called, when no block is read any more;
        `on_failed(grant_id, reason)` may be called once before, and expects `stop`."""
        check_grant(self._shard, grant)
        targets = choose(self._senders, grant.regions)
        self._pushes[grant.id] = _Push(grant, targets, on_delivered, on_quiet, on_failed)

    def finish(self, grant_id: str, first: TokenOut) -> None:
        """All layers of all chunks are queued: commit with the first token once they are written."""
        push = self._pushes.get(grant_id)
        if push is not None and not push.stopped:
            self._put(_Word(push, first, None))

    def stop(self, grant_id: str, *, reason: str | None = None) -> None:
        """Write no more, and then tell the holder: Drained, or PrefillFailed with `reason`."""
        push = self._pushes.get(grant_id)
        if push is not None and not push.stopped:
            push.stopped = True
            self._put(_Word(push, None, reason))

    def holder_lost(self, holder: str) -> None:
        for sender in self._senders:
            sender.forget(holder)

    async def close(self) -> None:
        tasks = [lane.task for lane in self._lanes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sender in self._senders:
            await sender.close()

    # The compute thread's side --------------------------------------------------------------------------------------

    def step_started(self, plan: StepPlan) -> None:
        """Plan the copies of every pushed work once; layers only shift them."""
        self._chunks = []
        for work in plan.work:
            push = self._pushes.get(work.push.grant_id) if work.push else None
            if push is None or work.push is None or push.stopped:
                continue
            source = Side(self._shard, self._num_blocks, work.block_ids)
            plans: list[tuple[Sender, RegionKey, Side, list[CopyRun]]] = []
            for sender, region in push.targets:
                side = Side(region.shard, region.num_blocks, push.grant.block_ids, push.grant.first_token)
                plans.append(
                    (sender, region, side, plan_copies(source, side, work.push.start, work.push.count))
                )
            size = sum(run.num_bytes for _, _, _, runs in plans for run in runs)
            self._chunks.append(_Chunk(push, work.push.start, work.push.count, source, plans, size))

    def layer_done(self, layer: int) -> None:
        chunks = self._chunks
        if threading.current_thread() is self._loop_thread:  # modelled ranks run on the loop itself
            self._queue_layer(chunks, layer)
            return
        size = sum(chunk.layer_bytes for chunk in chunks)
        with self._room:
            if not self._room.wait_for(lambda: self._queued_bytes < _MAX_QUEUED_BYTES, _MAX_WAIT_S):
                raise TransferError(
                    f"KV writes did not get on for {_MAX_WAIT_S:g} s: {self._queued_bytes >> 20} MiB are queued"
                )
            self._queued_bytes += size
        self._loop.call_soon_threadsafe(self._queue_layer, chunks, layer)

    # Writing --------------------------------------------------------------------------------------------------------

    def _queue_layer(self, chunks: list[_Chunk], layer: int) -> None:
        for chunk in chunks:
            self._put(_Write(chunk, layer))

    def _put(self, item: _Write | _Word) -> None:
        push = item.chunk.push if isinstance(item, _Write) else item.push
        lane = self._lanes.get(push.grant.holder)
        if lane is not None:
            lane.items.append(item)
            return
        items = deque([item])
        self._lanes[push.grant.holder] = _Lane(
            items, self._loop.create_task(self._work(push.grant.holder, items))
        )

    async def _work(self, holder: str, items: deque[_Write | _Word]) -> None:
        """Until nothing is left for this holder."""
        try:
            while items:
                item = items.popleft()
                try:
                    await self._write(item) if isinstance(item, _Write) else self._say(item)
                except Exception:
                    log.exception("the lane to %s: one item failed, the others go on", holder)
        finally:
            del self._lanes[holder]

    async def _write(self, item: _Write) -> None:
        chunk, push = item.chunk, item.chunk.push
        try:
            if not push.stopped:
                await self._write_layer(chunk, item.layer)
        except (ReplicaLost, TransferError) as error:
            push.on_failed(push.grant.id, str(error))
        except Exception as error:
            log.exception("grant %s: writing layer %d failed", push.grant.id, item.layer)
            push.on_failed(push.grant.id, f"{type(error).__name__}: {error}")
        finally:
            with self._room:
                self._queued_bytes = max(0, self._queued_bytes - chunk.layer_bytes)
                self._room.notify_all()

    async def _write_layer(self, chunk: _Chunk, layer: int) -> None:
        push = chunk.push
        for sender, region, side, runs in chunk.plans:
            shifted = shift(runs, chunk.source, side, layer)
            if shifted:
                await sender.write(push.grant.id, region, shifted)
                num_bytes = sum(run.num_bytes for run in shifted)
                push.num_bytes += num_bytes
                chunk.vouched_bytes += num_bytes if sender.vouches else 0
        if layer == self._shard.layers[1] - 1 and not push.stopped:
            done = ChunkDone(
                push.grant.id, push.num_chunks, chunk.first_token, chunk.num_tokens, chunk.vouched_bytes
            )
            push.num_chunks += 1
            self._mail.send(push.grant.holder, done)

    def _say(self, word: _Word) -> None:
        push = word.push
        grant_id, holder = push.grant.id, push.grant.holder
        if word.first is not None and push.stopped:
            return  # the word of `stop` comes behind this one
        del self._pushes[grant_id]
        for sender in {id(sender): sender for sender, _ in push.targets}.values():
            sender.ended(grant_id)
        if word.first is not None:
            self._mail.send(holder, Commit(grant_id, push.num_chunks, push.num_bytes, word.first))
            push.on_delivered(grant_id)
        else:
            self._mail.send(
                holder, PrefillFailed(grant_id, word.reason) if word.reason else Drained(grant_id)
            )
            push.on_quiet(grant_id)

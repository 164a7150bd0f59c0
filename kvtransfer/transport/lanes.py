"""One writer's way to one endpoint: several streams, each with a thread of its own that sends what is queued for it, in order.

So a write's first byte follows the last write's last one without a turn of the event loop between them, and frames of concurrent
writes stay apart. Invariant: only its own thread uses a stream. There are two exceptions: `cut`, and what the loop's thread sends
while the lane is idle. Only the loop's thread can end that idleness."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from core.errors import ReplicaLost, TransferError
from kvtransfer.transport.base import Carried
from kvtransfer.transport.streams import Stream

Job = Callable[[Stream], None]

_SHARED_BYTES = 8 << 20
"""A write of fewer bytes goes to one lane while others are busy: two frames cost more than sharing gains."""
_LEAST_BUSY_S = 0.02
"""Linux counts a connection's busy time in ticks of 1 to 10 ms, so less says nothing."""


class Lane:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_given = self._num_done = 0
        """The loop's thread writes `_num_given` and the lane's `_num_done`, so neither needs a lock."""
        self._thread = threading.Thread(target=self._run, name=f"kv to {stream.peer}", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """The number of jobs given and not done, the one under way included."""
        return self._num_given - self._num_done

    def give(self, job: Callable[[], None]) -> None:
        self._num_given += 1
        self._jobs.put(job)

    def end(self) -> None:
        """Close the stream after the jobs that are waiting for it."""
        self.give(self.stream.close)
        self._jobs.put(None)

    def join(self) -> None:
        """Block until its thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            self._num_done += 1


class LaneLink:
    """The lanes to one endpoint. All methods are for the event loop's thread."""

    def __init__(self, owner: str, streams: Sequence[Stream]) -> None:
        """`owner` is the mail address of the holder there."""
        self.owner = owner
        self.lanes = [Lane(stream) for stream in streams]
        self._progress = [(0, 0.0) for _ in streams]
        """What `carried` found last on each lane."""
        self._closed = False

    def lanes_for(self, num_bytes: int) -> list[Lane]:
        """Return the lanes among which a write is to be shared out, the emptiest first."""
        lanes = sorted(self.lanes, key=lambda lane: lane.num_waiting)
        return lanes[:1] if lanes[-1].num_waiting and num_bytes < _SHARED_BYTES else lanes

    async def run(self, jobs: Sequence[tuple[Lane, Job]]) -> None:
        """Run the jobs. Returns or raises only when all of them have ended; the last one wakes the event loop, once. Raises
        ReplicaLost, after which the link is cut, or TransferError, after which it can still be used."""
        if self._closed:
            raise ReplicaLost(f"the KV connections to {self.owner} have been closed")
        if not jobs:
            return
        batch = _Batch(len(jobs), self._cut)
        for lane, job in jobs:
            lane.give(batch.counted(job, lane.stream))
        try:
            await batch.over
        except asyncio.CancelledError:
            self._cut()
            await batch.anew()
            raise
        for error in sorted(batch.errors, key=lambda error: isinstance(error, TransferError)):
            raise error

    def carried(self) -> Carried | None:
        """Return what has arrived over all lanes, and the seconds of the lane that was busy longest. As long as those are too few
        to be told, both count for a later call. None where the system does not say."""
        progress = [lane.stream.progress() for lane in self.lanes]
        if self._closed or None in progress:
            return None
        found = [one for one in progress if one is not None]
        busy_s = max(now[1] - before[1] for now, before in zip(found, self._progress, strict=True))
        num_bytes = sum(now[0] - before[0] for now, before in zip(found, self._progress, strict=True))
        if not num_bytes or busy_s < _LEAST_BUSY_S:
            return Carried(0, 0.0)
        self._progress = found
        return Carried(num_bytes, busy_s)

    def close(self) -> None:
        """Cut the link: jobs under way fail soon. Idempotent."""
        if not self._closed:
            self._closed = True
            self._cut()
            for lane in self.lanes:
                lane.end()

    async def ended(self) -> None:
        """Wait, after `close`, until no thread reads the source any more."""
        for lane in self.lanes:
            await asyncio.to_thread(lane.join)

    def _cut(self) -> None:
        for lane in self.lanes:
            lane.stream.cut()


class _Batch:
    """Jobs. The last one completes `over`."""

    def __init__(self, num_jobs: int, on_broken: Callable[[], None]) -> None:
        self._loop, self._on_broken = asyncio.get_running_loop(), on_broken
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.errors: list[BaseException] = []
        self._num_left, self._lock = num_jobs, threading.Lock()

    def anew(self) -> "asyncio.Future[None]":
        """Return a new future that completes with the last job, after `over` has been cancelled."""
        self.over = self._loop.create_future()
        if not self._num_left:
            self.over.set_result(None)
        return self.over

    def counted(self, job: Job, stream: Stream) -> Callable[[], None]:
        def run() -> None:
            try:
                job(stream)
            except BaseException as error:
                self.errors.append(error)
                if not isinstance(error, TransferError):
                    self._on_broken()
            with self._lock:
                self._num_left -= 1
                if self._num_left:
                    return
            self._loop.call_soon_threadsafe(self._complete)

        return run

    def _complete(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

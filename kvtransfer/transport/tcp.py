"""TCP between hosts: the writer streams raw runs over authenticated connections of its own, straight into the holder's pool.

A write is cut into one part for each of several streams (`kvtransfer/transport/lanes.py`). A frame is `u32 header bytes, u64
payload bytes`, the msgpack header `[grant id, destination offsets, sizes, crc or nil, attempt]` and the payload. The holder asks
its ledger before it reads a byte into the pool; what no live grant covers is read into scratch memory, dropped and counted. With
a checksum each frame is answered by one byte, and a damaged one is sent once more. The fence cuts all of the writer's streams and
waits until their readers have stopped: bytes that the kernel already holds could still reach the pool before that. It needs
nothing from the writer, which may be dead, stopped or at the other end of a cut link.

With `tls`, streams to other hosts are encrypted (`net/tls.py`); the cluster key is proven as well."""

import asyncio
import logging
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from core.errors import ProtocolError, ReplicaLost, TransferError
from core.kv import KVShard
from core.messages import RegionKey
from device.port import PoolMemory
from kvtransfer.copies import CopyRun, split_runs
from kvtransfer.landing import Landing, landing_in
from kvtransfer.transport.base import PROBE, Carried
from kvtransfer.transport.checks import check_header, source_crc
from kvtransfer.transport.lanes import Job, Lane, LaneLink
from kvtransfer.transport.streams import Stream
from kvtransfer.transport.write_admission import WriteAdmission
from kvtransfer.wire import POOL_FORMAT
from net.channel import Channel, Identity, Listener, connect
from net.tls import Tls

log = logging.getLogger(__name__)

_NAME = "tcp"
_FRAME = struct.Struct("<IQ")
_MAX_FRAME_RUNS = 4096
_MAX_HEADER_BYTES = 1 << 20
_SCRATCH_BYTES = 1 << 20
_MIN_PART_BYTES = 512 << 10
"""Smaller parts cost more in switching threads than a second stream gains."""
_DIRECT_BYTES = 128 << 10
"""The event loop's thread itself hands writes up to so many bytes to the kernel, if they fit into the socket's buffer."""
_TAKEN, _REFUSED, _DAMAGED = b"+", b"x", b"-"


def default_streams() -> int:
    return min(4, os.cpu_count() or 1)


class TcpReceiver:
    def __init__(
        self,
        key: bytes,
        me: Identity,
        host: str,
        pool: memoryview | PoolMemory,
        admission: WriteAdmission,
        tls: Tls | None = None,
    ) -> None:
        self._pool, self._admission = pool, admission
        self._readers: dict[str, set[_Reader]] = {}
        self._listener = Listener(
            host, key, self._serve, lambda why: log.warning("refused a KV writer: %s", why), tls=tls
        )
        self._listener.start(me)

    def region(self, shard: KVShard, num_blocks: int) -> RegionKey:
        return RegionKey(
            transport=_NAME,
            endpoint=self._listener.address,
            name=POOL_FORMAT,
            host="",
            shard=shard,
            num_blocks=num_blocks,
        )

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        self._admission.when_idle(grant_id, then)

    def ended(self, grant_id: str) -> None:
        """Do nothing: no state is kept for a grant."""

    async def fence(self, writer: str, grant_id: str) -> None:
        readers = list(self._readers.get(writer, ()))
        for reader in readers:
            reader.cut()
        for reader in readers:
            await reader.stopped.wait()

    async def close(self) -> None:
        await self._listener.close()

    async def _serve(self, channel: Channel) -> None:
        writer = channel.peer.address
        reader = _Reader(channel, landing_in(self._pool), self._admission)
        readers = self._readers.setdefault(writer, set())
        readers.add(reader)
        reader.start()
        try:
            await reader.stopped.wait()
        finally:
            reader.cut()
            await reader.stopped.wait()
            readers.discard(reader)
            if not readers:
                self._readers.pop(writer, None)


class _Reader:
    """One stream's thread. `stopped` is set once it can touch the pool no more."""

    def __init__(self, channel: Channel, landing: Landing, admission: WriteAdmission) -> None:
        self.stopped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._peer = channel.peer.address
        self._stream = Stream(channel.detach(), self._peer, dialled=False)
        self._landing, self._admission = landing, admission
        self._scratch = memoryview(bytearray(0))
        self._cut = False

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"kv from {self._peer}", daemon=True).start()

    def cut(self) -> None:
        self._cut = True
        self._stream.cut()

    def _run(self) -> None:
        try:
            while not self._cut:
                self._take_frame(self._stream)
        except ReplicaLost as error:
            log.info("%s", error)
        except (ProtocolError, ValueError, TypeError, msgpack.UnpackException) as error:
            log.error("KV writer %s sent an impossible frame (%s); its connection is cut", self._peer, error)
        except Exception:
            log.exception("reading KV from %s failed; its connection is cut", self._peer)
        finally:
            self._stream.close()
            self._landing.close()
            self._loop.call_soon_threadsafe(self.stopped.set)

    def _take_frame(self, stream: Stream) -> None:
        head = bytearray(_FRAME.size)
        stream.receive([memoryview(head)])
        header_bytes, num_bytes = _FRAME.unpack(head)
        if header_bytes > _MAX_HEADER_BYTES:
            raise ProtocolError(f"a header of {header_bytes} bytes")
        header = bytearray(header_bytes)
        stream.receive([memoryview(header)])
        frame: Any = msgpack.unpackb(header)
        grant_id, offsets, sizes, crc, attempt = frame
        check_header(grant_id, crc, attempt, offsets, sizes)
        if sum(sizes) != num_bytes or min(sizes) < 0 or min(offsets) < 0:
            raise ProtocolError("run sizes do not add up to the payload")
        if grant_id == PROBE:
            self._discard(stream, num_bytes)
            stream.send([memoryview(_TAKEN)])
        else:
            verdict = self._fill(stream, grant_id, list(zip(offsets, sizes, strict=True)), crc, attempt)
            if crc is not None:
                stream.send([memoryview(verdict)])

    def _fill(
        self, stream: Stream, grant_id: str, ranges: list[tuple[int, int]], crc: int | None, attempt: int
    ) -> bytes:
        num_bytes = sum(size for _, size in ranges)
        if not self._admission.begin(grant_id, ranges):
            self._discard(stream, num_bytes)
            return _REFUSED
        arrived, damaged = 0, False
        try:
            found = self._landing.take(ranges, stream.receive, checked=crc is not None)
            damaged = crc is not None and found != crc
            arrived = 0 if damaged else num_bytes
        finally:
            self._admission.over(grant_id, arrived, corrupted=damaged and attempt > 0)
        if damaged:
            log.error("grant %s: %d bytes arrived corrupted, at attempt %d", grant_id, num_bytes, attempt + 1)
        return _DAMAGED if damaged else _TAKEN

    def _discard(self, stream: Stream, num_bytes: int) -> None:
        if len(self._scratch) < min(num_bytes, _SCRATCH_BYTES):
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while num_bytes:
            piece = self._scratch[:num_bytes]
            stream.receive([piece])
            num_bytes -= piece.nbytes


class TcpSender:
    name = _NAME
    vouches = False

    def __init__(
        self,
        key: bytes,
        me: Identity,
        source: memoryview,
        tls: Tls | None = None,
        num_streams: int = 0,
        *,
        checksum: bool,
    ) -> None:
        """Opens `num_streams` to each endpoint. 0 means four, or as many as there are cores if those are fewer."""
        self._key, self._me, self._source, self._checksum, self._tls = key, me, source, checksum, tls
        self._num_streams = num_streams or default_streams()
        self._links: dict[str, asyncio.Task[LaneLink]] = {}

    def reaches(self, region: RegionKey) -> bool:
        return region.transport == self.name

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        await self._deliver(region.endpoint, grant_id, runs, answered=self._checksum)

    def carried(self, region: RegionKey) -> Carried | None:
        """Ask the kernel, which takes bytes long before they are there."""
        link = _made(self._links.get(region.endpoint))
        return None if link is None else link.carried()

    async def probe(self, region: RegionKey, num_bytes: int) -> int:
        """Measure as `Sender.probe` says. Raises ReplicaLost."""
        num_bytes = min(num_bytes, len(self._source))
        await self._deliver(region.endpoint, PROBE, [CopyRun(0, 0, num_bytes)], answered=True)
        return num_bytes

    def ended(self, grant_id: str) -> None:
        """Do nothing: no state is kept for a grant."""

    def forget(self, endpoint_owner: str) -> None:
        for endpoint, task in list(self._links.items()):
            link = _made(task)
            if link is not None and link.owner == endpoint_owner:
                del self._links[endpoint]
                link.close()

    async def close(self) -> None:
        for task in self._links.values():
            task.cancel()
        for link in await asyncio.gather(*self._links.values(), return_exceptions=True):
            if isinstance(link, LaneLink):
                link.close()
                await link.ended()
        self._links.clear()

    async def _link(self, endpoint: str) -> LaneLink:
        task = self._links.get(endpoint)
        if task is None:
            task = self._links[endpoint] = asyncio.create_task(self._connect(endpoint))
        try:
            return await asyncio.shield(task)
        except (ReplicaLost, ProtocolError):
            if self._links.get(endpoint) is task:
                del self._links[endpoint]
            raise

    async def _connect(self, endpoint: str) -> LaneLink:
        streams: list[Stream] = []
        owner = ""
        try:
            for _ in range(self._num_streams):
                channel = await connect(endpoint, self._key, self._me, tls=self._tls)
                owner = channel.peer.address
                streams.append(Stream(channel.detach(), owner, dialled=True))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return LaneLink(owner, streams)

    async def _deliver(
        self, endpoint: str, grant_id: str, runs: Sequence[CopyRun], *, answered: bool
    ) -> None:
        link = await self._link(endpoint)
        try:
            await link.run(self._jobs(link, grant_id, runs, answered=answered))
        except TransferError:
            raise  # the holder has answered, so every frame was sent whole and the link is good
        except BaseException:  # half a frame may be on its way: nobody can use this link again
            if _made(self._links.get(endpoint)) is link:
                del self._links[endpoint]
            link.close()
            raise

    def _jobs(
        self, link: LaneLink, grant_id: str, runs: Sequence[CopyRun], *, answered: bool
    ) -> list[tuple[Lane, Job]]:
        """Return what is left to the lanes' threads. Raises ReplicaLost."""
        total = sum(run.num_bytes for run in runs)
        lanes = link.lanes_for(total)
        lane = lanes[0]
        if not lane.num_waiting and total <= _DIRECT_BYTES and not answered and len(runs) <= _MAX_FRAME_RUNS:
            rest = lane.stream.try_send(self._frame(grant_id, runs, None, 0))
            return [(lane, lambda stream: stream.send(rest))] if rest else []
        parts = split_runs(runs, len(lanes), _MIN_PART_BYTES)
        return [
            (lane, lambda stream, part=part: self._send_part(stream, grant_id, part, answered=answered))
            for lane, part in zip(lanes, parts, strict=False)
        ]

    def _send_part(self, stream: Stream, grant_id: str, runs: list[CopyRun], *, answered: bool) -> None:
        """Send a part, on a thread. Raises ReplicaLost, or TransferError when the holder refused the runs or got them damaged
        twice."""
        for start in range(0, len(runs), _MAX_FRAME_RUNS):
            part = runs[start : start + _MAX_FRAME_RUNS]
            checked = answered and grant_id != PROBE
            crc = source_crc(self._source, part) if checked else None
            for attempt in (0, 1) if answered else (0,):
                stream.send(self._frame(grant_id, part, crc, attempt))
                if not answered:
                    break
                box = bytearray(1)
                stream.receive([memoryview(box)])
                answer = bytes(box)
                if answer == _TAKEN:
                    break
                if answer == _REFUSED:
                    raise TransferError(f"grant {grant_id} is not live any more at {stream.peer}")
            else:
                raise TransferError(f"KV arrived corrupted twice at {stream.peer}")

    def _frame(
        self, grant_id: str, runs: Sequence[CopyRun], crc: int | None, attempt: int
    ) -> list[memoryview]:
        offsets, sizes = [run.destination for run in runs], [run.num_bytes for run in runs]
        head: bytes = msgpack.packb([grant_id, offsets, sizes, crc, attempt])  # type: ignore[assignment]
        return [
            memoryview(_FRAME.pack(len(head), sum(sizes)) + head),
            *(self._source[run.source : run.source + run.num_bytes] for run in runs),
        ]


def _made(task: "asyncio.Task[LaneLink] | None") -> LaneLink | None:
    """Return the link once it is there."""
    if task is None or not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()

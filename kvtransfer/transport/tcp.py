"""TCP between hosts: the writer streams raw runs over an authenticated channel of its own, straight into the holder's pool.

A frame's header is `[grant id, destination offsets, sizes, crc]`. The holder asks its ledger before it reads a byte into the
pool; what no live grant covers is read into scratch memory, dropped and counted. The fence is closing the connection and
waiting until its reader has stopped: bytes that the kernel already holds could still reach the pool before that."""

import asyncio
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from core.errors import ProtocolError, ReplicaLost
from core.kv import KVShard
from core.messages import RegionKey
from kvtransfer.copies import CopyRun
from kvtransfer.transport.base import Arrived, MayWrite
from kvtransfer.wire import POOL_FORMAT
from net.channel import Channel, Identity, Listener, connect

log = logging.getLogger(__name__)

_MAX_FRAME_RUNS = 4096
_SCRATCH_BYTES = 1 << 20
_STALL_S = 60.0
"""How long a holder may take for one frame before it counts as lost."""


class TcpReceiver:
    def __init__(
        self,
        key: bytes,
        me: Identity,
        host: str,
        buffer: memoryview,
        may_write: MayWrite,
        arrived: Arrived,
        corrupted: Callable[[str], None],
    ) -> None:
        self._buffer, self._may_write, self._arrived, self._corrupted = buffer, may_write, arrived, corrupted
        self._channels: dict[str, dict[Channel, asyncio.Event]] = {}
        """Of each writer, with what tells that the channel's reader has stopped."""
        self._reading: dict[str, int] = {}
        """Frames of a grant that are half-way into the pool."""
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._listener = Listener(
            host, key, self._serve, lambda why: log.warning("refused a KV writer: %s", why)
        )
        self._listener.start(me)
        self.num_refused = 0

    def region(self, shard: KVShard, num_blocks: int) -> RegionKey:
        return RegionKey("tcp", self._listener.address, POOL_FORMAT, "", shard, num_blocks)

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        if grant_id in self._reading:
            self._waiting.setdefault(grant_id, []).append(then)
        else:
            then()

    def ended(self, grant_id: str) -> None:
        """Nothing is kept for a grant."""

    async def fence(self, writer: str, grant_id: str) -> None:
        channels = dict(self._channels.get(writer, {}))
        for channel in channels:
            channel.close()
        for stopped in channels.values():
            await stopped.wait()

    async def close(self) -> None:
        self._waiting.clear()
        await self._listener.close()

    async def _serve(self, channel: Channel) -> None:
        writer = channel.peer.address
        stopped = self._channels.setdefault(writer, {})[channel] = asyncio.Event()
        try:
            while True:
                header, num_bytes = await channel.recv()
                await self._take_frame(channel, header, num_bytes)
        except ReplicaLost:
            log.info("KV writer %s closed its connection", writer)
        except (ProtocolError, ValueError, TypeError, msgpack.UnpackException) as error:
            log.error("KV writer %s sent an impossible frame (%s); its connection is cut", writer, error)
        finally:
            stopped.set()
            del self._channels[writer][channel]
            if not self._channels[writer]:
                del self._channels[writer]

    async def _take_frame(self, channel: Channel, header: bytes, num_bytes: int) -> None:
        frame: Any = msgpack.unpackb(header)
        grant_id, offsets, sizes, crc = frame
        if sum(sizes) != num_bytes or min(sizes) < 0 or min(offsets) < 0:
            raise ProtocolError("run sizes do not add up to the payload")
        allowed = all(
            self._may_write(grant_id, at, at + size) for at, size in zip(offsets, sizes, strict=True)
        )
        if not allowed:
            self.num_refused += 1
            await self._discard(channel, num_bytes)
            return
        self._reading[grant_id] = self._reading.get(grant_id, 0) + 1
        try:
            check = 0
            for at, size in zip(offsets, sizes, strict=True):
                target = self._buffer[at : at + size]
                await channel.readinto(target)
                check = zlib.crc32(target, check) if crc is not None else 0
        finally:
            self._frame_over(grant_id)
        if crc is not None and check != crc:
            log.error("grant %s: a chunk of %d bytes arrived corrupted", grant_id, num_bytes)
            self._corrupted(grant_id)
        else:
            self._arrived(grant_id, num_bytes)

    async def _discard(self, channel: Channel, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
        while num_bytes:
            piece = scratch[:num_bytes]
            await channel.readinto(piece)
            num_bytes -= piece.nbytes

    def _frame_over(self, grant_id: str) -> None:
        self._reading[grant_id] -= 1
        if not self._reading[grant_id]:
            del self._reading[grant_id]
            for then in self._waiting.pop(grant_id, []):
                then()


class TcpSender:
    name = "tcp"
    vouches = False

    def __init__(self, key: bytes, me: Identity, source: memoryview, checksum: bool) -> None:
        self._key, self._me, self._source, self._checksum = key, me, source, checksum
        self._channels: dict[str, asyncio.Task[Channel]] = {}

    def reaches(self, region: RegionKey) -> bool:
        return region.transport == self.name

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        channel = await self._channel(region.endpoint)
        try:
            for start in range(0, len(runs), _MAX_FRAME_RUNS):
                async with asyncio.timeout(_STALL_S):
                    await self._write_frame(channel, grant_id, runs[start : start + _MAX_FRAME_RUNS])
        except BaseException as error:  # half a frame may be on its way: nobody can use this channel again
            self._channels.pop(region.endpoint, None)
            channel.close()
            if isinstance(error, TimeoutError):
                raise ReplicaLost(f"{region.endpoint} has not taken a frame within {_STALL_S:g} s") from error
            raise

    def ended(self, grant_id: str) -> None:
        """Nothing is kept for a grant."""

    def forget(self, endpoint_owner: str) -> None:
        for endpoint in [e for e, task in self._channels.items() if _owner(task) == endpoint_owner]:
            self._channels.pop(endpoint).result().close()

    async def close(self) -> None:
        for task in self._channels.values():
            task.cancel()
        for result in await asyncio.gather(*self._channels.values(), return_exceptions=True):
            if isinstance(result, Channel):
                result.close()
        self._channels.clear()

    async def _channel(self, endpoint: str) -> Channel:
        task = self._channels.get(endpoint)
        if task is None:
            task = self._channels[endpoint] = asyncio.create_task(connect(endpoint, self._key, self._me))
        try:
            return await asyncio.shield(task)
        except (ReplicaLost, ProtocolError):
            self._channels.pop(endpoint, None)
            raise

    async def _write_frame(self, channel: Channel, grant_id: str, runs: Sequence[CopyRun]) -> None:
        pieces = [self._source[run.source : run.source + run.num_bytes] for run in runs]
        crc = None
        if self._checksum:
            crc = 0
            for piece in pieces:
                crc = zlib.crc32(piece, crc)
        await channel.send(
            [grant_id, [run.destination for run in runs], [run.num_bytes for run in runs], crc], pieces
        )


def _owner(task: "asyncio.Task[Channel]") -> str | None:
    done = task.done() and not task.cancelled() and task.exception() is None
    return task.result().peer.address if done else None

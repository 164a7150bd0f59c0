"""TCP between hosts: the writer streams raw runs over an authenticated channel of its own, straight into the holder's pool.

A frame's header is `[grant id, destination offsets, sizes, crc]`. The holder asks its ledger before it reads a byte into the
pool; what no live grant covers is read into scratch memory, dropped and counted. The fence is closing the connection."""

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
from net.channel import Channel, Identity, Listener, connect

log = logging.getLogger(__name__)

_MAX_FRAME_RUNS = 4096


class TcpReceiver:
    counts_bytes = True

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
        self._channels: dict[str, list[Channel]] = {}
        self._listener = Listener(
            host, key, self._serve, lambda why: log.warning("refused a KV writer: %s", why)
        )
        self._listener.start(me)
        self.num_refused = 0

    def region(self, shard: KVShard, num_blocks: int) -> RegionKey:
        return RegionKey("tcp", self._listener.address, "pool", "", shard, num_blocks)

    async def fence(self, writer: str, pid: int | None) -> None:
        for channel in self._channels.pop(writer, []):
            channel.close()

    async def close(self) -> None:
        await self._listener.close()

    async def _serve(self, channel: Channel) -> None:
        writer = channel.peer.address
        self._channels.setdefault(writer, []).append(channel)
        try:
            while True:
                header, num_bytes = await channel.recv()
                await self._take_frame(channel, header, num_bytes)
        except ReplicaLost:
            log.info("KV writer %s closed its connection", writer)
        except (ProtocolError, ValueError, TypeError, msgpack.UnpackException) as error:
            log.error("KV writer %s sent an impossible frame (%s); its connection is cut", writer, error)
        finally:
            if channel in self._channels.get(writer, []):
                self._channels[writer].remove(channel)

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
            await channel.readinto(memoryview(bytearray(num_bytes)))
            return
        check = 0
        for at, size in zip(offsets, sizes, strict=True):
            target = self._buffer[at : at + size]
            await channel.readinto(target)
            check = zlib.crc32(target, check) if crc is not None else 0
        if crc is not None and check != crc:
            log.error("grant %s: a chunk of %d bytes arrived corrupted", grant_id, num_bytes)
            self._corrupted(grant_id)
        else:
            self._arrived(grant_id, num_bytes)


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
                await self._write_frame(channel, grant_id, runs[start : start + _MAX_FRAME_RUNS])
        except ReplicaLost:
            self._channels.pop(region.endpoint, None)
            channel.close()
            raise

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
        except ReplicaLost:
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

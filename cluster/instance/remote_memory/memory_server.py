"""The server of an instance's memory on a host other than its own, or on a rank's GPU: a process with the receivers and senders
of the pools there.

It decides nothing. It admits what its instance says and reports what arrives. Bytes go between its memory and other instances
directly; only messages go to and from its own. It ends with the stream that carries them, and its memory with it."""

import asyncio
import itertools
import os
import socket
import traceback
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy as np

from cluster.instance.device_access import device_access, take_device_memory
from cluster.instance.pool_access import PoolAccess, remote_access
from cluster.instance.pull_media import device_media
from cluster.instance.remote_memory.memory_messages import (
    TO_MEMORY,
    Answer,
    BytesArrived,
    BytesCarried,
    Corrupted,
    Ended,
    Fence,
    Forget,
    MemoryFailed,
    MemoryReady,
    MemorySetup,
    Open,
    Probe,
    RefuseGrant,
    RemoteConvert,
    RemoteEndpoint,
    RemoteWrite,
    RestoreBytes,
    SaveBytes,
    Sent,
    Sync,
    WhenIdle,
)
from cluster.instance.shared_memory import take_memory
from core.config.cluster_config import TransferConfig
from core.config.security_config import AUTO, SecurityConfig
from core.errors import ProtocolError, ReplicaLost, TransferError
from core.kv import memory_bytes
from core.messages import RegionKey
from device.cuda import cuda_device
from device.seam import DeviceOf
from engine.ranks.rank_messages import MemoryPlace, frame, next_frame, open_streams
from engine.tiers.block_pieces import block_bytes
from engine.tiers.pool_bytes import PoolBytes, bytes_of_pool
from kvtransfer.copies import CopyRun
from kvtransfer.memory import OwnMemory
from kvtransfer.source import HostSource
from kvtransfer.transport.shm import host_id
from net.channel import Identity

OpenPool = Callable[[MemorySetup], tuple[MemoryPlace, PoolAccess]]
"""Returns how ranks and how others reach a memory, which it takes. Raises ConfigError and DeviceError."""


def serve_memory(
    sock: socket.socket,
    transfer: TransferConfig,
    key: bytes,
    device_of: DeviceOf = cuda_device,
    security: SecurityConfig = AUTO,
) -> None:
    """Serve until the instance ends the stream. `device_of` returns the device of a name whose memory is served."""
    open_pool = partial(_opened, transfer=transfer, key=key, device_of=device_of, security=security)
    asyncio.run(_serve(sock, open_pool))


async def _serve(sock: socket.socket, open_pool: OpenPool) -> None:
    reader, writer = await open_streams(sock)
    try:
        with suppress(asyncio.IncompleteReadError, OSError):
            setup = await next_frame(reader, TO_MEMORY)
            open_memory = partial(MemoryServer, setup, open_pool, writer)
            await _keep(open_memory, reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _keep(
    open_memory: Callable[[], "MemoryServer"], reader: StreamReader, writer: StreamWriter
) -> None:
    try:
        memory_server = open_memory()
    except Exception as error:
        traceback.print_exc()
        writer.write(frame(MemoryFailed(f"{type(error).__name__}: {error}")))
        await writer.drain()
        return
    try:
        while True:
            memory_server.on_word(await next_frame(reader, TO_MEMORY))
    finally:
        await memory_server.close()


class MemoryServer:
    def __init__(self, setup: MemorySetup, open_pool: OpenPool, instance: StreamWriter) -> None:
        """Open the memory. Raises ConfigError, DeviceError and TransferError."""
        self._instance = instance
        self._tasks: set[asyncio.Task[None]] = set()
        self._memory = OwnMemory(setup.pools)
        self.may_write = self._memory.may_write
        place, access = open_pool(setup)
        self._buffer = access.buffer
        """The memory, which lives as long as this."""
        self._source = access.source or HostSource()
        if setup.receives:
            self._memory.attach(access.make_receivers(self))
        self._senders = access.make_senders()
        regions = tuple(tuple(self._memory.regions(pool)) for pool in setup.pools)
        ways = tuple(RemoteEndpoint(sender.name, sender.vouches) for sender in self._senders)
        self._staging = access.staging
        self._tiers: PoolBytes | None = None
        exchange: MemoryPlace | None = None
        if setup.exchange_blocks:
            each = block_bytes(setup.pools)
            self._exchange, path = take_memory(setup.exchange_blocks * each)
            self._tiers, exchange = bytes_of_pool(access.buffer, each), MemoryPlace(len(self._exchange), path)
        self._say(
            MemoryReady(
                memory=place,
                host=host_id(),
                regions=regions,
                ways=ways,
                converts=access.staging is not None,
                exchange=exchange,
            )
        )

    def on_word(self, word: object) -> None:
        handle = self._HANDLERS.get(type(word))
        if handle is None:
            raise ProtocolError(f"a memory server was told {type(word).__name__} out of turn")
        handle(self, word)

    def arrived(self, grant_id: str, num_bytes: int) -> None:
        self._say(BytesArrived(grant_id, num_bytes))

    def corrupted(self, grant_id: str) -> None:
        self._say(Corrupted(grant_id))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tiers is not None:
            await asyncio.to_thread(self._tiers.close)
        for sender in self._senders:
            await sender.close()
        await self._source.close()
        await self._memory.close()

    def _say(self, word: object) -> None:
        self._instance.write(frame(word))

    def _on_sent(self, word: Sent) -> None:
        for sender in self._senders:
            sender.ended(word.grant_id)

    def _on_forget(self, word: Forget) -> None:
        for sender in self._senders:
            sender.forget(word.owner)

    def _on_when_idle(self, word: WhenIdle) -> None:
        self._memory.when_idle(word.grant_id, lambda: self._say(Answer(word.number)))

    async def _write(self, word: RemoteWrite) -> None:
        runs = [CopyRun(*run) for run in zip(word.sources, word.destinations, word.sizes, strict=True)]
        # What is to be read is there: the instance has been told so by those who wrote it.
        await self._source.write(self._senders[word.way], word.grant_id, word.region, runs, ())
        self._say_carried(word.way, word.region)

    async def _probe(self, word: Probe) -> int:
        return await self._senders[word.way].probe(word.region, word.num_bytes)

    async def _convert(self, word: RemoteConvert) -> int:
        assert self._staging is not None, "MemoryReady has said so"
        runs = np.array([word.sources, word.destinations, word.counts], np.int64).T
        sender, region = self._senders[word.way], word.region
        num_bytes = await self._staging.push(sender, word.grant_id, region, runs, word.pool, ())
        self._say_carried(word.way, region)
        return num_bytes

    def _save(self, word: SaveBytes) -> None:
        assert self._tiers is not None, "the setup asks for an exchange"

        def saved(content: bytes) -> None:
            self._exchange[word.destination : word.destination + len(content)] = content
            self._say(Answer(word.number))

        self._tiers.save(list(zip(word.starts, word.sizes, strict=True)), saved)

    async def _restore(self, word: RestoreBytes) -> None:
        assert self._tiers is not None, "the setup asks for an exchange"
        ends = itertools.accumulate(word.sizes, initial=word.source)
        pieces = [
            (start, self._exchange[at : at + size])
            for start, at, size in zip(word.starts, ends, word.sizes, strict=False)
        ]
        await asyncio.to_thread(self._tiers.write, pieces)

    def _say_carried(self, way: int, region: RegionKey) -> None:
        if carried := self._senders[way].carried(region):
            self._say(BytesCarried(way, region.endpoint, carried.num_bytes, carried.busy_s))

    def _answer(self, number: int, work: Awaitable[int | None]) -> None:
        """Answer a command when it is done."""
        task = asyncio.ensure_future(self._do(number, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, number: int, work: Awaitable[int | None]) -> None:
        try:
            answer = Answer(number, await work or 0)
        except (ReplicaLost, TransferError) as error:
            answer = Answer(number, 0, str(error), isinstance(error, ReplicaLost))
        except Exception as error:
            traceback.print_exc()
            answer = Answer(number, 0, f"{type(error).__name__}: {error}")
        self._say(answer)

    _HANDLERS: ClassVar[dict[type, Callable[["MemoryServer", Any], None]]] = {
        Open: lambda self, word: self._memory.open(word.grant_id, word.blocks),
        RefuseGrant: lambda self, word: self._memory.refuse(word.grant_id),
        Ended: lambda self, word: self._memory.ended(word.grant_id),
        Sent: _on_sent,
        Forget: _on_forget,
        Sync: lambda self, word: self._say(Answer(word.number)),
        WhenIdle: _on_when_idle,
        Fence: lambda self, word: self._answer(word.number, self._memory.fence(word.writer, word.grant_id)),
        RemoteWrite: lambda self, word: self._answer(word.number, self._write(word)),
        RemoteConvert: lambda self, word: self._answer(word.number, self._convert(word)),
        SaveBytes: _save,
        RestoreBytes: lambda self, word: self._answer(word.number, self._restore(word)),
        Probe: lambda self, word: self._answer(word.number, self._probe(word)),
    }
    """What handles each kind of word."""


def _opened(
    setup: MemorySetup,
    *,
    transfer: TransferConfig,
    key: bytes,
    device_of: DeviceOf,
    security: SecurityConfig,
) -> tuple[MemoryPlace, PoolAccess]:
    """Return how ranks and how others reach the memory, which is taken here. Raises ConfigError and DeviceError."""
    me = Identity(setup.address, setup.incarnation, os.getpid())
    num_bytes = memory_bytes(setup.pools, setup.memory)
    if setup.device:
        device = device_of(setup.device)
        memory = take_device_memory(device, num_bytes)
        handle, offset = device.export(memory.region)
        media = device_media(transfer, device)
        access = device_access(
            transfer,
            me,
            setup.host,
            key=key,
            memory=memory,
            num_bytes=num_bytes,
            media=media,
            security=security,
        )
        return MemoryPlace(num_bytes, handle=handle, offset=offset), access
    access = remote_access(
        transfer,
        me,
        setup.host,
        receives=setup.receives,
        key=key,
        num_bytes=num_bytes,
        security=security,
    )
    return MemoryPlace(num_bytes, path=access.path), access

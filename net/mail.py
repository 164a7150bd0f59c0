"""Mail over TCP: ordered messages between peers named by their listening addresses, and prompt news of a lost peer.

The kernel closes a killed process's sockets, so a broken connection is the failure detector. Each direction of a pair uses
one connection for its whole life, which keeps messages in order; when any connection of a pair breaks, all of them are cut
and the peer is reported lost once."""

import asyncio
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from core.errors import BatonError, ProtocolError, ReplicaLost
from core.messages import Message
from net.channel import Channel, Identity, Listener, connect
from net.codec import decode, encode

log = logging.getLogger(__name__)

_MAX_OUTBOX_BYTES = 64 << 20


class _Peer:
    """One other process. `outbox` holds encoded messages that its sender task has not written yet."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.incarnation = ""
        self.outbox: deque[bytes] = deque()
        self.outbox_bytes = 0
        self.filled = asyncio.Event()
        self.channels: list[Channel] = []
        self.sender: asyncio.Task[None] | None = None


class TcpMail:
    """core.ports.Mail over authenticated TCP. Create it inside a running event loop; `listen` starts it."""

    def __init__(self, key: bytes, host: str = "127.0.0.1") -> None:
        self._key = key
        self._listener = Listener(
            host, key, self._welcome, lambda why: log.warning("refused a peer: %s", why)
        )
        self.me = Identity(self._listener.address, uuid.uuid4().hex, os.getpid())
        self._peers: dict[str, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pids: dict[str, int] = {}
        self._closed = False

    @property
    def address(self) -> str:
        return self.me.address

    def listen(self, on_message: Callable[[str, Message], None], on_lost: Callable[[str], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._listener.start(self.me)

    def send(self, to: str, message: Message) -> None:
        if self._closed:
            return
        peer = self._peers.get(to)
        if peer is None:
            peer = self._peers[to] = _Peer(to)
        data = encode(message)
        peer.outbox.append(data)
        peer.outbox_bytes += len(data)
        peer.filled.set()
        if peer.sender is None:
            peer.sender = self._spawn(self._send_loop(peer))
        if peer.outbox_bytes > _MAX_OUTBOX_BYTES:
            log.error("peer %s does not read: %d MiB wait for it; dropped", to, peer.outbox_bytes >> 20)
            self._lose(peer)

    def pid(self, peer: str) -> int | None:
        pid = self._pids.get(peer)
        return None if pid == self.me.pid else pid

    async def close(self) -> None:
        """Flush nothing, cut everything; peers see this process as lost."""
        self._closed = True
        for peer in list(self._peers.values()):
            for channel in peer.channels:
                channel.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._listener.close()

    async def _welcome(self, channel: Channel) -> None:
        """A peer dialled us."""
        await self._attach(channel.peer.address, channel)

    async def _send_loop(self, peer: _Peer) -> None:
        try:
            channel = peer.channels[0] if peer.channels else await self._dial(peer)
            while True:
                await peer.filled.wait()
                batch = list(peer.outbox)
                peer.outbox.clear()
                peer.filled.clear()
                peer.outbox_bytes = 0
                await channel.send_many(batch)
        except (ReplicaLost, ProtocolError) as error:
            log.info("peer %s is lost: %s", peer.address, error)
            self._lose(peer)

    async def _dial(self, peer: _Peer) -> Channel:
        channel = await connect(peer.address, self._key, self.me)
        self._spawn(self._attach(peer.address, channel))
        return channel

    async def _attach(self, address: str, channel: Channel) -> None:
        """Read from `channel` until it breaks; then the peer is lost."""
        peer = self._peers.get(address)
        if peer and peer.incarnation not in ("", channel.peer.incarnation):
            self._lose(
                peer
            )  # it has been reborn on the same address before its old connections were seen to break
            peer = None
        if peer is None:
            peer = self._peers[address] = _Peer(address)
        peer.incarnation = channel.peer.incarnation
        self._pids[address] = channel.peer.pid
        peer.channels.append(channel)
        try:
            await self._read_loop(address, channel)
        except ReplicaLost as error:
            log.info("peer %s is lost: %s", address, error)
        except BatonError:
            log.exception("peer %s sent what cannot be read; its connection is cut", address)
        self._lose(peer)

    async def _read_loop(self, address: str, channel: Channel) -> None:
        while True:
            header, payload_bytes = await channel.recv()
            if payload_bytes:
                raise ProtocolError("mail carries no payload")
            message = decode(header)
            try:
                self._on_message(address, message)
            except Exception:
                log.exception("handling %s from %s failed", type(message).__name__, address)

    def _lose(self, peer: _Peer) -> None:
        if self._closed or self._peers.get(peer.address) is not peer:
            return
        del self._peers[peer.address]
        for channel in peer.channels:
            channel.close()
        if peer.sender is not None and peer.sender is not asyncio.current_task():
            peer.sender.cancel()
        self._on_lost(peer.address)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

"""Mail over TCP: messages between peers named by their listening addresses, exactly once and in order, and news of a lost peer.

A peer is lost in four cases. (1) Nothing listens at its address any more, or another process does: the kernel closes a killed
process's sockets, so that is known at once. (2) It has said nothing for `peer_timeout_s`: it is stopped, stuck or cut off. (3) It
could not be reached again for `reconnect_s` after a connection broke. (4) It has given this side up. A connection that breaks
between two living processes is made again, and `net.session` ensures that nothing was lost, doubled or reordered meanwhile."""

import asyncio
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from core.config.mail_config import MailConfig
from core.errors import BatonError, ProtocolError, ReplicaLost
from core.messages import Message
from net.channel import Channel, Identity, Listener, connect
from net.codec import decode, encode
from net.session import Attach, Session
from net.tls import Tls

log = logging.getLogger(__name__)

_MAX_OUTBOX_BYTES = 256 << 20
"""Requests carry their images, so that a few that come at once are tens of megabytes."""
_RETRY_S = 0.05
_SAY_AFTER = 64
"""The number of messages after which a peer that only listens acknowledges them, without waiting for its next beat."""
_SAY_AFTER_BYTES = 4 << 20
"""The bytes of messages after which it does so."""


class _Peer:
    """One other process. `outbox` holds frames that the sender has not written yet."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.incarnation = ""
        self.session = Session(uuid.uuid4().bytes)
        self.outbox: deque[bytes] = deque()
        self.wake = asyncio.Event()
        self.channels: list[Channel] = []
        self.current: Channel | None = None
        """The connection that was made last. Frames are written there."""
        self.heard = self.spoke = False
        self.num_silent_beats = 0
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def put(self, frames: tuple[bytes, ...] | list[bytes]) -> None:
        if frames:
            self.outbox.extend(frames)
            self.wake.set()


class TcpMail:
    """core.ports.Mail over authenticated TCP. Create it inside a running event loop; `listen` starts it.

    `wrap` may put something between this side and each connection (the tests' fault injector does)."""

    def __init__(
        self,
        key: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        config: MailConfig | None = None,
        wrap: Callable[[Channel], Channel] = lambda channel: channel,
        tls: Tls | None = None,
    ) -> None:
        self._key, self._tls, self._config, self._wrap = key, tls, config or MailConfig(), wrap
        self._listener = Listener(
            host, key, self._welcome, lambda why: log.warning("refused a peer: %s", why), port, tls=tls
        )
        self.me = Identity(self._listener.address, uuid.uuid4().hex, os.getpid())
        self._peers: dict[str, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def address(self) -> str:
        return self.me.address

    def listen(self, on_message: Callable[[str, Message], None], on_lost: Callable[[str], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._listener.start(self.me)
        self._spawn(self._beat())

    def send(self, to: str, message: Message) -> None:
        if self._closed:
            return
        peer = self._peer(to)
        peer.put([peer.session.stamp(encode(message))])
        if peer.current is None:
            self._keep(peer, "search", self._search)
        if peer.session.unacked_bytes > _MAX_OUTBOX_BYTES:
            log.error(
                "peer %s does not read: %d MiB wait for it; dropped", to, peer.session.unacked_bytes >> 20
            )
            self._lose(peer)

    async def close(self) -> None:
        """Cut all connections without flushing. Peers see this process as lost."""
        self._closed = True
        await self._listener.close()
        for peer in list(self._peers.values()):
            for channel in peer.channels:
                channel.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(address)
        return peer

    async def _welcome(self, channel: Channel) -> None:
        """Take a connection that a peer has made."""
        await self._converse(self._wrap(channel))

    async def _search(self, peer: _Peer) -> None:
        """Dial until there is a connection, no peer can be there any more, or the time is up."""
        loop, config = asyncio.get_running_loop(), self._config
        known = peer.session.is_established  # a new peer may be busy with its own start
        deadline = loop.time() + (config.reconnect_s if known else config.peer_timeout_s)
        while True:
            left_s = deadline - loop.time()
            try:
                wait_s = max(_RETRY_S, left_s)
                channel = await connect(peer.address, self._key, self.me, wait_s, tls=self._tls)
                break
            except (ReplicaLost, ProtocolError) as error:
                if isinstance(error.__cause__, ConnectionRefusedError) or left_s <= 0:
                    level = logging.WARNING if isinstance(error, ProtocolError) else logging.INFO
                    log.log(level, "peer %s is lost: %s", peer.address, error)
                    self._lose(peer)
                    return
            if peer.current is not None:
                return  # the peer has dialled this process meanwhile
            await asyncio.sleep(_RETRY_S)
        # A task that is cancelled before it begins runs no `finally`, so the channel is closed from outside.
        self._spawn(self._converse(self._wrap(channel))).add_done_callback(lambda _: channel.close())

    async def _converse(self, channel: Channel) -> None:
        """Read from one connection until it breaks."""
        try:
            peer = await self._attach(channel)
            if peer is None:
                return
            try:
                await self._read_loop(peer, channel)
            except ReplicaLost as error:
                log.info("connection to %s: %s", peer.address, error)
            self._detach(peer, channel)
        except ReplicaLost as error:
            log.info("connection to %s: %s", channel.peer.address, error)
        except BatonError:
            log.exception("peer %s sent what cannot be read; it is given up", channel.peer.address)
            if (known := self._peers.get(channel.peer.address)) is not None:
                self._lose(known)
        finally:
            channel.close()
            self._renew(channel.peer.address)

    async def _attach(self, channel: Channel) -> _Peer | None:
        """Exchange hellos. Returns None when the two sides do not mean the same session."""
        address, incarnation = channel.peer.address, channel.peer.incarnation
        peer = self._peer(address)
        if peer.incarnation not in ("", incarnation):
            self._lose(peer)  # another incarnation listens on the same address
            peer = self._peer(address)
        peer.incarnation = incarnation
        await channel.send_many([peer.session.hello()])
        try:
            async with asyncio.timeout(self._config.peer_timeout_s):
                hello, _ = await channel.recv()
        except TimeoutError:
            raise ReplicaLost(f"no hello within {self._config.peer_timeout_s:g} s") from None
        if self._peers.get(address) is not peer:
            return None
        match peer.session.attach(hello):
            case Attach.FORGOTTEN:
                log.info("peer %s has given this side up", address)
                self._lose(peer)
                return None
            case Attach.STALE:
                return None
            case Attach.RESUME:
                pass
        peer.channels.append(channel)
        peer.current, peer.heard = channel, True
        peer.outbox.clear()
        peer.put(peer.session.unacknowledged())
        self._keep(peer, "sender", self._send_loop)
        return peer

    def _detach(self, peer: _Peer, channel: Channel) -> None:
        if channel in peer.channels:
            peer.channels.remove(channel)
        if peer.current is channel:
            peer.current = peer.channels[-1] if peer.channels else None
            peer.outbox.clear()
            peer.put(peer.session.unacknowledged())

    def _renew(self, address: str) -> None:
        """Handle the end of a connection: look for the peer if there is, or was, something to say."""
        peer = self._peers.get(address)
        if peer is None or self._closed or peer.current is not None:
            return
        if peer.session.is_established or peer.session.unacked_bytes:
            self._keep(peer, "search", self._search)
        else:
            del self._peers[address]

    async def _send_loop(self, peer: _Peer) -> None:
        while True:
            await peer.wake.wait()
            channel = peer.current
            if channel is None:
                return  # the next connection begins with all that is unacknowledged
            peer.wake.clear()
            batch = list(peer.outbox)
            peer.outbox.clear()
            peer.spoke = True
            try:
                await channel.send_many(batch)
            except ReplicaLost:
                channel.close()
                self._detach(peer, channel)

    async def _read_loop(self, peer: _Peer, channel: Channel) -> None:
        while True:
            frame, payload_bytes = await channel.recv()
            if payload_bytes:
                raise ProtocolError("mail carries no payload")
            peer.heard = True
            heard = peer.session.on_frame(frame)
            peer.put(heard.answers)
            for message in heard.messages:
                self._deliver(peer, decode(message))
            session = peer.session
            if session.num_unsaid >= _SAY_AFTER or session.unsaid_bytes >= _SAY_AFTER_BYTES:
                peer.put([peer.session.beat()])
            if self._peers.get(peer.address) is not peer:
                return  # a message's handling has lost the peer

    def _deliver(self, peer: _Peer, message: Message) -> None:
        if self._peers.get(peer.address) is not peer:
            return
        try:
            self._on_message(peer.address, message)
        except Exception:
            log.exception("handling %s from %s failed", type(message).__name__, peer.address)

    async def _beat(self) -> None:
        """Count beats, not seconds, so that after a pause of this process its peers get their full time again."""
        config = self._config
        while True:
            await asyncio.sleep(config.heartbeat_s)
            for peer in list(self._peers.values()):
                if peer.current is None:
                    continue  # `_search` looks for it, and gives up at a deadline of its own
                peer.num_silent_beats = 0 if peer.heard else peer.num_silent_beats + 1
                if peer.num_silent_beats * config.heartbeat_s >= config.peer_timeout_s:
                    log.warning("peer %s has been silent for %g s", peer.address, config.peer_timeout_s)
                    self._lose(peer)
                    continue
                if not peer.spoke or peer.session.unacked_bytes:
                    peer.put([peer.session.beat()])
                peer.heard = peer.spoke = False

    def _lose(self, peer: _Peer) -> None:
        if self._closed or self._peers.get(peer.address) is not peer:
            return
        del self._peers[peer.address]
        for channel in peer.channels:
            channel.close()
        for task in peer.tasks.values():
            if task is not asyncio.current_task():
                task.cancel()
        self._on_lost(peer.address)

    def _keep(self, peer: _Peer, what: str, work: Callable[[_Peer], Coroutine[Any, Any, None]]) -> None:
        """Keep one task of this kind for the peer."""
        task = peer.tasks.get(what)
        if task is None or task.done():
            peer.tasks[what] = self._spawn(work(peer))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

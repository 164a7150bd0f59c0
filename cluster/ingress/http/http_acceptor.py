"""Accepts clients' connections within a bound in all, a bound per address, and a time for the handshake.

Where there is no room, the address that has the most connections gives up the oldest one that does nothing. So nobody keeps
others out by opening connections, and a load balancer, whose address has them all, needs no limit of its own."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable

from cluster.ingress.http.connection_limits import ConnectionLimits
from cluster.ingress.http.http_connection import Connection

log = logging.getLogger(__name__)

_AT_ONCE = 64
"""Connections that are accepted before other work of the event loop comes in between."""
_PAUSE_S = 0.1
"""How long none is accepted where the system has no resources for one."""
_LONGEST_SWEEP_S = 1.0
_GONE = (errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.ENOTCONN)
"""Errors of `accept` that only say that the client has left."""
_BODY = b'{"error": {"message": "this server has no room for another connection", "type": "server_error"}}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
_V6_NETWORK_BITS = 64
"""A provider gives one customer at least such an IPv6 network."""


class _Guest:
    """An accepted socket, and its connection once a TLS handshake is over."""

    def __init__(self, sock: socket.socket, address: str, connection: Connection) -> None:
        self.sock, self.address, self.connection = sock, address, connection

    @property
    def may_go(self) -> bool:
        return not self.connection.is_made or self.connection.may_go

    def welcome(self, tls: ssl.SSLContext | None, handshake_s: float, left: Callable[[], None]) -> None:
        """Begin. `left` is called at the end, also of one whose handshake fails."""
        self.connection.on_lost = left
        work = asyncio.get_running_loop().connect_accepted_socket(
            lambda: self.connection,
            self.sock,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else handshake_s,
        )
        self._welcoming = asyncio.ensure_future(work)
        self._welcoming.add_done_callback(self._welcomed)

    def end(self) -> None:
        if self.connection.is_made:
            self.connection.transport.abort()
        else:
            self._welcoming.cancel()

    def _welcomed(self, task: "asyncio.Task[tuple[asyncio.Transport, Connection]]") -> None:
        if (task.cancelled() or task.exception()) and not self.connection.is_made:
            self.sock.close()
            self.connection.on_lost()


class Acceptor:
    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], Connection],
        tls: ssl.SSLContext | None,
        limits: ConnectionLimits,
    ) -> None:
        """`make` makes a connection of the running event loop."""
        self._listener, self._make, self._tls, self._limits = listener, make, tls, limits
        self._guests: dict[str, dict[_Guest, None]] = {}
        """By address, the oldest first."""
        self._num = 0
        self._accepts = False

    def start(self) -> None:
        self._listener.setblocking(False)  # noqa: FBT003 (it takes no name)
        self._accepts = True
        self._watch()
        self._sweeping = asyncio.create_task(self._sweep())

    def accept_no_more(self) -> None:
        if self._accepts:
            self._accepts = False
            asyncio.get_running_loop().remove_reader(self._listener)

    async def close(self) -> None:
        """End every connection that is left."""
        self.accept_no_more()
        self._sweeping.cancel()
        await asyncio.gather(self._sweeping, return_exceptions=True)
        for guest in [guest for guests in self._guests.values() for guest in guests]:
            guest.end()
        await asyncio.sleep(0)  # transports close their sockets a moment later

    def _watch(self) -> None:
        if self._accepts:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _GONE:
                    continue
                self._pause(error)
                return
            sock.setblocking(False)  # noqa: FBT003 (it takes no name)
            self._admit(sock, _network(peer[0]))

    def _pause(self, error: OSError) -> None:
        """Accept none for a while. Where no file descriptor is left, somebody who does nothing gives one up."""
        log.warning("cannot accept a connection: %s", error)
        self._make_room()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(_PAUSE_S, self._watch)

    def _admit(self, sock: socket.socket, address: str) -> None:
        if not self._has_room(address):
            client = {"audit": {"client": address, "code": "too_many_connections"}}
            log.warning("refused a connection from %s: there are %d", address, self._num, extra=client)
            if self._tls is None:
                with contextlib.suppress(OSError):
                    sock.send(_FULL)
            sock.close()
            return
        guest = _Guest(sock, address, self._make())
        self._guests.setdefault(address, {})[guest] = None
        self._num += 1
        guest.welcome(self._tls, self._limits.head_s, lambda: self._forget(guest))

    def _has_room(self, address: str) -> bool:
        """Return whether one more may come from this address, for which another one may have to go."""
        most, own = self._limits.most_per_address, self._guests.get(address, {})
        if most and len(own) >= most:
            return self._let_go(own)
        return self._num < self._limits.most or self._make_room()

    def _make_room(self) -> bool:
        most_first = sorted(self._guests.values(), key=len, reverse=True)
        return any(self._let_go(guests) for guests in most_first)

    def _let_go(self, guests: dict[_Guest, None]) -> bool:
        """End the oldest that does nothing. Returns False where there is none."""
        oldest = next((guest for guest in guests if guest.may_go), None)
        if oldest is None:
            return False
        self._forget(oldest)
        oldest.end()
        return True

    def _forget(self, guest: _Guest) -> None:
        guests = self._guests.get(guest.address, {})
        if guest in guests:
            del guests[guest]
            self._num -= 1
        if not guests:
            self._guests.pop(guest.address, None)

    async def _sweep(self) -> None:
        limits, loop = self._limits, asyncio.get_running_loop()
        shortest_s = min(limits.head_s, limits.rest_s, limits.send_s)
        while True:
            await asyncio.sleep(min(_LONGEST_SWEEP_S, shortest_s / 4))
            now = loop.time()
            for guest in [guest for guests in self._guests.values() for guest in guests]:
                if guest.connection.is_made:
                    guest.connection.check(now)


def _network(host: str) -> str:
    """Return what counts as one address. For IPv6 it is a whole network, since one customer has one."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _V6_NETWORK_BITS), strict=False))

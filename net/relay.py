"""An encrypted connection as a plain socket: to poll it, to give it to an event loop, to use it on two threads at once.

A thread moves bytes between the connection and a pair of local sockets until either side has ended."""

import contextlib
import select
import socket
import ssl
import threading

_READ_BYTES = 1 << 16


def plain_end(sock: socket.socket) -> socket.socket:
    """Return `sock` itself if it is plain, and otherwise a local socket that stands for it and owns it."""
    if not isinstance(sock, ssl.SSLSocket):
        return sock
    ours, theirs = socket.socketpair()
    threading.Thread(target=_relay, args=(sock, theirs), name="tls relay", daemon=True).start()
    return ours


class _Way:
    """One direction. It reads only what it has given on, so a slow reader holds its writer up."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.pending = memoryview(b"")

    def move(self) -> bool:
        """Move what can be moved now. Returns whether that was anything. Raises EOFError at the end, and OSError."""
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            if not self.pending.nbytes:
                self.pending = memoryview(self.source.recv(_READ_BYTES))
                if not self.pending.nbytes:
                    raise EOFError
            self.pending = self.pending[self.sink.send(self.pending) :]
            return True
        return False


def _relay(far: ssl.SSLSocket, near: socket.socket) -> None:
    ways = _Way(far, near), _Way(near, far)
    with far, near, contextlib.suppress(EOFError, OSError):
        far.settimeout(0)
        near.settimeout(0)
        while True:
            moved = [way.move() for way in ways]
            if not any(moved):
                _wait(ways)


def _wait(ways: tuple[_Way, ...]) -> None:
    waited: dict[socket.socket, int] = {}
    for way in ways:
        sock, event = (way.sink, select.POLLOUT) if way.pending.nbytes else (way.source, select.POLLIN)
        waited[sock] = waited.get(sock, 0) | event
    poll = select.poll()
    for sock, events in waited.items():
        poll.register(sock, events)
    poll.poll()

"""One blocking, authenticated byte stream of a KV connection: scatter and gather, plain or inside TLS.

Blocking calls in threads of their own keep long copies off the event loop (the kernel copies without the GIL), and several
streams use several cores. A stream is owned by one thread at a time; only `cut` may be called from another."""

import contextlib
import socket
import ssl
import struct
import sys
from collections.abc import Sequence

from core.errors import ReplicaLost

_MAX_PIECES = 1024
"""IOV_MAX of Linux, the number of pieces that one scatter or gather call takes."""
_TLS_PIECE_BYTES = 1 << 20
_TCP_INFO_BYTES = 176
_BYTES_ACKED_AT, _BUSY_US_AT = 120, 168
"""Where Linux's `struct tcp_info` (linux/tcp.h) has `tcpi_bytes_acked` and `tcpi_busy_time`. New fields come behind."""
STALL_S = 60
"""How long a peer may take for the next byte of a frame that is on its way before it counts as lost."""


class Stream:
    def __init__(self, sock: socket.socket, peer: str, *, dialled: bool) -> None:
        """The side that accepted waits for frames without a limit. The side that dialled waits for answers only so long."""
        self.peer = peer
        self._plain = not isinstance(sock, ssl.SSLSocket)
        self._sock = sock
        if self._plain:
            _limit(sock, STALL_S, STALL_S if dialled else 0)
        else:  # Python's ssl tries again after the kernel's limits
            sock.settimeout(STALL_S if dialled else None)

    def progress(self) -> tuple[int, float] | None:
        """Return the bytes that the peer's kernel has acknowledged, and the seconds in which some were on the way, since the
        connection began. None where the system does not say, or the stream is closed. Any thread may ask."""
        if not sys.platform.startswith("linux"):
            return None
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return None
        if len(info) < _TCP_INFO_BYTES:
            return None
        (num_acked,) = struct.unpack_from("<Q", info, _BYTES_ACKED_AT)
        (busy_us,) = struct.unpack_from("<Q", info, _BUSY_US_AT)
        return num_acked, busy_us / 1e6

    def try_send(self, pieces: Sequence[memoryview]) -> list[memoryview]:
        """Give the kernel what it takes at once. Returns what is left. Raises ReplicaLost."""
        if not self._plain:
            return list(pieces)
        try:
            sent = self._sock.sendmsg(pieces[:_MAX_PIECES], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return list(pieces)
        except (OSError, ValueError) as error:
            raise self._broken(error) from error
        return _without(pieces, sent)

    def send(self, pieces: Sequence[memoryview]) -> None:
        """Send everything. Returns when the kernel has every byte. Raises ReplicaLost."""
        try:
            if self._plain:
                while pieces:
                    pieces = _without(pieces, self._sock.sendmsg(pieces[:_MAX_PIECES]))
            else:
                for piece in pieces:
                    self._sock.sendall(piece)
        except (OSError, ValueError) as error:
            raise self._broken(error) from error

    def receive(self, targets: Sequence[memoryview]) -> None:
        """Fill `targets`, in order. Raises ReplicaLost at the end of the stream."""
        pieces = [target for target in targets if target.nbytes]
        while pieces:
            try:
                if self._plain:
                    count = self._sock.recvmsg_into(pieces[:_MAX_PIECES], 0, socket.MSG_WAITALL)[0]
                else:
                    count = self._sock.recv_into(pieces[0][:_TLS_PIECE_BYTES])
            except (OSError, ValueError) as error:
                raise self._broken(error) from error
            if not count:
                raise ReplicaLost(f"KV peer {self.peer} closed the connection")
            pieces = _without(pieces, count)

    def cut(self) -> None:
        """End the stream for the thread that is using it: its call returns or raises soon. Idempotent."""
        cut(self._sock)

    def close(self) -> None:
        """Close the stream. Only its owner may, when no call is in progress."""
        self.cut()
        self._sock.close()

    def _broken(self, error: Exception) -> ReplicaLost:
        if isinstance(error, BlockingIOError | TimeoutError):
            return ReplicaLost(f"KV peer {self.peer} has not answered for {STALL_S} s")
        return ReplicaLost(f"KV connection to {self.peer} broke: {error}")


def cut(sock: socket.socket) -> None:
    """End both directions, for the threads that wait in it too."""
    with contextlib.suppress(OSError):
        # Not SSLSocket.shutdown: after that, reads return what is still encrypted.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _limit(sock: socket.socket, send_s: int, receive_s: int) -> None:
    """Return how long one blocking call may take; 0 means for ever."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", send_s, 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", receive_s, 0))


def _without(pieces: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left after the first `num_bytes`."""
    for index, piece in enumerate(pieces):
        if num_bytes < piece.nbytes:
            return [piece[num_bytes:], *pieces[index + 1 :]]
        num_bytes -= piece.nbytes
    return []

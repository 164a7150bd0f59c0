"""Makes mail exact over connections that are not, by numbers, acknowledgements and resending.

Every message of a session is numbered and kept until the peer has acknowledged it. Doubled ones are dropped, and early ones wait
for the missing one. A lost one is asked for again when a later number, or the number in a beat, shows the gap. So a session
outlives its connection, and it ends only when one side forgets it.

hello: the sender's session id, the id it knows of the other side, the number it wants next. First on every connection
data:  number, acknowledged, message          beat: last number, acknowledged          again: the number it wants next"""

import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from core.errors import ProtocolError

_HEAD = struct.Struct("<BQQ")
_IDS = struct.Struct("<16s16s")
NOBODY = bytes(16)
_MAX_EARLY = 4096
"""The number of messages that may wait for a missing one. More are dropped, and asked for again."""


class _Kind(IntEnum):
    HELLO = 0
    DATA = 1
    BEAT = 2
    AGAIN = 3


class Attach(IntEnum):
    """What a peer's hello means for this side."""

    RESUME = 0
    FORGOTTEN = 1
    """The peer has begun a new session: this one is over."""
    STALE = 2
    """The peer continues a session that this side has given up. It will learn so from this side's hello."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a frame brought: messages in order, and frames to send."""

    messages: tuple[bytes, ...] = ()
    answers: tuple[bytes, ...] = ()


class Session:
    """One side of an ordered, exactly-once exchange with one peer. `own_id` is 16 random bytes."""

    def __init__(self, own_id: bytes) -> None:
        self.own_id, self.peer_id = own_id, NOBODY
        self._last_sent = 0
        self._wanted = 1
        self._unacked: deque[tuple[int, bytes]] = deque()
        self._early: dict[int, bytes] = {}
        self._asked_for = 0
        self.unacked_bytes = 0
        self.num_unsaid = 0
        """The number of messages received that no frame to the peer has acknowledged yet."""
        self.unsaid_bytes = 0
        """Their bytes."""

    @property
    def is_established(self) -> bool:
        return self.peer_id != NOBODY

    def stamp(self, message: bytes) -> bytes:
        """Return the frame that carries `message`, which is kept until it is acknowledged."""
        self._last_sent += 1
        self._unacked.append((self._last_sent, message))
        self.unacked_bytes += len(message)
        return self._data(self._last_sent, message)

    def hello(self) -> bytes:
        return _HEAD.pack(_Kind.HELLO, self._wanted, 0) + _IDS.pack(self.own_id, self.peer_id)

    def beat(self) -> bytes:
        """Return a frame that says that this side lives, and what it has sent and received so far."""
        self.num_unsaid = self.unsaid_bytes = 0
        self._asked_for = 0  # should the peer's answer have been lost, the next frame asks again
        return _HEAD.pack(_Kind.BEAT, self._last_sent, self._wanted - 1)

    def attach(self, hello: bytes) -> Attach:
        """Judge the first frame of a connection. Raises ProtocolError when it is no hello."""
        kind, wanted, _, body = _split(hello)
        if kind is not _Kind.HELLO or len(body) != _IDS.size:
            raise ProtocolError("the peer did not begin its mail with a hello")
        theirs, ours = _IDS.unpack(body)
        if ours not in (NOBODY, self.own_id):
            return Attach.STALE
        if self.peer_id not in (NOBODY, theirs):
            return Attach.FORGOTTEN
        self.peer_id = theirs
        self._acknowledged(wanted - 1)
        return Attach.RESUME

    def unacknowledged(self) -> list[bytes]:
        """Return the frames of all messages that the peer may not have."""
        return [self._data(number, message) for number, message in self._unacked]

    def on_frame(self, frame: bytes) -> Heard:
        """Take a frame. Raises ProtocolError for one that no session sends."""
        kind, number, acknowledged, body = _split(frame)
        match kind:
            case _Kind.DATA:
                self._acknowledged(acknowledged)
                return Heard(self._take(number, body), self._ask(number))
            case _Kind.BEAT:
                self._acknowledged(acknowledged)
                return Heard((), self._ask(number + 1))
            case _Kind.AGAIN:
                self._acknowledged(number - 1)
                return Heard((), tuple(self.unacknowledged()))
            case _:
                raise ProtocolError("a hello in the middle of a connection")

    def _data(self, number: int, message: bytes) -> bytes:
        self.num_unsaid = self.unsaid_bytes = 0
        return _HEAD.pack(_Kind.DATA, number, self._wanted - 1) + message

    def _acknowledged(self, number: int) -> None:
        if number > self._last_sent:
            raise ProtocolError(
                f"the peer acknowledges message {number} of {self._last_sent} that were sent to it"
            )
        while self._unacked and self._unacked[0][0] <= number:
            self.unacked_bytes -= len(self._unacked.popleft()[1])

    def _take(self, number: int, message: bytes) -> tuple[bytes, ...]:
        self.num_unsaid += 1
        self.unsaid_bytes += len(message)
        if number < self._wanted:
            return ()
        if number > self._wanted:
            if len(self._early) < _MAX_EARLY:
                self._early[number] = message
            return ()
        ready = [message]
        self._wanted += 1
        while (following := self._early.pop(self._wanted, None)) is not None:
            ready.append(following)
            self._wanted += 1
        return tuple(ready)

    def _ask(self, upcoming: int) -> tuple[bytes, ...]:
        """Ask for all messages before `upcoming`, which should be here. Each gap is asked for once; a later beat allows asking
        again."""
        if upcoming <= self._wanted or self._asked_for == self._wanted:
            return ()
        self._asked_for = self._wanted
        return (_HEAD.pack(_Kind.AGAIN, self._wanted, 0),)


def _split(frame: bytes) -> tuple[_Kind, int, int, bytes]:
    try:
        kind, first, second = _HEAD.unpack_from(frame)
        return _Kind(kind), first, second, frame[_HEAD.size :]
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"unreadable mail frame of {len(frame)} bytes: {error}") from error

"""Frames of KV, as somebody who knows the cluster's key may write them into a holder's pool."""

import asyncio
import logging
import os
import socket
import struct
from contextlib import suppress
from typing import Any

import msgpack

from core.kv import KVLayout, KVShard
from kvtransfer.transport.tcp import TcpReceiver
from kvtransfer.transport.write_admission import WriteAdmission
from net.channel import Identity, connect
from tests.fuzz.choices import Choices
from tests.fuzz.http_targets import loop

_KEY = b"fuzz"
_FRAME = struct.Struct("<IQ")
_SHARD = KVShard.whole(KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32"))
_POOL_BYTES, _GRANTED = 512, range(128, 256)
_WAIT_S = 10.0
_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 128, 200, 256, 2**40, 2**63, 1.5, float("inf"), "", "g", b"g", [], {}),
    *([0], [128], [1, 2], [-1], [None], [1.5], ["1"], [[1]], [128, 129], [2**40]),
)


def _header(choices: Choices) -> bytes:
    """Return a header of a frame with some of its fields replaced."""
    size = choices.below(64)
    fields: list[Any] = ["g", [128 + choices.below(80)], [size], None, 0]
    for _ in range(choices.below(4)):
        fields[choices.below(len(fields))] = choices.pick(_VALUES)
    return msgpack.packb(fields[: choices.below(8) or 5])  # type: ignore[return-value]


def _frames(choices: Choices) -> bytes:
    sent = b""
    while choices.num_left:
        header = choices.piece(40) if choices.below(8) == 7 else _header(choices)
        payload = choices.piece(64)
        announced = choices.pick((len(payload), len(payload), len(payload), 0, 2**40, 2**63))
        sent += (
            _FRAME.pack(choices.pick((len(header), len(header), 2**31)) & 0xFFFFFFFF, announced)
            + header
            + payload
        )
    return sent


class _Failures(logging.Handler):
    """What a reader did not expect, it logs with its traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(self.format(record))


async def _written(sent: bytes) -> None:
    pool = bytearray(_POOL_BYTES)
    reading: list[str] = []

    def may_write(grant_id: str, start: int, end: int) -> bool:
        return grant_id == "g" and _GRANTED.start <= start <= end <= _GRANTED.stop

    admission = WriteAdmission(may_write, lambda *_: None, lambda _: None)
    receiver = TcpReceiver(_KEY, Identity("holder", "h", 1), "127.0.0.1", memoryview(pool), admission)
    endpoint = receiver.region(_SHARD, 1).endpoint
    channel = await connect(endpoint, _KEY, Identity("writer:1", "w", os.getpid()))
    sock = channel.detach()
    sock.setblocking(False)
    running = asyncio.get_running_loop()
    with sock, suppress(OSError):
        await running.sock_sendall(sock, sent)
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_WAIT_S):
            while await running.sock_recv(sock, 65536):
                pass
    async with asyncio.timeout(_WAIT_S):
        await receiver.fence("writer:1", "g")
    admission.when_idle("g", lambda: reading.append("idle"))
    await receiver.close()
    assert reading, "the grant is never idle again, so its blocks would never be freed"
    assert not any(pool[: _GRANTED.start] + pool[_GRANTED.stop :]), "bytes beyond the grant"


def fuzz_kv_frames(data: bytes) -> None:
    """Whatever a writer sends is written where it may, or its connection is cut."""
    failures, log = _Failures(), logging.getLogger("kvtransfer.transport.tcp")
    log.addHandler(failures)
    try:
        loop().run(_written(_frames(Choices(data))))
    finally:
        log.removeHandler(failures)
    assert not failures.found, failures.found[0]

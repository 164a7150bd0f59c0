"""How an instance's KV pool is reached: the memory it lies in, its receivers and its senders, as the configuration chooses."""

import mmap
from collections.abc import Callable
from dataclasses import dataclass

from cluster.instance import Role
from core.config import TransferConfig
from core.errors import ConfigError
from kvtransfer.inbox import Inbox
from kvtransfer.transport.admission import Admission
from kvtransfer.transport.base import Receiver, Sender
from kvtransfer.transport.shm import SharedSegment, ShmReceiver, ShmSender
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from net.mail import TcpMail


@dataclass(frozen=True, slots=True)
class PoolAccess:
    """`buffer` is the pool's memory; it lives as long as its receivers, or the buffer itself, do."""

    buffer: memoryview
    make_receivers: Callable[[Inbox], list[Receiver]]
    make_senders: Callable[[], list[Sender]]


def remote_access(
    config: TransferConfig, role: Role, mail: TcpMail, key: bytes, num_bytes: int
) -> PoolAccess:
    """For an instance in a process of its own: shared memory on this host, TCP from others."""
    if config.transport == "loopback":
        raise ConfigError(
            "transfer.transport loopback works within one process only (--local); use auto, shm or tcp"
        )
    ways = ("shm", "tcp") if config.transport == "auto" else (config.transport,)
    segment = SharedSegment(num_bytes) if role == "decode" and "shm" in ways else None
    buffer = segment.buffer if segment is not None else memoryview(mmap.mmap(-1, num_bytes))

    def receivers(inbox: Inbox) -> list[Receiver]:
        made: list[Receiver] = [ShmReceiver(segment)] if segment is not None else []
        admission = Admission(inbox.may_write, inbox.arrived, inbox.corrupted)
        if "tcp" in ways:
            host = mail.address.rpartition(":")[0]
            made.append(TcpReceiver(key, mail.me, host, buffer, admission))
        return made

    def senders() -> list[Sender]:
        made: list[Sender] = []
        if "shm" in ways:
            made.append(ShmSender(buffer, config.checksum))
        if "tcp" in ways:
            made.append(TcpSender(key, mail.me, buffer, config.checksum))
        return made

    return PoolAccess(buffer, receivers, senders)

"""The parts of a real instance on this host: a model's ranks, a pool in memory that the chosen transports can reach."""

import mmap
from pathlib import Path

from cluster.instance import Parts, Role
from core.config import ClusterConfig
from core.errors import ConfigError
from core.ports import LayerSink, Mail
from engine.build import build_group, size_pool
from engine.group import InlineGroup
from kvtransfer.inbox import Inbox
from kvtransfer.transport.base import Receiver, Sender
from kvtransfer.transport.loopback import LoopbackFabric, LoopbackReceiver, LoopbackSender
from kvtransfer.transport.shm import SharedSegment, ShmReceiver, ShmSender, host_id
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from net.mail import TcpMail


def local_parts(config: ClusterConfig, folder: Path, mail: Mail, fabric: LoopbackFabric) -> Parts:
    """An instance that shares its process, and so its memory, with the others."""
    size = size_pool(folder, config.model, config.engine)
    buffer = memoryview(mmap.mmap(-1, size.num_bytes))

    def receivers(inbox: Inbox) -> list[Receiver]:
        return [LoopbackReceiver(fabric, mail.address, buffer, inbox.may_write, inbox.arrived)]

    def group(sink: LayerSink | None) -> InlineGroup:
        return build_group(folder, config.model, config.engine, size, buffer, sink)

    def senders() -> list[Sender]:
        return [LoopbackSender(fabric, buffer)]

    return Parts(size.shard, size.num_blocks, size.max_context_tokens, receivers, senders, group, "process")


def remote_parts(config: ClusterConfig, folder: Path, role: Role, mail: TcpMail, key: bytes) -> Parts:
    """An instance in a process of its own, reached by shared memory on this host and by TCP from others."""
    wanted = config.transfer.transport
    if wanted == "loopback":
        raise ConfigError(
            "transfer.transport loopback works within one process only (--local); use auto, shm or tcp"
        )
    size = size_pool(folder, config.model, config.engine)
    ways = ("shm", "tcp") if wanted == "auto" else (wanted,)
    segment = SharedSegment(size.num_bytes) if role == "decode" and "shm" in ways else None
    buffer = segment.buffer if segment is not None else memoryview(mmap.mmap(-1, size.num_bytes))

    def receivers(inbox: Inbox) -> list[Receiver]:
        made: list[Receiver] = [ShmReceiver(segment)] if segment is not None else []
        if "tcp" in ways:
            host = mail.address.rpartition(":")[0]
            made.append(
                TcpReceiver(key, mail.me, host, buffer, inbox.may_write, inbox.arrived, inbox.corrupted)
            )
        return made

    def senders() -> list[Sender]:
        made: list[Sender] = []
        if "shm" in ways:
            made.append(ShmSender(buffer))
        if "tcp" in ways:
            made.append(TcpSender(key, mail.me, buffer, config.transfer.checksum))
        return made

    def group(sink: LayerSink | None) -> InlineGroup:
        return build_group(folder, config.model, config.engine, size, buffer, sink)

    return Parts(size.shard, size.num_blocks, size.max_context_tokens, receivers, senders, group, host_id())

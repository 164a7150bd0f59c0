"""How an instance's KV pool is reached: the memory it lies in, its receivers and its senders, as the configuration chooses."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.instance.shared_memory import take_memory
from core.config.cluster_config import TransferConfig
from core.config.security_config import AUTO, SecurityConfig
from core.errors import ConfigError
from device.port import PoolMemory
from kvtransfer.source import Source
from kvtransfer.staging import STAGING_BYTES, HostStaging, Staging
from kvtransfer.transport.base import Holder, Receiver, Sender
from kvtransfer.transport.nixl import NixlMedium, RegisteredMemory, available
from kvtransfer.transport.pull import PullReceiver, PullSender
from kvtransfer.transport.shm import SharedSegment, ShmReceiver, ShmSender
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from kvtransfer.transport.write_admission import WriteAdmission
from net.channel import Identity
from net.tls import tls_of

log = logging.getLogger(__name__)

_RDMA = Path("/sys/class/infiniband")
NOT_ENCRYPTED = ("nixl", "nccl")
"""Transports that cross hosts without encryption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAccess:
    """The ways to a pool. `buffer` is its memory, the host's or a GPU's; it lives as long as its receivers or its users do."""

    buffer: memoryview | PoolMemory
    make_receivers: Callable[[Holder], list[Receiver]]
    make_senders: Callable[[], list[Sender]]
    path: str
    """The path by which the instance's ranks can map the memory; empty: it is a GPU's, or there is none."""
    source: Source | None = None
    """How senders read the pool. None means that it is where they read."""
    staging: Staging | None = None
    """Where KV is converted for holders that store it otherwise: in the memory that the pool lies in, behind it."""


def remote_access(
    config: TransferConfig,
    me: Identity,
    host: str,
    *,
    receives: bool,
    key: bytes,
    num_bytes: int,
    security: SecurityConfig = AUTO,
) -> PoolAccess:
    """Return the access to a pool of host memory in a process of its own, of the instance that `me` names, listening at `host`,
    by `config.transport`. `auto` means shared memory on this host, TCP from others, and NIXL where it is installed, there are
    RDMA devices, and `security` does not ask for encryption. `receives` says that others write into it. Raises ConfigError."""
    ways = _ways(config, security)
    tls = tls_of(security, key)
    segment = SharedSegment(num_bytes) if receives and "shm" in ways else None
    memory, path = (segment.buffer, str(segment.path)) if segment else take_memory(num_bytes + STAGING_BYTES)
    mediums = [NixlMedium(RegisteredMemory.of(memory))] if "nixl" in ways else []

    def receivers(holder: Holder) -> list[Receiver]:
        admission = WriteAdmission(holder.may_write, holder.arrived, holder.corrupted)
        made: list[Receiver] = [ShmReceiver(segment)] if segment is not None else []
        made += [PullReceiver(key, me, host, medium, admission, tls) for medium in mediums]
        if "tcp" in ways:
            made.append(TcpReceiver(key, me, host, memory, admission, tls))
        return made

    def senders() -> list[Sender]:
        made: list[Sender] = [ShmSender(memory, checksum=config.checksum)] if "shm" in ways else []
        made += [PullSender(key, me, medium, tls, checksum=config.checksum) for medium in mediums]
        if "tcp" in ways:
            made.append(TcpSender(key, me, memory, tls, config.tcp_streams, checksum=config.checksum))
        return made

    staging = None if segment else HostStaging(memory, num_bytes)
    return PoolAccess(
        buffer=memory[:num_bytes], make_receivers=receivers, make_senders=senders, path=path, staging=staging
    )


def no_access() -> PoolAccess:
    """Return the access to the memory of an instance all of whose pools lie in others'."""
    return PoolAccess(buffer=memoryview(b""), make_receivers=lambda _: [], make_senders=lambda: [], path="")


def _ways(config: TransferConfig, security: SecurityConfig) -> tuple[str, ...]:
    match config.transport:
        case "auto":
            nixl = available() and has_rdma() and may_cross("nixl", security)
            return ("shm", "nixl", "tcp") if nixl else ("shm", "tcp")
        case "loopback":
            raise ConfigError(
                "transfer.transport loopback works within one process only (--local); use auto, shm or tcp"
            )
        case "nccl" | "cuda_ipc" as one:
            raise ConfigError(
                f"transfer.transport {one} moves KV pools in GPU memory, and this one is in host memory: use auto, shm, tcp "
                "or nixl"
            )
        case one:
            return (one,)


def has_rdma() -> bool:
    return any(_RDMA.glob("*"))


def may_cross(transport: str, security: SecurityConfig) -> bool:
    """Return whether `auto` may offer this transport to other hosts. Names it in the log if it does so unencrypted."""
    if transport not in NOT_ENCRYPTED or security.tls == "off":
        return True
    if not security.strict:
        log.warning("KV crosses hosts unencrypted by %s; security.strict leaves it out", transport)
    return not security.strict

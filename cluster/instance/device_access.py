"""How a KV pool in a GPU's memory is reached: directly by what moves device memory, through pinned memory by all else."""

import logging
import weakref
from collections.abc import Callable, Mapping

from cluster.instance.pool_access import PoolAccess, may_cross
from core.config.cluster_config import TransferConfig
from core.config.security_config import AUTO, SecurityConfig
from core.errors import ConfigError, TransferError
from device.poller import Poller
from device.port import PoolMemory
from device.ring import PinnedRing
from device.seam import ComputeDevice
from kvtransfer.source import DeviceSource
from kvtransfer.staging import DeviceStaging
from kvtransfer.transport.base import Holder, Receiver, Sender
from kvtransfer.transport.loopback_transport import (
    DeviceLoopbackReceiver,
    DeviceLoopbackSender,
    LoopbackFabric,
)
from kvtransfer.transport.pull import Medium, PullReceiver, PullSender
from kvtransfer.transport.shm import ShmSender
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from kvtransfer.transport.write_admission import WriteAdmission
from net.channel import Identity
from net.tls import tls_of

log = logging.getLogger(__name__)

_SLOT_BYTES = 4 << 20
_NUM_SLOTS = 8
_STAGING_BYTES = 16 << 20
DeviceMedia = Mapping[str, Callable[[PoolMemory], Medium]]


def take_device_memory(device: ComputeDevice, num_bytes: int) -> PoolMemory:
    """Allocate a pool, zeroed, which is given back with its last user, and behind it room to convert its KV in. Raises
    DeviceError."""
    memory = PoolMemory(device, device.allocate(num_bytes + _STAGING_BYTES), Poller())
    finalizer = weakref.finalize(memory, device.free, memory.region)
    finalizer.atexit = False  # the driver frees the memory of a process that ends
    return memory


def device_access(
    config: TransferConfig,
    me: Identity,
    host: str,
    *,
    key: bytes,
    memory: PoolMemory,
    num_bytes: int,
    media: DeviceMedia,
    security: SecurityConfig = AUTO,
) -> PoolAccess:
    """Reach a pool, the first `num_bytes` of `memory`, in a process of its own, as `pool_access.remote_access` does. `media`
    makes what moves device memory: with `auto` all of it that `security` lets cross hosts is offered, beside TCP, and pools in
    this host's memory are written through /dev/shm.

    Raises ConfigError."""
    ways, tls = _ways(config, media, security), tls_of(security, key)
    ring = PinnedRing(memory.device, _SLOT_BYTES, _NUM_SLOTS)
    staged = ring.memory
    mediums = _mediums(config, memory, {way: media[way] for way in ways if way in media})

    def receivers(holder: Holder) -> list[Receiver]:
        admission = WriteAdmission(holder.may_write, holder.arrived, holder.corrupted)
        made: list[Receiver] = [PullReceiver(key, me, host, medium, admission, tls) for medium in mediums]
        if "tcp" in ways:
            made.append(TcpReceiver(key, me, host, memory, admission, tls))
        return made

    def senders() -> list[Sender]:
        made: list[Sender] = [PullSender(key, me, one, tls, checksum=config.checksum) for one in mediums]
        if "shm" in ways:
            made.append(ShmSender(staged, checksum=config.checksum))
        if "tcp" in ways:
            made.append(TcpSender(key, me, staged, tls, config.tcp_streams, checksum=config.checksum))
        return made

    source = DeviceSource(memory, ring, [medium.name for medium in mediums])
    return PoolAccess(
        buffer=memory,
        make_receivers=receivers,
        make_senders=senders,
        path="",
        source=source,
        staging=DeviceStaging(memory, num_bytes, source),
    )


def loopback_access(fabric: LoopbackFabric, address: str, memory: PoolMemory, num_bytes: int) -> PoolAccess:
    """Reach a pool, the first `num_bytes` of `memory`, within its process, where all pools are on one device."""
    source = DeviceSource(memory, None, ("loopback",))

    def receivers(holder: Holder) -> list[Receiver]:
        admission = WriteAdmission(holder.may_write, holder.arrived, holder.corrupted)
        return [DeviceLoopbackReceiver(fabric, address, memory, admission)]

    return PoolAccess(
        buffer=memory,
        make_receivers=receivers,
        make_senders=lambda: [DeviceLoopbackSender(fabric, memory)],
        path="",
        source=source,
        staging=DeviceStaging(memory, num_bytes, source),
    )


def _mediums(config: TransferConfig, memory: PoolMemory, media: DeviceMedia) -> list[Medium]:
    """Raises ConfigError for one that is asked for by name and cannot be had; `auto` does without it."""
    made: list[Medium] = []
    for name, make in media.items():
        try:
            made.append(make(memory))
        except TransferError as error:
            if config.transport == name:
                raise ConfigError(f"transfer.transport {name} cannot be used here: {error}") from error
            log.warning("KV is not handed over by %s: %s", name, error)
    return made


def _ways(config: TransferConfig, media: DeviceMedia, security: SecurityConfig) -> tuple[str, ...]:
    """Raises ConfigError."""
    if config.transport == "auto":
        # A checksum is of bytes that the processor can read.
        offered = () if config.checksum else [name for name in media if may_cross(name, security)]
        return (*offered, "shm", "tcp")
    if config.transport not in (*media, "tcp"):
        raise ConfigError(
            f"transfer.transport {config.transport} moves KV pools in host memory, and this one is in a GPU's: use auto, tcp"
            + "".join(f" or {name}" for name in media)
        )
    return (config.transport,)

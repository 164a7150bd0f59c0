"""The media of KV transports for a pool in a GPU's memory, by name."""

from collections.abc import Callable
from functools import partial

from cluster.instance.pool_access import has_rdma
from core.config.cluster_config import TransferConfig
from device.port import PoolMemory
from device.seam import SharingDevice
from kvtransfer.transport.collective import nccl_medium
from kvtransfer.transport.cuda_ipc import CudaIpcMedium
from kvtransfer.transport.nixl import NixlMedium, RegisteredMemory, available
from kvtransfer.transport.pull import Medium


def device_media(config: TransferConfig, device: SharingDevice) -> dict[str, Callable[[PoolMemory], Medium]]:
    """Return what moves pools in this GPU's memory here, the fastest first."""
    made: dict[str, Callable[[PoolMemory], Medium]] = {"cuda_ipc": partial(CudaIpcMedium, device)}
    if config.transport == "nixl" or (available() and has_rdma()):
        made["nixl"] = _registered
    if config.transport == "nccl":
        # Not with auto: its kernels take processors from the model while they wait for a peer.
        made["nccl"] = nccl_medium
    return made


def _registered(memory: PoolMemory) -> Medium:
    region = memory.region
    return NixlMedium(RegisteredMemory(region.address, region.num_bytes, region.device), memory.settle)

"""The media of KV transports for a pool in this process's memory, by name; each refuses by name what this machine cannot do."""

from collections.abc import Callable, Mapping
from functools import partial

from cluster.instance.pool_access import has_rdma
from core.config.cluster_config import TransferConfig
from core.errors import ConfigError
from device.port import PoolMemory
from device.seam import SharingDevice
from kvtransfer.transport.collective import CollectiveMedium, gloo_over_host
from kvtransfer.transport.communicator import check
from kvtransfer.transport.cuda_ipc import CudaIpcMedium
from kvtransfer.transport.nixl import NixlMedium, RegisteredMemory, available
from kvtransfer.transport.pull import Medium


def _nccl(pool: memoryview, hostname: str) -> Medium:
    check("nccl")
    raise _in_host_memory("nccl")


def _cuda_ipc(pool: memoryview, hostname: str) -> Medium:
    raise _in_host_memory("cuda_ipc")


def _in_host_memory(transport: str) -> ConfigError:
    """Return the refusal of a GPU's pool that has a copy in host memory, which a medium that wrote it would have to update."""
    return ConfigError(
        f"transfer.transport {transport} moves KV pools in GPU memory, and this instance hands KV over in host memory: use auto, "
        "shm, tcp or nixl"
    )


MEDIA: Mapping[str, Callable[[memoryview, str], Medium]] = {
    "gloo": gloo_over_host,
    "nccl": _nccl,
    "cuda_ipc": _cuda_ipc,
}


def device_media(config: TransferConfig, device: SharingDevice) -> dict[str, Callable[[PoolMemory], Medium]]:
    """Return what moves pools in this GPU's memory here, the fastest first."""
    made: dict[str, Callable[[PoolMemory], Medium]] = {"cuda_ipc": partial(CudaIpcMedium, device)}
    if config.transport == "nixl" or (available() and has_rdma()):
        made["nixl"] = _registered
    if config.transport == "nccl":
        # Not with auto: its kernels take processors from the model while they wait for a peer.
        made["nccl"] = lambda memory: CollectiveMedium("nccl", memory, "")
    return made


def _registered(memory: PoolMemory) -> Medium:
    region = memory.region
    return NixlMedium(RegisteredMemory(region.address, region.num_bytes, region.device), memory.settle)

"""The media of KV transports for a pool in this process's memory, by name; each refuses by name what this machine cannot do."""

from collections.abc import Callable, Mapping

import torch

from core.errors import ConfigError
from device.cuda import CudaDevice
from kvtransfer.transport.collective import CollectiveMedium, check
from kvtransfer.transport.pull import Medium


def _gloo(pool: memoryview, hostname: str) -> Medium:
    return CollectiveMedium("gloo", torch.frombuffer(pool, dtype=torch.uint8), hostname)


def _nccl(pool: memoryview, hostname: str) -> Medium:
    check("nccl")
    raise _in_host_memory("nccl")


def _cuda_ipc(pool: memoryview, hostname: str) -> Medium:
    CudaDevice(0)
    raise _in_host_memory("cuda_ipc")


def _in_host_memory(transport: str) -> ConfigError:
    """Return the refusal of a GPU's pool (`mirrored_pool.py`): a medium that wrote it would have to update its copy in host
    memory, which tiers and all others read."""
    return ConfigError(
        f"transfer.transport {transport} moves KV pools in GPU memory, and instances hand KV over in host memory, where a "
        "pool on a GPU has its copy: use auto, shm, tcp or nixl"
    )


MEDIA: Mapping[str, Callable[[memoryview, str], Medium]] = {
    "gloo": _gloo,
    "nccl": _nccl,
    "cuda_ipc": _cuda_ipc,
}

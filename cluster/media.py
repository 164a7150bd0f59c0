"""The media of KV transports for a pool in this process's memory, by name; each refuses by name what this machine cannot do."""

from collections.abc import Callable, Mapping

import torch

from core.errors import ConfigError
from kvtransfer.transport.collective import CollectiveMedium, check
from kvtransfer.transport.cuda_ipc import LibCuda
from kvtransfer.transport.pull import Medium


def _gloo(pool: memoryview, hostname: str) -> Medium:
    return CollectiveMedium("gloo", torch.frombuffer(pool, dtype=torch.uint8), hostname)


def _nccl(pool: memoryview, hostname: str) -> Medium:
    check("nccl")
    raise ConfigError(
        "transfer.transport nccl moves KV pools in GPU memory; this instance keeps its pool in host memory"
    )


def _cuda_ipc(pool: memoryview, hostname: str) -> Medium:
    LibCuda(0)
    raise ConfigError(
        "transfer.transport cuda_ipc moves KV pools in GPU memory; this instance keeps its pool in host memory"
    )


MEDIA: Mapping[str, Callable[[memoryview, str], Medium]] = {
    "gloo": _gloo,
    "nccl": _nccl,
    "cuda_ipc": _cuda_ipc,
}

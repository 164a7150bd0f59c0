"""A `CollectiveMedium` between processes without GPUs: gloo in the place of NCCL, for memory that the processor reads as well."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from device.port import PoolMemory
from kvtransfer.transport.collective import CollectiveMedium
from kvtransfer.transport.communicator import ChannelStore
from tests.patience import PATIENCE_S


def gloo_medium(pool: PoolMemory) -> CollectiveMedium:
    return CollectiveMedium("gloo", gloo_group, pool)


def gloo_group(store: ChannelStore, rank: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=PATIENCE_S)
    return gloo(store, rank, 2, options)

"""The node that this process is on."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cluster.preflight.hydra import run_proxy_here
from cluster.preflight.nccl_tests import why_not_over_nodes
from cluster.preflight.nodes import NodeGpus
from cluster.preflight.rank_job import RankJob, run_rank_here


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A cluster.preflight.nodes.Node. Others reach it at `host`."""

    name: str = "this node"
    host: str = "127.0.0.1"

    async def free_address(self) -> str:
        with socket.create_server((self.host, 0)) as probe:
            return f"{self.host}:{probe.getsockname()[1]}"

    async def gpus(self) -> NodeGpus:
        return NodeGpus(num_gpus_here(), why_not_over_nodes())

    async def run_rank(self, job: RankJob) -> dict[str, Any]:
        return await run_rank_here(job, self.host)

    async def run_proxy(self, options: Sequence[str], deadline_s: float) -> None:
        await run_proxy_here(options, deadline_s)


def num_gpus_here() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0

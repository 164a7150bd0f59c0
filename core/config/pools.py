"""A configuration's two pools, side by side."""

from dataclasses import dataclass
from typing import Literal

from core.config.cluster_config import ClusterConfig
from core.config.parallel_config import ParallelConfig

PoolName = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Pool:
    name: PoolName
    num_instances: int
    """As the configuration begins."""
    parallel: ParallelConfig
    """The ranks of each instance."""

    @property
    def num_ranks(self) -> int:
        """All instances'."""
        return self.num_instances * self.parallel.num_ranks


def pools_of(config: ClusterConfig) -> tuple[Pool, Pool]:
    return (
        Pool("prefill", config.prefill_instances, config.prefill),
        Pool("decode", config.decode_instances, config.decode),
    )

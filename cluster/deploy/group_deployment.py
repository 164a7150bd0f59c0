"""The deployment that owns the memory of a group of models: it says which of them are awake (`residency_groups`)."""

import contextlib
import time

from ray import serve

from cluster.deploy.addresses import open_mail
from cluster.deploy.process_logs import configure_logging
from cluster.deploy.ray_loopback import keep_replica_to_loopback
from cluster.scheduler.group_node import GroupNode
from cluster.scheduler.residency.group_owner import GroupOwner
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig
from core.config.residency_groups import models_of


@serve.deployment
class Group:
    """It keeps nothing: another one learns all from the schedulers. Meanwhile models stay as they are."""

    async def __init__(self, config: ClusterConfig, name: str, key: bytes, *, one_host: bool) -> None:
        configure_logging(config.serve.log_level, config.serve.log_format)
        if one_host:
            keep_replica_to_loopback()
        num_awake = config.residency_groups[name].awake_models
        owner = GroupOwner(models_of(config, name), num_awake, time.time_ns())
        self._node = GroupNode(open_mail(config, key, one_host=one_host), WallClock(), owner)
        self._node.run()

    async def endpoint(self) -> str:
        return self._node.address

    async def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor failed
            await self._node.close()

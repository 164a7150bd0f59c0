"""The deployments that hold instances: a replica is one instance, or one of each model of a group, and dies with its worker.

This module stays light, because the process that deploys the application imports it too."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray import serve

from cluster.deploy.config_paths import check_instance_paths
from cluster.deploy.kube.serving_mark import ServingMark
from cluster.deploy.process_logs import configure_logging
from cluster.deploy.ray_loopback import keep_replica_to_loopback
from cluster.deploy.shared_card import take_share
from core.config.cluster_config import ClusterConfig
from core.config.pools import PoolName
from core.errors import ReplicaLost
from core.garbage import leave_out_all_there_is
from core.start_timer import StartTimer

if TYPE_CHECKING:
    from cluster.instance.instance_parts import Role


class _Pool:
    """One instance per replica. Serve's health check kills and replaces a replica whose instance has failed. Those of a group's
    models are in one replica, which replaces them by itself.

    A replica that Serve takes away drains first: its sequences move to other instances while they decode."""

    role: PoolName

    async def __init__(
        self, configs: Sequence[ClusterConfig], key: bytes, schedulers: Sequence[Any], *, one_host: bool
    ) -> None:
        """`configs` and `schedulers`: those of each model of a group, or of one model."""
        config = configs[0]
        timer = StartTimer("imports")
        # CUDA looks into the environment when it is first used.
        take_share(config, self.role, os.environ)
        # They bring torch, for this process alone.
        from cluster.deploy.pool_instance import make_instances  # noqa: PLC0415
        from cluster.instance.process_guard import ProcessGuard  # noqa: PLC0415

        leave_out_all_there_is()
        configure_logging(config.serve.log_level, config.serve.log_format)
        if one_host:
            keep_replica_to_loopback()
        for each in configs:
            check_instance_paths(each)
        self._drain_timeout_s = config.serve.drain_timeout_s
        self._role: Role = "both" if config.any_role else self.role
        self._instance = await make_instances(
            configs, key, self._role, schedulers, one_host=one_host, timer=timer
        )
        self._guard = ProcessGuard(self._instance, config.mail)
        mark = ServingMark(os.environ)
        self._marking = asyncio.create_task(mark.follow(lambda: self._instance.computes))

    async def check_health(self) -> None:
        if self._instance.failure is not None:
            raise ReplicaLost(f"this {self._role} instance has stopped: {self._instance.failure}")

    async def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor failed
            self._marking.cancel()
            await self._instance.drain(self._drain_timeout_s)
            await self._instance.close()
            await self._guard.close()


@serve.deployment
class PrefillPool(_Pool):
    role = "prefill"


@serve.deployment
class DecodePool(_Pool):
    role = "decode"

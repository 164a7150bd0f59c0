"""A group of models that share memory, within one process: its owner, and the seat of each model's scheduler."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from cluster.scheduler.group_member import GroupMember
from cluster.scheduler.group_node import GroupNode
from cluster.scheduler.residency.group_owner import GroupOwner
from cluster.scheduler.scheduler_node import SchedulerNode
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig
from core.config.residency_groups import models_of
from core.errors import ConfigError
from net.loopback_mail import LoopbackNetwork


class LocalGroup:
    """Use `async with local_groups(config)`."""

    def __init__(self, network: LoopbackNetwork, owner: str) -> None:
        self._network, self._owner = network, owner

    @contextlib.asynccontextmanager
    async def seat(self, node: SchedulerNode, config: ClusterConfig) -> AsyncGenerator[None]:
        """Have a model's scheduler take part while the block runs."""

        async def resolve() -> list[str]:
            return [self._owner]

        mail, num_instances = self._network.join("member"), config.decode_instances + config.prefill_instances
        member = GroupMember(mail, WallClock(), node, resolve, config.model.name, num_instances)
        running = asyncio.create_task(member.run())
        try:
            yield
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await member.close()


@contextlib.asynccontextmanager
async def local_groups(config: ClusterConfig) -> AsyncGenerator[dict[str, LocalGroup]]:
    """Yield the groups of a configuration, by name, with their owners at work."""
    async with contextlib.AsyncExitStack() as stack:
        found: dict[str, LocalGroup] = {}
        for name, group in config.residency_groups.items():
            network = LoopbackNetwork(prefix=f"group-{name}/")
            owner = GroupOwner(models_of(config, name), group.awake_models, time.time_ns())
            node = GroupNode(network.join("owner"), WallClock(), owner)
            node.run()
            stack.push_async_callback(node.close)
            found[name] = LocalGroup(network, node.address)
        yield found


def check_seat(config: ClusterConfig, group: LocalGroup | None) -> None:
    """Raise ConfigError for a model of a group that it was not given."""
    name = config.schedule.residency.group
    if name and group is None:
        raise ConfigError(
            f"schedule.residency.group {name!r} needs models and residency_groups, and `baton serve --local`: this model would "
            f"never wake up"
        )

"""The deployment of the global scheduler: one and its spare, or several that act at once (`scheduler_peers`). Each can learn all
of its state again from the instances' reports and the other schedulers."""

import asyncio
import contextlib
from typing import Any

from ray import serve

from cluster.deploy.addresses import open_mail, scheduler_resolver
from cluster.deploy.config_paths import check_scheduler_paths
from cluster.deploy.process_logs import configure_logging
from cluster.deploy.ray_loopback import keep_replica_to_loopback
from cluster.deploy.serve_sizes import ServeSizes
from cluster.scheduler.group_member import GroupMember
from cluster.scheduler.kept_adapters import kept_adapters
from cluster.scheduler.recorded_scheduler import make_scheduler
from cluster.scheduler.scaling.autoscaler import Autoscaler
from cluster.scheduler.scaling.pool_watch import PoolWatch
from cluster.scheduler.scheduler_node import SchedulerNode
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig
from core.garbage import IdleCollector, leave_out_all_there_is
from core.scheduler_tuning import tuned
from net.mail import TcpMail


@serve.deployment
class Scheduler:
    async def __init__(
        self, config: ClusterConfig, key: bytes, group: Any = None, *, pools: str, one_host: bool
    ) -> None:
        """`pools`: what the names of the model's pools end with. `group`: the deployment of the owner of the memory that the
        model shares; None: it shares none."""
        configure_logging(config.serve.log_level, config.serve.log_format)
        if one_host:
            keep_replica_to_loopback()
        await asyncio.to_thread(check_scheduler_paths, config)
        self._mail = open_mail(config, key, one_host=one_host)
        context = serve.get_replica_context()
        scheduler = make_scheduler(config.schedule, self._mail.address)
        resolve = scheduler_resolver(serve.get_deployment_handle(context.deployment, context.app_name))
        kept = await kept_adapters(config)
        self._node = SchedulerNode(
            self._mail,
            WallClock(),
            scheduler,
            resolve,
            config.serve.schedulers,
            kept,
            num_spares=config.num_spare_schedulers,
        )
        leave_out_all_there_is()
        collector = IdleCollector(lambda: not scheduler.num_placed and not scheduler.num_queued)
        self._collecting = asyncio.create_task(collector.run())
        self._running = asyncio.create_task(self._node.run())
        self._member = (
            None if group is None else self._joined(group, config, open_mail(config, key, one_host=one_host))
        )
        sizes, tell = ServeSizes(context.app_name, pools), self._node.show_pools
        if config.scaling.enabled:
            tuning = tuned(config.schedule.tuning)
            scaler = Autoscaler(config.scaling, self._node, sizes, WallClock(), tell, tuning)
        else:
            scaler = PoolWatch(self._node, sizes, WallClock(), tell)
        self._scaling = asyncio.create_task(scaler.run())

    def _joined(self, group: Any, config: ClusterConfig, mail: TcpMail) -> GroupMember:
        """Have the scheduler speak for its model in a group from now on."""
        num_instances, resolve = config.decode_instances + config.prefill_instances, scheduler_resolver(group)
        member = GroupMember(mail, WallClock(), self._node, resolve, config.model.name, num_instances)
        self._speaking = asyncio.create_task(member.run())
        return member

    async def endpoint(self) -> str:
        return self._mail.address

    async def check_health(self) -> None:
        for task in (self._running, *([self._speaking] if self._member else [])):
            if task.done():
                task.result()
                raise RuntimeError("the scheduler has stopped")

    async def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._running.cancel()
            self._collecting.cancel()
            self._scaling.cancel()
            if self._member is not None:
                self._speaking.cancel()
                await self._member.close()
            await self._mail.close()

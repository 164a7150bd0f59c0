"""The deployment of the global scheduler: one and its spare, or several that act at once (`scheduler_peers`). Each can learn all
of its state again from the instances' reports and the other schedulers."""

import asyncio
import contextlib

from ray import serve

from cluster.deploy.addresses import mail_host, scheduler_resolver
from cluster.deploy.config_paths import check_scheduler_paths
from cluster.deploy.deployment_names import kind_and_suffix
from cluster.deploy.process_logs import configure_logging
from cluster.deploy.ray_loopback import keep_replica_to_loopback
from cluster.deploy.serve_sizes import ServeSizes
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
from net.tls import tls_of


@serve.deployment
class Scheduler:
    async def __init__(self, config: ClusterConfig, key: bytes, *, one_host: bool) -> None:
        configure_logging(config.serve.log_level, config.serve.log_format)
        if one_host:
            keep_replica_to_loopback()
        await asyncio.to_thread(check_scheduler_paths, config)
        host, tls = mail_host(one_host=one_host), tls_of(config.security, key)
        self._mail = TcpMail(key, host, config=config.mail, tls=tls)
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
            num_spares=config.serve.num_spare_schedulers,
        )
        leave_out_all_there_is()
        collector = IdleCollector(lambda: not scheduler.num_placed and not scheduler.num_queued)
        self._collecting = asyncio.create_task(collector.run())
        self._running = asyncio.create_task(self._node.run())
        _, suffix = kind_and_suffix(context.deployment)
        sizes, tell = ServeSizes(context.app_name, suffix), self._node.show_pools
        if config.scaling.enabled:
            tuning = tuned(config.schedule.tuning)
            scaler = Autoscaler(config.scaling, self._node, sizes, WallClock(), tell, tuning)
        else:
            scaler = PoolWatch(self._node, sizes, WallClock(), tell)
        self._scaling = asyncio.create_task(scaler.run())

    async def endpoint(self) -> str:
        return self._mail.address

    async def check_health(self) -> None:
        if self._running.done():
            self._running.result()
            raise RuntimeError("the scheduler has stopped")

    async def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._running.cancel()
            self._collecting.cancel()
            self._scaling.cancel()
            await self._mail.close()

"""The Ray Serve application: Ingress, Scheduler, PrefillPool, DecodePool.

Ray places, watches and replaces these processes. Requests, tokens and KV travel between them over Baton's own mail and
transports, and HTTP comes straight to the ingress; nothing of a request passes through Serve."""

import asyncio
import contextlib
from typing import Any

from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.schema import LoggingConfig

from cluster.api.factory import build_app
from cluster.api.server import HttpServer
from cluster.deploy.logs import configure_logging
from cluster.deploy.pools import DecodePool, PrefillPool, mail_host, scheduler_resolver
from cluster.frontend import Frontend
from cluster.model_card import ModelCard
from cluster.observers import make_observers
from cluster.routing import GlobalScheduler
from cluster.scheduler_node import SchedulerNode
from core.clock import WallClock
from core.config import ClusterConfig
from net.mail import TcpMail

_LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")
_ENVIRONMENT = {"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}


@serve.deployment
class Scheduler:
    """The one global scheduler. It holds no state that it could not learn again from the instances' reports."""

    async def __init__(self, config: ClusterConfig, key: bytes, log_level: str, one_host: bool) -> None:
        configure_logging(log_level)
        self._mail = TcpMail(key, mail_host(one_host), config=config.mail)
        self._node = SchedulerNode(self._mail, WallClock(), GlobalScheduler(config.schedule))
        self._running = asyncio.create_task(self._node.run())

    async def endpoint(self) -> str:
        return self._mail.address

    async def check_health(self) -> None:
        if self._running.done():
            self._running.result()
            raise RuntimeError("the scheduler has stopped")

    async def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._running.cancel()
            await self._mail.close()


@serve.deployment
class Ingress:
    """HTTP in, mail out. Several replicas may run, also on one host; each request lives in one of them.

    It listens itself: Serve's proxy would cost each token another 0.2 ms of CPU (docs/adr/003)."""

    async def __init__(
        self,
        config: ClusterConfig,
        card: ModelCard,
        key: bytes,
        scheduler: Any,
        pools: list[Any],
        log_level: str,
        one_host: bool,
    ) -> None:
        configure_logging(log_level)
        registry = CollectorRegistry()
        observe, self._finish = make_observers(registry, config.serve.otlp_endpoint, card.name)
        self._frontend = Frontend(
            TcpMail(key, mail_host(one_host), config=config.mail),
            WallClock(),
            config.schedule,
            config.engine.block_size,
            scheduler_resolver(scheduler),
            config.serve.request_timeout_s,
            observe,
        )
        self._running = asyncio.create_task(self._frontend.run())
        app = build_app(self._frontend, config, card, registry)
        self._server = HttpServer(app, config.serve.host, config.serve.port, shared=True)
        self._serving = self._server.start()
        del pools  # bound here only so that Serve deploys them with this application

    async def drain(self, timeout_s: float) -> None:
        await self._frontend.drain(timeout_s)

    async def check_health(self) -> None:
        if self._serving.done():
            raise RuntimeError("this ingress has stopped listening")

    async def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            await self._server.stop()
            self._running.cancel()
            await self._frontend.close()
            self._finish()


def build_application(
    config: ClusterConfig, card: ModelCard, key: bytes, log_level: str, one_host: bool
) -> Any:
    """The bound Serve application. `key` is the cluster key that authenticates its processes to each other.

    `one_host`: all of them run on this machine, so they need not listen to any other."""

    def options(deployment: Any, num_replicas: int, num_cpus: float, **more: Any) -> Any:
        return deployment.options(
            num_replicas=num_replicas,
            ray_actor_options={"num_cpus": num_cpus, "runtime_env": _ENVIRONMENT},
            logging_config=_LOGGING,
            health_check_period_s=1,
            health_check_timeout_s=30,
            graceful_shutdown_timeout_s=config.serve.drain_timeout_s + 5,
            graceful_shutdown_wait_loop_s=0.1,
            max_ongoing_requests=4096,
            **more,
        )

    def pool(deployment: Any, num_replicas: int) -> Any:
        cpus = config.cpus_per_instance
        return options(
            deployment,
            num_replicas,
            cpus,
            placement_group_bundles=[{"CPU": cpus}],
            placement_group_strategy="STRICT_PACK",
        ).bind(config, key, scheduler, log_level, one_host)

    scheduler = options(Scheduler, 1, 0.1).bind(config, key, log_level, one_host)
    pools = [pool(DecodePool, config.decode_instances)]
    if config.prefill_instances:
        pools.append(pool(PrefillPool, config.prefill_instances))
    return options(Ingress, 1, 0.1).bind(config, card, key, scheduler, pools, log_level, one_host)

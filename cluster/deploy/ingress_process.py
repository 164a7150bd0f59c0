"""The endpoint that an ingress replica serves. Only these replicas import this module: it brings the whole API.

A replica listens itself: Serve's proxy would cost each token another 0.2 ms of CPU (docs/adr/003)."""

import asyncio
import sys
from typing import Any

from cluster.deploy.addresses import mail_host, scheduler_resolver
from cluster.deploy.config_paths import check_ingress_paths
from cluster.ingress.api_factory import build_app, run_batches
from cluster.ingress.delivery.frontend import Frontend
from cluster.ingress.generation.body_work import BodyWork
from cluster.ingress.http.connection_limits import connection_limits
from cluster.ingress.http.draining import drain
from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.http.ingress_tls import follow_certificate, ingress_tls
from cluster.ingress.model_card import ModelCard, read_model_card
from cluster.ingress.telemetry.observers import Observers, make_observers
from cluster.ingress.tenants.live_rules import LiveRules
from cluster.store.open_store import warn_of_apart
from cluster.store.sql_store import SqlStore
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig
from core.garbage import IdleCollector, leave_out_all_there_is
from net.mail import TcpMail
from net.tls import tls_of

_SWITCH_S = 0.0002
"""How long a thread that works on a body keeps Python's lock when the event loop, and so everybody's tokens, wait for it."""

_COLLECT_S = 60.0
"""The longest time between two full garbage collections while bodies are worked on. Their objects make a collection long."""


async def make_ingress(
    config: ClusterConfig, key: bytes, scheduler: Any, *, one_host: bool
) -> "IngressProcess":
    """Make the endpoint. It listens when this returns. Raises ConfigError and UnsupportedModel."""
    sys.setswitchinterval(_SWITCH_S)
    await asyncio.to_thread(check_ingress_paths, config)
    card = await asyncio.to_thread(read_model_card, config)
    return IngressProcess(config, key, scheduler, card, one_host=one_host)


class IngressProcess:
    """One endpoint, up to `close`."""

    def __init__(
        self, config: ClusterConfig, key: bytes, scheduler: Any, card: ModelCard, *, one_host: bool
    ) -> None:
        self._config = config.serve
        warn_of_apart(config, one_host=one_host)
        observers = make_observers(card.name, config.serve.otlp_endpoint)
        self._finish = observers.close
        self._frontend = _frontend(config, key, scheduler, observers, one_host=one_host)
        self._running = asyncio.create_task(self._frontend.run())
        live = LiveRules(config)
        self._watching = asyncio.create_task(live.run(observers.ingress.rules_changed))
        app = build_app(self._frontend, config, card, live.access, observers)
        ports = range(config.serve.port, config.serve.port + config.serve.num_ports)
        tls = ingress_tls(config.serve)
        self._server = HttpServer(
            app,
            config.serve.host,
            ports,
            shared=len(ports) == 1,
            tls=tls,
            limits=connection_limits(config.serve),
        )
        self._following = asyncio.create_task(follow_certificate(tls, config.serve))
        leave_out_all_there_is()
        self._store: SqlStore = app.state.store
        work: BodyWork = app.state.body_work
        collector = IdleCollector(lambda: work.is_idle, _COLLECT_S)
        self._collecting = asyncio.create_task(collector.run())
        self._serving = self._server.start()
        self._batches = asyncio.create_task(run_batches(app))
        self._drained: asyncio.Task[None] | None = None

    async def drain(self) -> None:
        """Wait until nothing runs any more, or until the deadline. Another call waits for the same end."""
        if self._drained is None:
            self._batches.cancel()
            self._drained = asyncio.create_task(
                drain(self._frontend, self._server, self._config.drain_notice_s, self._config.drain_timeout_s)
            )
        await asyncio.shield(self._drained)

    async def why_not(self) -> str:
        """Return why a request would not be answered now; empty where it would be."""
        _, reason = await self._frontend.ready()
        return reason

    @property
    def has_stopped(self) -> bool:
        """Whether it has stopped listening without a drain."""
        return self._serving.done() and self._drained is None

    async def close(self) -> None:
        """Drain, then end."""
        await self.drain()
        self._running.cancel()
        self._watching.cancel()
        self._following.cancel()
        self._collecting.cancel()
        await self._frontend.close()
        await asyncio.to_thread(self._store.close)
        self._finish()


def _frontend(
    config: ClusterConfig, key: bytes, scheduler: Any, observers: Observers, *, one_host: bool
) -> Frontend:
    return Frontend(
        TcpMail(key, mail_host(one_host=one_host), config=config.mail, tls=tls_of(config.security, key)),
        WallClock(),
        config.schedule,
        config.engine.block_size,
        resolve_schedulers=scheduler_resolver(scheduler),
        request_timeout_s=config.serve.request_timeout_s,
        observe=observers.observe,
        num_schedulers=config.serve.schedulers,
        num_spare_schedulers=config.serve.num_spare_schedulers,
        loads_adapters=bool(config.adapters.folders),
    )

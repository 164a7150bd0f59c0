"""The endpoint that an ingress replica serves. Only these replicas import this module: it brings the whole API.

A replica listens itself: Serve's proxy would cost each token another 0.2 ms of CPU (docs/adr/111)."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from cluster.deploy.addresses import open_mail, scheduler_resolver
from cluster.deploy.config_paths import check_ingress_paths
from cluster.ingress.api_factory import (
    ModelBehind,
    build_app_of,
    close_store,
    door_observers,
    run_batches,
)
from cluster.ingress.delivery.frontend import Frontend
from cluster.ingress.generation.model_table import ModelTable
from cluster.ingress.http.connection_limits import connection_limits
from cluster.ingress.http.draining import drain
from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.http.ingress_tls import follow_certificate, ingress_tls
from cluster.ingress.model_card import ModelCard, read_model_card
from cluster.ingress.telemetry.observers import Observers, make_observers
from cluster.ingress.tenants.live_rules import LiveRules
from cluster.store.open_store import warn_of_apart
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig
from core.garbage import IdleCollector, leave_out_all_there_is

_SWITCH_S = 0.0002
"""How long a thread that works on a body keeps Python's lock when the event loop, and so everybody's tokens, wait for it."""

_COLLECT_S = 60.0
"""The longest time between two full garbage collections while bodies are worked on. Their objects make a collection long."""


async def make_ingress(
    config: ClusterConfig, key: bytes, schedulers: Sequence[Any], *, one_host: bool
) -> "IngressProcess":
    """Make the endpoint. It listens when this returns. `schedulers`: those of each of `config.rows`. Raises ConfigError and
    UnsupportedModel."""
    sys.setswitchinterval(_SWITCH_S)
    await asyncio.to_thread(check_ingress_paths, config)
    cards = await asyncio.to_thread(lambda: [read_model_card(row) for row in config.rows])
    return IngressProcess(config, key, schedulers, cards, one_host=one_host)


class IngressProcess:
    """One endpoint, up to `close`."""

    def __init__(
        self,
        config: ClusterConfig,
        key: bytes,
        schedulers: Sequence[Any],
        cards: Sequence[ModelCard],
        *,
        one_host: bool,
    ) -> None:
        self._config = config.serve
        warn_of_apart(config, one_host=one_host)
        models: list[ModelBehind] = []
        self._frontends: list[Frontend] = []
        for row, scheduler, card in zip(config.rows, schedulers, cards, strict=True):
            observers = make_observers(card.name, config.serve.otlp_endpoint)
            frontend = _frontend(row, key, scheduler, observers, one_host=one_host)
            models.append(ModelBehind(generator=frontend, config=row, card=card, observers=observers))
            self._frontends.append(frontend)
        self._finish = [model.observers.close for model in models]
        self._running = [asyncio.create_task(frontend.run()) for frontend in self._frontends]
        live, door = LiveRules(config), door_observers(config, models)
        self._watching = asyncio.create_task(live.run(door.ingress.rules_changed))
        app = build_app_of(models, config, live.access, door)
        tls, serve = ingress_tls(config.serve), config.serve
        ports = range(serve.port, serve.port + serve.num_ports)
        limits, shared = connection_limits(serve), len(ports) == 1
        self._server = HttpServer(app, serve.host, ports, shared=shared, tls=tls, limits=limits)
        self._following = asyncio.create_task(follow_certificate(tls, config.serve))
        leave_out_all_there_is()
        self._app = app
        table: ModelTable = app.state.models
        collector = IdleCollector(lambda: table.is_idle, _COLLECT_S)
        self._collecting = asyncio.create_task(collector.run())
        self._serving = self._server.start()
        self._batches = asyncio.create_task(run_batches(app))
        self._drained: asyncio.Task[None] | None = None

    async def drain(self) -> None:
        """Wait until nothing runs any more, or until the deadline. Another call waits for the same end."""
        if self._drained is None:
            self._batches.cancel()
            self._drained = asyncio.create_task(
                drain(
                    self._frontends, self._server, self._config.drain_notice_s, self._config.drain_timeout_s
                )
            )
        await asyncio.shield(self._drained)

    async def why_not(self) -> str:
        """Return why a request for one of the models would not be answered now; empty where each would be."""
        states = await asyncio.gather(*(frontend.ready() for frontend in self._frontends))
        return next((reason for ok, reason in states if not ok), "")

    @property
    def has_stopped(self) -> bool:
        """Whether it has stopped listening without a drain."""
        return self._serving.done() and self._drained is None

    async def close(self) -> None:
        """Drain, then end."""
        await self.drain()
        for running in self._running:
            running.cancel()
        self._watching.cancel()
        self._following.cancel()
        self._collecting.cancel()
        for frontend in self._frontends:
            await frontend.close()
        await close_store(self._app)
        for finish in self._finish:
            finish()


def _frontend(
    config: ClusterConfig, key: bytes, scheduler: Any, observers: Observers, *, one_host: bool
) -> Frontend:
    return Frontend(
        open_mail(config, key, one_host=one_host),
        WallClock(),
        config.schedule,
        config.engine.block_size,
        resolve_schedulers=scheduler_resolver(scheduler),
        request_timeout_s=config.serve.request_timeout_s,
        observe=observers.observe,
        num_schedulers=config.serve.schedulers,
        num_spare_schedulers=config.num_spare_schedulers,
        loads_adapters=bool(config.adapters.folders),
    )

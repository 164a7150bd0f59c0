"""The production ingress in a process of a chaos cluster: HTTP, batches and all. `tests/chaos/node.py` runs it."""

import asyncio
from collections.abc import Awaitable, Callable

from cluster.ingress.api_factory import build_app, run_batches
from cluster.ingress.delivery.frontend import Frontend
from cluster.ingress.http.connection_limits import connection_limits
from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.model_card import read_model_card
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.live_rules import LiveRules
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig
from core.ports import Mail


class IngressNode:
    def __init__(
        self, config: ClusterConfig, mail: Mail, resolve: Callable[[], Awaitable[list[str]]], port: int
    ) -> None:
        """`port` is that of its HTTP server; 0: any that is free."""
        card = read_model_card(config)
        observers = make_observers(card.name, config.serve.otlp_endpoint)
        self.frontend = Frontend(
            mail,
            WallClock(),
            config.schedule,
            config.engine.block_size,
            resolve_schedulers=resolve,
            request_timeout_s=config.serve.request_timeout_s,
            observe=observers.observe,
            num_schedulers=config.serve.schedulers,
        )
        self._app = build_app(self.frontend, config, card, LiveRules(config).access, observers)
        limits = connection_limits(config.serve)
        self._server = HttpServer(self._app, "127.0.0.1", [port], shared=False, limits=limits)
        self.port = self._server.port

    async def run(self) -> None:
        self._server.start()
        await asyncio.gather(self.frontend.run(), run_batches(self._app))

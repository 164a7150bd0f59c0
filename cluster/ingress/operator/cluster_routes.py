"""What an operator asks of the whole cluster: whether it is ready, its figures, its instances, and to drop its caches.

Invariant: `/ready` needs no key, and therefore names no model."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import asdict

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from cluster.ingress.generation.body_shape import Json
from cluster.ingress.generation.request_params import no_such_model
from cluster.ingress.generation.served_model import ServedModel
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.tenants.api_keys import Scope
from core.clock import current_time
from core.errors import ReplicaLost
from core.reports import Status


class ClusterRoutes:
    def __init__(self, models: Sequence[ServedModel], registry: CollectorRegistry) -> None:
        """`registry` has the figures of all models."""
        self._models, self._registry = models, registry

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("GET", "/ready", self.ready, scope=Scope.OPEN),
            HttpRoute("GET", "/metrics", self.serve_metrics, scope=Scope.METRICS),
            HttpRoute("GET", "/cluster", self.cluster, scope=Scope.METRICS),
            HttpRoute("GET", "/cluster/history", self.history, scope=Scope.METRICS),
            HttpRoute("GET", "/cluster/requests", self.requests, scope=Scope.METRICS),
            HttpRoute("POST", "/reset_prefix_cache", self.drop_caches, scope=Scope.OPERATOR),
            HttpRoute("POST", "/flush_cache", self.drop_caches, scope=Scope.OPERATOR),
        ]

    async def ready(self, http: HttpRequest) -> Response:
        """Say whether any model would answer in time: the others' requests must not be turned away with those of a lost one."""
        states = await asyncio.gather(*(model.generator.ready() for model in self._models))
        waiting = [why_not for ok, why_not in states if not ok]
        if len(waiting) == len(states):
            return JSONResponse({"status": "not ready", "reason": waiting[0]}, 503)
        missing = {"models_not_ready": len(waiting)} if waiting else {}
        return JSONResponse({"status": "ready", **missing})

    async def serve_metrics(self, http: HttpRequest) -> Response:
        await asyncio.gather(*(_take_figures(model) for model in self._models))
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def cluster(self, http: HttpRequest) -> Response:
        """Return the scheduler's view of the instances, and this ingress's view of the last minute: of the model that the query
        names, or of the first that answers. Where there are several, all are listed."""
        summaries = await asyncio.gather(*map(_summary, self._models)) if len(self._models) > 1 else []
        answering = [
            model for model, one in zip(self._models, summaries, strict=False) if "num_queued" in one
        ]
        model = (self._named(http) or answering or self._models)[0]
        status = asdict(await model.generator.status())
        del status["nonce"]
        recent, now = model.observers.recent, current_time()
        watched: Json = {
            "model": model.name,
            "classes": [asdict(one) for one in recent.classes(now)],
            "routes": [asdict(one) for one in recent.routes(now)],
            "links": [asdict(one) for one in recent.links(now)],
        }
        return JSONResponse(status | watched | ({"models": summaries} if summaries else {}))

    async def history(self, http: HttpRequest) -> Response:
        """Return this ingress's last hour by class, of the model that the query names, or of the first."""
        observers = (self._named(http) or self._models)[0].observers
        return JSONResponse(observers.last_hour.history(current_time()))

    async def requests(self, http: HttpRequest) -> Response:
        """Return the slowest and the failed requests of the last minutes that this ingress served; or all of the query's `id`."""
        models, now = self._named(http) or self._models, current_time()
        of_all = [model.observers.ended for model in models]
        if asked := http.query_params.get("id"):
            found = {"requests": [one for ended in of_all for one in ended.find(asked)]}
        else:
            found = {"slowest": of_all[0].slowest(now), "failed": of_all[0].failed(now)}
        return JSONResponse({name: [asdict(one) for one in listed] for name, listed in found.items()})

    async def drop_caches(self, http: HttpRequest) -> Response:
        """Have every instance give up what it keeps of requests that are over, and say how much that was. The query may name one
        model."""
        models = self._named(http) or self._models
        dropped = await asyncio.gather(*(model.generator.drop_caches() for model in models))
        return JSONResponse(
            {"dropped": {address: asdict(blocks) for each in dropped for address, blocks in each.items()}}
        )

    def _named(self, http: HttpRequest) -> Sequence[ServedModel]:
        """Return the model that the query names; none where it names none. Raises RequestError."""
        if (name := http.query_params.get("model")) is None:
            return ()
        if not (found := [model for model in self._models if name in model.settings.names]):
            raise no_such_model(name, [model.name for model in self._models])
        return found[:1]


async def _take_figures(model: ServedModel) -> None:
    model.observers.instances.update(await _status(model))


async def _summary(model: ServedModel) -> Json:
    """Return what a list of models shows of one."""
    status = await _status(model)
    if status is None:
        return {"model": model.name, "why_not": "its scheduler does not answer"}
    serving = [one for one in status.instances if not one.leaving]
    return {
        "model": model.name,
        "why_not": status.why_not,
        "num_instances": len(serving),
        "num_running": sum(one.num_running for one in serving),
        "num_queued": status.num_queued,
    }


async def _status(model: ServedModel) -> Status | None:
    """Return what the model's scheduler knows; None where it does not answer."""
    with contextlib.suppress(ReplicaLost):
        return await model.generator.status()
    return None

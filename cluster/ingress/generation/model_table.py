"""The models behind one door: which of them a request names, and which a tenant may see."""

from collections.abc import Sequence
from functools import wraps

from fastapi import Request as HttpRequest
from fastapi.responses import Response

from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.body_work import BodyWork
from cluster.ingress.generation.request_params import no_such_model
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.tenants.access import Tenant

TAG = ":latest"
"""What Ollama's clients may add to each name."""


class ModelTable:
    """Invariant: to a tenant, a model that it may not see does not exist. Each row works on bodies with threads of its own."""

    def __init__(self, rows: Sequence[Answering]) -> None:
        self.rows = tuple(rows)
        self._reading = BodyWork(rows[0].settings) if len(rows) > 1 else rows[0].work
        """Reads bodies until their model is known."""

    @property
    def is_idle(self) -> bool:
        """Whether no body is worked on, nor waits for it."""
        return self._reading.is_idle and all(row.work.is_idle for row in self.rows)

    def seen_by(self, tenant: Tenant) -> list[Answering]:
        return [row for row in self.rows if tenant.may_see(row.settings.model_name)]

    def find(self, name: str | None, tenant: Tenant, *, tagged: bool = False) -> Answering:
        """Return the model of this name; without one, the first that the tenant may see. `tagged`: the name may end with `TAG`.
        Raises RequestError."""
        rows = self.seen_by(tenant)
        if not name and rows:
            return rows[0]
        name = name or ""
        for each in (name, name.removesuffix(TAG)) if tagged else (name,):
            if found := next((row for row in rows if each in row.settings.names), None):
                return found
        raise no_such_model(name, [each for row in rows for each in row.settings.names])

    def joined(self, routes: Sequence[Sequence[HttpRoute]]) -> list[HttpRoute]:
        """Return as one list the routes that each row has. A request goes to the row that it names."""
        return [self._joined(same) for same in zip(*routes, strict=True)]

    def _joined(self, same: tuple[HttpRoute, ...]) -> HttpRoute:
        handlers = {row: route.handler for row, route in zip(self.rows, same, strict=True)}

        @wraps(same[0].handler)
        async def handle(http: HttpRequest) -> Response:
            row = await self._asked(http, same[0])
            http.state.metrics = row.metrics
            return await handlers[row](http)

        return same[0]._replace(handler=handle)

    async def _asked(self, http: HttpRequest, route: HttpRoute) -> Answering:
        tenant: Tenant = http.state.tenant
        if len(self.rows) == 1 and tenant.may_see(self.rows[0].settings.model_name):
            return self.rows[0]  # it checks the name itself
        name = http.query_params.get("model")
        if route.body is not None:
            body = await self._reading.find(http, route.body)
            name = getattr(body, "asked_model", None) or getattr(body, "model", None)
        return self.find(name, tenant, tagged=route.path.startswith("/api/"))

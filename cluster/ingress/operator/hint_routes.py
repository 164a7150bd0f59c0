"""What clients say of their sessions between two requests: that one is over, or that its next turn is near."""

import asyncio
from collections.abc import Sequence

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.bodies.cache_hints import SessionHintBody
from cluster.ingress.delivery.generator import Generator
from cluster.ingress.generation.model_table import ModelTable
from cluster.ingress.http.http_route import HttpRoute
from core.errors import ReplicaLost


class HintRoutes:
    def __init__(self, table: ModelTable, generators: Sequence[Generator]) -> None:
        """`generators`: those of the table's rows."""
        self._table, self._generators = table, dict(zip(table.rows, generators, strict=True))

    def routes(self) -> list[HttpRoute]:
        return [HttpRoute("POST", "/v1/cache_hints", self.hint, SessionHintBody)]

    async def hint(self, http: HttpRequest) -> Response:
        """Tell every instance, and answer which of them know the session. One that none knows is no error: it may be long ago."""
        body = await self._table.rows[0].read(http, SessionHintBody)
        tenant, release = http.state.tenant.name, body.action == "release"
        seen = [self._generators[row] for row in self._table.seen_by(http.state.tenant)]
        asked = [each.hint_session(tenant, body.session, release=release) for each in seen]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, BaseException) and not (found and isinstance(answer, ReplicaLost)):
                raise answer
        return JSONResponse({**body.model_dump(), "instances": [one for each in found for one in each]})

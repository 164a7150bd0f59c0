"""What clients say of their sessions between two requests: that one is over, or that its next turn is near."""

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.bodies.cache_hints import SessionHintBody
from cluster.ingress.delivery.generator import Generator
from cluster.ingress.generation.answering import Answering
from cluster.ingress.http.http_route import HttpRoute


class HintRoutes:
    def __init__(self, answering: Answering, generator: Generator) -> None:
        self._answering, self._generator = answering, generator

    def routes(self) -> list[HttpRoute]:
        return [HttpRoute("POST", "/v1/cache_hints", self.hint, SessionHintBody)]

    async def hint(self, http: HttpRequest) -> Response:
        """Tell every instance, and answer which of them know the session. One that none knows is no error: it may be long ago."""
        body = await self._answering.read(http, SessionHintBody)
        known = await self._generator.hint_session(
            http.state.tenant.name, body.session, release=body.action == "release"
        )
        return JSONResponse({**body.model_dump(), "instances": known})

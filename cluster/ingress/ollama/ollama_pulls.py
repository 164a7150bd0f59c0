"""Ollama's routes by which an operator has a model fetched to the ingress' host, or removed from it.

What is served comes with the configuration, and stays. A pull prepares a host for the next one."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.generation.body_shape import Json
from cluster.ingress.generation.http_responses import JSON_LINES, streamed, unless_gone
from cluster.ingress.generation.model_table import ModelTable
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.ollama.ollama_models import FIXED, ModelName
from cluster.ingress.tenants.api_keys import Scope
from core.errors import RequestError
from models.files.pulled_models import InUse, NotPulled, PulledModels
from models.files.pulled_names import pulled_name

_ROOT: Final = Path(__file__).parents[3]
_COMMAND: Final = (sys.executable, "-m", "cluster.ingress.ollama.pull_process")
_SUCCESS: Final = {"status": "success"}


class OllamaPulls:
    def __init__(self, table: ModelTable) -> None:
        self._table = table

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/api/pull", self.pull, ModelName),
            HttpRoute("DELETE", "/api/delete", self.delete, ModelName, Scope.OPERATOR),
        ]

    async def pull(self, http: HttpRequest) -> Response:
        """Have a model that is served at once. Another one is fetched for an operator, who sees how far it is."""
        body = await self._table.rows[0].read(http, ModelName)
        if (missing := self._missing(http, body.named)) is None:
            lines = _written([{"status": "pulling manifest"}, _SUCCESS])
            return (
                Response(lines, media_type=JSON_LINES.media_type) if body.stream else JSONResponse(_SUCCESS)
            )
        name = pulled_name(body.named)
        if name is None or name.place == "bucket":  # the server's own credentials are not lent
            raise RequestError(
                f"{missing.message}; what can be pulled here is owner/name of the hub, modelscope://owner/name, or the URL of a "
                ".gguf file",
                status=missing.status,
                code=missing.code,
            )
        http.state.holder.check_scope(http.scope["path"], Scope.OPERATOR)
        begun = asyncio.Event()
        lines = _pulled(name.text, begun)
        if body.stream:
            keep_alive_s = self._table.rows[0].settings.keep_alive_s
            return await streamed(http, lines, begun, keep_alive_s, JSON_LINES)
        return await unless_gone(http, _last(lines))

    async def delete(self, http: HttpRequest) -> Response:
        """Remove a model from this host's disk that nobody there uses."""
        body = await self._table.rows[0].read(http, ModelName)
        if self._missing(http, body.named) is None:
            raise RequestError(FIXED, status=403, code="models_are_fixed")
        try:
            await asyncio.to_thread(PulledModels().remove, body.named)
        except NotPulled as error:
            raise RequestError(str(error), status=404, code="model_not_found") from None
        except InUse as error:
            raise RequestError(str(error), status=409, code="model_in_use") from None
        return Response()

    def _missing(self, http: HttpRequest, name: str) -> RequestError | None:
        """Return why a model is not served; None where it is."""
        try:
            self._table.find(name, http.state.tenant, tagged=True)
        except RequestError as error:
            return error
        return None


async def _pulled(name: str, begun: asyncio.Event) -> AsyncGenerator[str, None]:
    """Yield the lines of a pull, which ends with whoever reads them. An error before the second line is raised, so that it has a
    status, unless the stream has `begun`."""
    process = await asyncio.create_subprocess_exec(
        *_COMMAND, name, cwd=_ROOT, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    first, said = "", dict[str, str]()
    try:
        async for line in process.stdout:
            is_first, said = not said, json.loads(line)
            if "error" in said:
                break
            if is_first:
                first = line.decode()
                continue
            yield first + line.decode()
            first = ""
        if "error" not in said and said != _SUCCESS:
            said = {"error": f"the pull of {name} ended before it was whole", "status": "500"}
        if "error" in said:
            if not begun.is_set():
                raise RequestError(said["error"], status=int(said["status"]))
            yield first + _written([{"error": said["error"]}])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _last(lines: AsyncGenerator[str, None]) -> Response:
    async for _ in lines:
        pass
    return JSONResponse(_SUCCESS)


def _written(lines: list[Json]) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)

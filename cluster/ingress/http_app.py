"""The FastAPI application: routes, keys, limits, and one place where errors become responses."""

import contextlib
import logging
import uuid
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from cluster.ingress.anthropic.anthropic_bodies import messages_error
from cluster.ingress.anthropic.anthropic_routes import AnthropicRoutes
from cluster.ingress.batches.batch_routes import BatchRoutes, NoBatchRoutes
from cluster.ingress.batches.batch_runner import HOLDER
from cluster.ingress.dashboard.page import load_page
from cluster.ingress.delivery.generator import ChatTokenizer, Generator
from cluster.ingress.generation.answer_notes import AnswerNotes
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.http_responses import ClientGone
from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.http import audit
from cluster.ingress.http.http_errors import ReshapeError, as_refusal, error_response, reason_of
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.ollama.ollama_bodies import ollama_error
from cluster.ingress.ollama.ollama_routes import OllamaRoutes
from cluster.ingress.openai.embedding_routes import EmbeddingRoutes
from cluster.ingress.openai.infill_routes import InfillRoutes
from cluster.ingress.openai.openai_routes import OpenAIRoutes
from cluster.ingress.operator.adapter_routes import AdapterRoutes
from cluster.ingress.operator.hint_routes import HintRoutes
from cluster.ingress.operator.openapi import Description
from cluster.ingress.responses.responses_routes import ResponsesRoutes
from cluster.ingress.telemetry import request_context
from cluster.ingress.telemetry.observers import Observers
from cluster.ingress.telemetry.vllm_names import LoraInfo
from cluster.ingress.tenants.access import Access, KeyHolder, Tenant
from cluster.ingress.tenants.api_keys import Scope
from cluster.store.sql_store import SqlStore
from cluster.store.store_port import Store
from core.clock import current_time
from core.errors import BatonError, ReplicaLost, RequestError, forget_frames

log = logging.getLogger(__name__)

_CLIENT_GONE = 499


def create_app(
    generator: Generator,
    tokenizer: ChatTokenizer,
    settings: ApiSettings,
    access: Access,
    observers: Observers,
    store: Store | None = None,
) -> FastAPI:
    """Make the API. Where `access` has keys, all but health, readiness and the page ask. Without `store` it is in memory."""
    store = SqlStore() if store is None else store
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    api = _Api(generator, settings.model_name, access, observers)
    if settings.max_adapters:
        observers.registry.register(LoraInfo(settings.max_adapters, lambda: generator.adapters.in_use))
    answering = Answering(generator, tokenizer, settings, access, observers.ingress)
    routes = [
        *OpenAIRoutes(answering).routes(),
        *InfillRoutes(answering).routes(),
        *EmbeddingRoutes(answering).routes(),
        *ResponsesRoutes(answering, store).routes(),
        *AnthropicRoutes(answering).routes(),
        *OllamaRoutes(answering, generator).routes(),
        *AdapterRoutes(answering, generator.adapters, settings.describe_adapter).routes(),
        *HintRoutes(answering, generator).routes(),
        *(BatchRoutes(answering, store) if settings.file_store_bytes else NoBatchRoutes()).routes(),
        *api.routes(),
    ]
    routes += Description(routes).routes()
    paths = {route.path for route in routes}
    for route in routes:
        methods = ["GET", "HEAD"] if route.method == "GET" else [route.method]
        app.add_api_route(route.path, api.guarded(route), methods=methods, response_model=None)

    async def on_http_error(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{http.method} {http.url.path}: {error.detail}{_hint(http.url.path, paths)}"
        request_id = http.state.request_id = _request_id(http)
        audit.refused(http, "", error.status_code, "no_such_route", None)
        refusal = RequestError(message, status=error.status_code)
        response = error_response(refusal, request_id, _reshape(http.url.path))
        response.headers.update({**(error.headers or {}), **_labels(request_id)})
        return response

    app.state.body_work = answering.work
    app.add_exception_handler(HTTPException, on_http_error)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return app


class _Api:
    def __init__(self, generator: Generator, model_name: str, access: Access, observers: Observers) -> None:
        self._generator, self._model_name = generator, model_name
        self._access, self._observers, self._metrics = access, observers, observers.ingress
        self._page, self._page_headers = load_page()
        self._notes = AnswerNotes()

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("GET", "/health", self.health, scope=Scope.OPEN),
            HttpRoute("GET", "/ping", self.health, scope=Scope.OPEN),
            HttpRoute("POST", "/ping", self.health, scope=Scope.OPEN),
            HttpRoute("GET", "/ready", self.ready, scope=Scope.OPEN),
            HttpRoute("GET", "/metrics", self.serve_metrics, scope=Scope.METRICS),
            HttpRoute("GET", "/cluster", self.cluster, scope=Scope.METRICS),
            HttpRoute("POST", "/reset_prefix_cache", self.drop_caches, scope=Scope.OPERATOR),
            HttpRoute("POST", "/flush_cache", self.drop_caches, scope=Scope.OPERATOR),
            HttpRoute("GET", "/dashboard", self.dashboard, scope=Scope.OPEN),
            HttpRoute("GET", "/", self.to_dashboard, scope=Scope.OPEN),
        ]

    def guarded(self, route: HttpRoute) -> Any:
        """Put the route's handler behind the key check and the limits. Its errors become responses, and its outcome is
        counted."""
        path, handler = route.path, route.handler

        async def guard(request: HttpRequest) -> Response:
            request_id = _request_id(request)
            request.state.request_id, request.state.arrival_at = request_id, current_time()
            request_context.request_id.set(request_id)
            request_context.route.set("/v1/batches" if HOLDER in request.scope else path)
            request_context.traceparent.set(request.headers.get("traceparent", ""))
            request.state.tenant, request.state.notes, request.state.effort = None, [], ""
            try:
                if route.scope is not Scope.OPEN:
                    self._admit(request, route.scope)
                response = await handler(request)
            except (ClientGone, ClientDisconnect):
                response = Response(status_code=_CLIENT_GONE)
            except Exception as failure:
                response = self._refusal(request, path, failure)
                forget_frames(failure)
            response.headers.update(_labels(request_id) | self._notes.headers(path, request.state.notes))
            if request.state.effort:
                response.headers["x-baton-reasoning-effort"] = request.state.effort
            if request.state.tenant is not None and request.method == "POST":
                response.headers.update(request.state.tenant.headers())
            self._metrics.requests.labels(path, response.status_code).inc()
            return response

        return guard

    def _admit(self, http: HttpRequest, needed: Scope) -> None:
        holder: KeyHolder | None = http.scope.get(HOLDER)
        if holder is None:
            key = http.headers.get("x-api-key")  # Anthropic's clients
            authorization = http.headers.get("authorization") or (f"Bearer {key}" if key else "")
            holder = self._access.holder_of(authorization)
        http.state.holder, http.state.tenant = holder, holder.tenant
        holder.check_scope(http.scope["path"], needed)
        if http.method == "POST":
            holder.tenant.count_request()

    def _refusal(self, http: HttpRequest, path: str, failure: Exception) -> Response:
        """Return the response for what ended a request, and log and count it."""
        error, request_id = as_refusal(failure), http.state.request_id
        if error is not failure:
            log.error("%s %s: %s", http.method, path, failure)
        if not isinstance(error, BatonError):
            log.error("request %s failed", request_id, exc_info=error)
        response = error_response(error, request_id, _reshape(path))
        tenant: Tenant | None = http.state.tenant
        name, code = tenant.name if tenant else "", reason_of(error)
        field = error.field if isinstance(error, RequestError) else None
        audit.refused(http, name, response.status_code, code, field)
        self._metrics.refused.labels(name, code).inc()
        return response

    async def health(self, http: HttpRequest) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(self, http: HttpRequest) -> Response:
        ok, why_not = await self._generator.ready()
        return JSONResponse(
            {"status": "ready"} if ok else {"status": "not ready", "reason": why_not}, 200 if ok else 503
        )

    async def serve_metrics(self, http: HttpRequest) -> Response:
        with contextlib.suppress(ReplicaLost):
            self._observers.instances.update(None)
            self._observers.instances.update(await self._generator.status())
        return Response(generate_latest(self._observers.registry), media_type=CONTENT_TYPE_LATEST)

    async def cluster(self, http: HttpRequest) -> Response:
        """Return the scheduler's view of the instances, and this ingress's view of the last minute."""
        status = asdict(await self._generator.status())
        del status["nonce"]
        recent, now = self._observers.recent, current_time()
        watched = {
            "model": self._model_name,
            "classes": [asdict(one) for one in recent.classes(now)],
            "routes": [asdict(one) for one in recent.routes(now)],
            "links": [asdict(one) for one in recent.links(now)],
        }
        return JSONResponse(status | watched)

    async def drop_caches(self, http: HttpRequest) -> Response:
        """Have every instance give up what it keeps of requests that are over, and say how much that was."""
        dropped = await self._generator.drop_caches()
        return JSONResponse({"dropped": {address: asdict(blocks) for address, blocks in dropped.items()}})

    async def dashboard(self, http: HttpRequest) -> Response:
        return HTMLResponse(self._page, headers=self._page_headers)

    async def to_dashboard(self, http: HttpRequest) -> Response:
        return RedirectResponse(
            "dashboard"
        )  # relative: a proxy may serve all of this under a prefix of its own


def _reshape(path: str) -> ReshapeError | None:
    """Return how the route's API writes errors; None: as OpenAI's."""
    if path.startswith("/v1/messages"):
        return messages_error
    return ollama_error if path.startswith("/api/") else None


def _hint(path: str, paths: Collection[str]) -> str:
    """Say what is likely wrong where a client's base URL lacks /v1, which OpenAI's needs, or ends with it, as Anthropic's must
    not."""
    found = next((each for each in (path, f"/v1{path}", path.removeprefix("/v1")) if each in paths), path)
    return "" if found == path else f". There is {found}: look at the base URL that the client was given"


def _labels(request_id: str) -> dict[str, str]:
    """Return the headers that name a request: OpenAI's clients read the first, Anthropic's the second."""
    return {"X-Request-Id": request_id, "Request-Id": request_id}


def _request_id(http: HttpRequest) -> str:
    """Return the client's own id where it is harmless in a log, else a new one."""
    given = http.headers.get("x-request-id", "")
    return given if given.isascii() and given.isprintable() and 0 < len(given) <= 128 else uuid.uuid4().hex

"""The FastAPI application: routes, keys, limits, and one place where errors become responses."""

import logging
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
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
from cluster.ingress.generation.model_table import ModelTable
from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.generation.served_model import ServedModel
from cluster.ingress.http import audit
from cluster.ingress.http.http_errors import ReshapeError, as_refusal, error_response, reason_of
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.ollama.model_lifetime import ModelLifetime
from cluster.ingress.ollama.ollama_bodies import ollama_error
from cluster.ingress.ollama.ollama_models import OllamaList, OllamaModels
from cluster.ingress.ollama.ollama_pulls import OllamaPulls
from cluster.ingress.ollama.ollama_routes import OllamaRoutes
from cluster.ingress.openai.embedding_routes import EmbeddingRoutes
from cluster.ingress.openai.infill_routes import InfillRoutes
from cluster.ingress.openai.model_routes import ModelRoutes
from cluster.ingress.openai.openai_routes import OpenAIRoutes
from cluster.ingress.operator.adapter_routes import AdapterRoutes
from cluster.ingress.operator.cluster_routes import ClusterRoutes
from cluster.ingress.operator.hint_routes import HintRoutes
from cluster.ingress.operator.key_routes import KeyRoutes
from cluster.ingress.operator.openapi import Description
from cluster.ingress.operator.sleep_routes import SleepRoutes
from cluster.ingress.operator.usage_routes import UsageRoutes
from cluster.ingress.responses.background_responses import BackgroundResponses
from cluster.ingress.responses.conversation_store import ConversationStore
from cluster.ingress.responses.response_store import ResponseStore
from cluster.ingress.responses.responses_routes import ResponsesRoutes
from cluster.ingress.telemetry import request_context
from cluster.ingress.telemetry.metrics import IngressMetrics
from cluster.ingress.telemetry.observers import Observers
from cluster.ingress.telemetry.vllm_names import LoraInfo
from cluster.ingress.tenants.access import Access, KeyHolder, Tenant
from cluster.ingress.tenants.api_keys import Scope
from cluster.ingress.tenants.ledger import UsageLedger
from cluster.store.sql_store import SqlStore
from core.clock import current_time
from core.errors import BatonError, RequestError, forget_frames

log = logging.getLogger(__name__)

_CLIENT_GONE = 499


def create_app(
    generator: Generator,
    tokenizer: ChatTokenizer,
    settings: ApiSettings,
    access: Access,
    observers: Observers,
    store: SqlStore | None = None,
) -> FastAPI:
    """Make the API of one model, as `create_app_of` does of several."""
    served = ServedModel(generator=generator, tokenizer=tokenizer, settings=settings, observers=observers)
    return create_app_of([served], access, observers, store)


def create_app_of(
    served: Sequence[ServedModel], access: Access, observers: Observers, store: SqlStore | None = None
) -> FastAPI:
    """Make the API. Where `access` has keys, all but health, readiness and the page ask. `observers` are those of what is of no
    model, or of the only model. Without `store` it is in memory."""
    store = SqlStore() if store is None else store
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    access.use_store(store)
    ledger = app.state.ledger = UsageLedger(store, served[0].settings.usage_folder)
    table = ModelTable([_answering(model, access, ledger) for model in served])
    api = _Api(access, observers.ingress)
    routes_of_models, background = _routes_of_models(table, served, store, access)
    routes = [
        *routes_of_models,
        *UsageRoutes(store).routes(),
        *KeyRoutes(table.rows[0], access).routes(),
        *ClusterRoutes(served, observers.registry).routes(),
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

    app.state.models, app.state.background = table, background
    app.add_exception_handler(HTTPException, on_http_error)
    if origins := served[0].settings.allowed_origins:
        _allow_pages(app, origins)
    return app


def _allow_pages(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of these origins ask from a browser."""
    app.add_middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
    )


def _answering(model: ServedModel, access: Access, ledger: UsageLedger) -> Answering:
    generator, settings, observers = model.generator, model.settings, model.observers
    if settings.max_adapters:
        observers.registry.register(LoraInfo(settings.max_adapters, lambda: generator.adapters.in_use))
    return Answering(generator, model.tokenizer, settings, access, observers.ingress, ledger)


def _routes_of_models(
    table: ModelTable, served: Sequence[ServedModel], store: SqlStore, access: Access
) -> tuple[list[HttpRoute], list[BackgroundResponses]]:
    """Return the routes that each model has, and those of what all of them share; and what goes on with its responses."""
    settings = table.rows[0].settings
    kept = settings.response_store_bytes, settings.response_age_s
    resumes = settings.resume_s > 0
    stores = ResponseStore(store, *kept, resumes=resumes), ConversationStore(store, *kept)
    responses = [ResponsesRoutes(row, *stores, access) for row in table.rows]
    ollama = [OllamaModels(row) for row in table.rows]
    own = [
        [
            *OpenAIRoutes(row).routes(),
            *InfillRoutes(row).routes(),
            *EmbeddingRoutes(row).routes(),
            *responses[at].routes(),
            *AnthropicRoutes(row).routes(),
            *OllamaRoutes(row, ollama[at], _lifetime(served[at])).routes(),
            *AdapterRoutes(row, served[at].generator.adapters, row.settings.describe_adapter).routes(),
            *SleepRoutes(served[at].generator.model_sleep).routes(),
        ]
        for at, row in enumerate(table.rows)
    ]
    shared = [
        *table.joined(own),
        *ModelRoutes(table).routes(),
        *OllamaList(table, ollama).routes(),
        *OllamaPulls(table).routes(),
        *responses[0].stored_routes(responses),
        *HintRoutes(table, [model.generator for model in served]).routes(),
        *(BatchRoutes(table, store) if settings.file_store_bytes else NoBatchRoutes()).routes(),
    ]
    return shared, [one.background for one in responses]


def _lifetime(model: ServedModel) -> ModelLifetime:
    return ModelLifetime(model.generator.model_sleep, sleeps_on_demand=model.settings.sleeps_on_demand)


class _Api:
    def __init__(self, access: Access, metrics: IngressMetrics) -> None:
        """`metrics` counts what is of no model."""
        self._access, self._metrics = access, metrics
        self._page, self._page_headers = load_page()
        self._notes = AnswerNotes()

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("GET", "/health", self.health, scope=Scope.OPEN),
            HttpRoute("GET", "/ping", self.health, scope=Scope.OPEN),
            HttpRoute("POST", "/ping", self.health, scope=Scope.OPEN),
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
            request.state.metrics = self._metrics  # until its model is known
            request.state.identity, request.state.digest = None, b""
            try:
                if route.scope is not Scope.OPEN:
                    await self._admit(request, route.scope)
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
                response.headers.update(request.state.holder.account.headers())
            request.state.metrics.requests.labels(path, response.status_code).inc()
            return response

        return guard

    async def _admit(self, http: HttpRequest, needed: Scope) -> None:
        holder: KeyHolder | None = http.scope.get(HOLDER)
        if holder is None:
            key = http.headers.get("x-api-key")  # Anthropic's clients
            authorization = http.headers.get("authorization") or (f"Bearer {key}" if key else "")
            holder = await self._access.authenticated(authorization)
        http.state.holder, http.state.tenant = holder, holder.tenant
        holder.check_scope(http.scope["path"], needed)
        if http.method == "POST":
            await holder.account.count_request()

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
        http.state.metrics.refused.labels(name, code).inc()
        return response

    async def health(self, http: HttpRequest) -> Response:
        return JSONResponse({"status": "alive"})

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

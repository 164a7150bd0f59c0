"""The FastAPI application: routes, keys, limits, and one place where errors become responses."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cluster.ingress import request_context
from cluster.ingress.api import audit, openai_requests, request_params
from cluster.ingress.api.access import Access, Tenant
from cluster.ingress.api.chat_bodies import ChatShape
from cluster.ingress.api.chat_format import ChatFormat, PreparedChat
from cluster.ingress.api.choices import ChoiceRunner, ChoiceStream
from cluster.ingress.api.detokenize import TextStream
from cluster.ingress.api.generator import ChatTokenizer, Generator
from cluster.ingress.api.http_responses import ClientGone, events, streamed, whole
from cluster.ingress.api.openai_bodies import BodyShape, CompletionShape
from cluster.ingress.api.openai_errors import error_response, reason_of
from cluster.ingress.api.request_body import read_json
from cluster.ingress.api.request_params import ApiSettings
from cluster.ingress.api.structured import GrammarChecker, grammar_of
from cluster.ingress.dashboard.page import load_page
from cluster.ingress.observers import Observers
from cluster.ingress.parsers.output_events import PlainParser
from core.clock import now_s
from core.errors import BatonError, ReplicaLost, RequestError
from core.types import Grammar, Request

log = logging.getLogger(__name__)

_OPEN_ROUTES = ("/", "/health", "/ready", "/dashboard")
_CLIENT_GONE = 499
_INLINE_BYTES = 8192
"""Longer bodies are tokenised on a thread (the tokenizer lets go of the interpreter), so that nobody's tokens wait for it."""

T = TypeVar("T")


def create_app(
    generator: Generator,
    tokenizer: ChatTokenizer,
    settings: ApiSettings,
    access: Access,
    observers: Observers,
) -> FastAPI:
    """The API over `generator`. Every route but health, readiness and the page asks for a key when `access` knows any."""
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    api = _Api(generator, tokenizer, settings, access, observers)
    routes: list[tuple[str, str, Callable[[HttpRequest], Awaitable[Response]]]] = [
        ("POST", "/v1/chat/completions", api.chat),
        ("POST", "/v1/completions", api.completions),
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/{name:path}", api.model),
        ("POST", "/tokenize", api.tokenize),
        ("POST", "/detokenize", api.detokenize),
        ("GET", "/health", api.health),
        ("GET", "/ready", api.ready),
        ("GET", "/metrics", api.serve_metrics),
        ("GET", "/cluster", api.cluster),
        ("GET", "/dashboard", api.dashboard),
        ("GET", "/", api.to_dashboard),
    ]
    for method, path, handler in routes:
        app.add_api_route(path, api.guarded(path, handler), methods=[method], response_model=None)

    async def on_http_error(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{http.method} {http.url.path}: {error.detail}"
        request_id = http.state.request_id = _request_id(http)
        audit.refused(http, "", error.status_code, "no_such_route", None)
        response = error_response(RequestError(message, status=error.status_code), request_id)
        response.headers.update({**(error.headers or {}), "X-Request-Id": request_id})
        return response

    app.add_exception_handler(HTTPException, on_http_error)
    return app


class _Api:
    def __init__(
        self,
        generator: Generator,
        tokenizer: ChatTokenizer,
        settings: ApiSettings,
        access: Access,
        observers: Observers,
    ) -> None:
        self._generator, self._tokenizer, self._settings = generator, tokenizer, settings
        self._access, self._observers, self._metrics = access, observers, observers.ingress
        self._runner = ChoiceRunner(generator, tokenizer, observers.ingress)
        folder = settings.tokenizer_folder
        self._grammars = GrammarChecker(folder, settings.vocab_size) if folder is not None else None
        self._chat_format = ChatFormat(tokenizer, settings)
        self._page, self._page_headers = load_page()
        self._started = int(time.time())

    def guarded(self, path: str, handler: Callable[[HttpRequest], Awaitable[Response]]) -> Any:
        """`handler` behind the key check and the limits, with its errors as responses and its outcome counted."""

        async def guard(request: HttpRequest) -> Response:
            request_id = _request_id(request)
            request.state.request_id, request.state.arrival_s = request_id, now_s()
            request_context.request_id.set(request_id)
            request_context.traceparent.set(request.headers.get("traceparent", ""))
            request.state.tenant = None
            try:
                if path not in _OPEN_ROUTES:
                    self._admit(request)
                response = await handler(request)
            except (ClientGone, ClientDisconnect):
                response = Response(status_code=_CLIENT_GONE)
            except Exception as error:
                if not isinstance(error, BatonError):
                    log.exception("request %s failed", request_id)
                response = error_response(error, request_id)
                self._note_refusal(request, response.status_code, error)
            response.headers["X-Request-Id"] = request_id
            if request.state.tenant is not None and request.method == "POST":
                response.headers.update(request.state.tenant.headers())
            self._metrics.requests.labels(path, response.status_code).inc()
            return response

        return guard

    def _admit(self, http: HttpRequest) -> None:
        tenant = self._access.tenant_of(http.headers.get("authorization", ""))
        http.state.tenant = tenant
        if http.method == "POST":
            tenant.count_request()

    def _note_refusal(self, http: HttpRequest, status: int, error: Exception) -> None:
        tenant: Tenant | None = http.state.tenant
        name, code = tenant.name if tenant else "", reason_of(error)
        audit.refused(http, name, status, code, error.field if isinstance(error, RequestError) else None)
        self._metrics.refused.labels(name, code).inc()

    async def chat(self, http: HttpRequest) -> Response:
        body = openai_requests.validate(openai_requests.ChatRequest, await self._body(http))
        request_params.check_model(body.model, self._settings)
        n = request_params.check_count(body, 1, self._settings)
        chat = await _aside(http, lambda: self._chat_format.prepare(body))
        await self._check_grammar(body, chat.grammar)
        choices = self._choices(http, body, [chat.prompt], n, chat, grammar=chat.grammar)
        shape = ChatShape(
            f"chatcmpl-{uuid.uuid4().hex}",
            int(time.time()),
            body.model,
            self._tokenizer,
            bool(body.logprobs),
            body.wants_usage,
            new_call_id=self._chat_format.new_call_id,
        )
        return await self._answer(http, body, choices, 1, shape)

    async def completions(self, http: HttpRequest) -> Response:
        body = openai_requests.validate(openai_requests.CompletionRequest, await self._body(http))
        request_params.check_model(body.model, self._settings)
        prompts = await _aside(
            http, lambda: request_params.completion_prompts(body, self._tokenizer, self._settings)
        )
        n = request_params.check_count(body, len(prompts), self._settings)
        text = grammar_of(body.response_format, body.structured_outputs)
        grammar = Grammar(text=text) if text else None
        await self._check_grammar(body, grammar)
        choices = self._choices(http, body, prompts, n, grammar=grammar)
        echoes: dict[int, str] = {}
        if body.echo:
            echoes = {
                c.index: self._tokenizer.decode(
                    c.request.prompt, skip_special_tokens=body.skip_special_tokens
                )
                for c in choices
            }
        shape = CompletionShape(
            f"cmpl-{uuid.uuid4().hex}",
            int(time.time()),
            body.model,
            self._tokenizer,
            body.logprobs is not None,
            body.wants_usage,
            echoes=echoes,
        )
        return await self._answer(http, body, choices, len(prompts), shape)

    async def models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_entry()]})

    async def model(self, http: HttpRequest) -> Response:
        request_params.check_model(http.path_params["name"], self._settings)
        return JSONResponse(self._model_entry())

    async def tokenize(self, http: HttpRequest) -> Response:
        body = openai_requests.validate(openai_requests.TokenizeRequest, await self._body(http))
        request_params.check_model(body.model, self._settings)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", field="prompt")
        ids = await _aside(
            http, lambda: request_params.tokenized(body, self._tokenizer, self._chat_format.style)
        )
        return JSONResponse(
            {"tokens": ids, "count": len(ids), "max_model_len": self._settings.max_context_tokens}
        )

    async def detokenize(self, http: HttpRequest) -> Response:
        body = openai_requests.validate(openai_requests.DetokenizeRequest, await self._body(http))
        request_params.check_model(body.model, self._settings)
        if body.tokens and max(body.tokens) >= self._settings.vocab_size:
            raise RequestError(f"token id {max(body.tokens)} is outside the vocabulary", field="tokens")
        text = await _aside(http, lambda: self._tokenizer.decode(body.tokens, skip_special_tokens=False))
        return JSONResponse({"prompt": text})

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
        """The scheduler's view of the instances, and this ingress's of the last minute."""
        status = asdict(await self._generator.status())
        del status["nonce"]
        recent, now = self._observers.recent, now_s()
        watched = {
            "model": self._settings.model_name,
            "classes": [asdict(one) for one in recent.classes(now)],
            "links": [asdict(one) for one in recent.links(now)],
        }
        return JSONResponse(status | watched)

    async def dashboard(self, http: HttpRequest) -> Response:
        return HTMLResponse(self._page, headers=self._page_headers)

    async def to_dashboard(self, http: HttpRequest) -> Response:
        return RedirectResponse(
            "dashboard"
        )  # relative: a proxy may serve all of this under a prefix of its own

    async def _answer(
        self,
        http: HttpRequest,
        body: openai_requests.Common,
        choices: list[ChoiceStream],
        num_prompts: int,
        shape: BodyShape,
    ) -> Response:
        tenant: Tenant = http.state.tenant
        pieces = self._runner.run(choices, num_prompts, tenant)
        if not body.stream:
            return await whole(http, pieces, choices, num_prompts, shape)
        source = events(pieces, choices, num_prompts, shape, body.wants_usage, http.state.request_id)
        return await streamed(http, source)

    def _choices(
        self,
        http: HttpRequest,
        body: openai_requests.Common,
        prompts: list[tuple[int, ...]],
        n: int,
        chat: PreparedChat | None = None,
        *,
        grammar: Grammar | None,
    ) -> list[ChoiceStream]:
        tenant: Tenant = http.state.tenant
        slo = self._access.slo(tenant, http.headers.get("x-slo-class"), body.service_tier)
        choices: list[ChoiceStream] = []
        for prompt in prompts:
            max_tokens = request_params.max_new_tokens(body, len(prompt), self._settings)
            sampling = replace(request_params.to_sampling(body, max_tokens, self._settings), grammar=grammar)
            if chat is not None:
                sampling = replace(sampling, thinking=chat.thinking)
            for choice in range(n):
                request = Request(
                    id=self._generator.new_request_id(),
                    prompt=prompt,
                    sampling=replace(sampling, seed=request_params.seed_of_choice(sampling.seed, choice)),
                    reply_to=self._generator.address,
                    slo=slo,
                    salt=tenant.salt(body.cache_salt),
                    arrival_s=http.state.arrival_s,
                    tenant=tenant.name,
                    weight=tenant.rules.weight,
                    retain=body.prompt_cache_retention != "none",
                )
                hidden = chat.hidden_tokens if chat else None
                text = TextStream(
                    self._tokenizer,
                    prompt,
                    body.stops,
                    skip_special_tokens=body.skip_special_tokens and hidden is None,
                    include_stop=body.include_stop_str_in_output,
                    min_tokens=body.min_tokens,
                    hidden_tokens=hidden or (),
                )
                parser = chat.new_parser() if chat else PlainParser()
                reasons = chat is not None and chat.formats.reasoning != "none"
                choices.append(ChoiceStream(len(choices), request, text, parser, reasons))
        log.debug("request %s runs as %s", http.state.request_id, [choice.request.id for choice in choices])
        return choices

    async def _check_grammar(self, body: openai_requests.Common, grammar: Grammar | None) -> None:
        """Raises RequestError where the answer cannot be held to it."""
        if grammar is None:
            return
        field = "structured_outputs" if body.structured_outputs is not None else "response_format"
        if not body.is_structured:
            field = "tools"
        if not body.stop_token_ids and (body.ignore_eos or not self._settings.eos_token_ids):
            reason = "ignore_eos is true" if body.ignore_eos else "this model has no end-of-sequence token"
            raise RequestError(
                f"{field}: an answer could not end where it is complete: {reason}", field=field
            )
        if self._grammars is None:
            raise RequestError(f"{field}: this server's tokenizer cannot be constrained", field=field)
        await self._grammars.check(grammar.text, field)

    async def _body(self, http: HttpRequest) -> dict[str, Any]:
        return await read_json(http, self._settings.max_body_bytes, self._settings.body_timeout_s)

    def _model_entry(self) -> dict[str, Any]:
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "max_model_len": self._settings.max_context_tokens,
        }


async def _aside(http: HttpRequest, work: Callable[[], T]) -> T:
    """`work` on the body that was read, on a thread where it is long."""
    return work() if http.state.num_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)


def _request_id(http: HttpRequest) -> str:
    """The client's own id where it is harmless in a log, else a new one."""
    given = http.headers.get("x-request-id", "")
    return given if given.isascii() and given.isprintable() and 0 < len(given) <= 128 else uuid.uuid4().hex

"""Anthropic's routes: a message becomes a chat, and the answer becomes blocks."""

import uuid

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.anthropic.anthropic_bodies import MessagesShape
from cluster.ingress.anthropic.anthropic_requests import (
    CountTokensRequest,
    MessagesRequest,
    as_chat,
)
from cluster.ingress.bodies.request_bodies import ChatRequest
from cluster.ingress.generation import request_params
from cluster.ingress.generation.answering import Answering
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.tenants.fair_threads import at_once


class AnthropicRoutes:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/v1/messages", self.messages, MessagesRequest),
            HttpRoute("POST", "/v1/messages/count_tokens", self.count_tokens, CountTokensRequest),
        ]

    async def messages(self, http: HttpRequest) -> Response:
        body = await self._answering.read(http, MessagesRequest)
        request_params.check_model(body.model, self._answering.settings)
        chat_body = await self._answering.aside(http, at_once(lambda: self._as_chat(http, body)))
        chat = await self._answering.prepare(http, chat_body)
        fitting = self._answering.fitting(chat_body, chat.prompt)
        choices = await self._answering.choices(http, fitting, [chat.prompt], 1, chat, grammar=chat.grammar)
        shape = MessagesShape(
            f"msg_{uuid.uuid4().hex}",
            body.model,
            len(chat.prompt),
            new_call_id=self._answering.chat_format.new_call_id,
            stopped=lambda: choices[0].stops.found,
            shows_thinking=body.shows_thinking,
            fills_context=fitting is not chat_body,
        )
        return await self._answering.answer(http, fitting, choices, 1, shape)

    async def count_tokens(self, http: HttpRequest) -> Response:
        body = await self._answering.read(http, CountTokensRequest)
        request_params.check_model(body.model, self._answering.settings)
        chat_body = await self._answering.aside(http, at_once(lambda: self._as_chat(http, body)))
        return JSONResponse({"input_tokens": len(await self._answering.prompt_of(http, chat_body))})

    def _as_chat(self, http: HttpRequest, body: CountTokensRequest) -> ChatRequest:
        chat_format = self._answering.chat_format
        if body.thinking is not None and body.thinking.budget_tokens and not chat_format.bounds_reasoning:
            http.state.notes.append("thinking.budget_tokens: this model's reasoning cannot be bounded")
        return as_chat(body, bounds_reasoning=chat_format.bounds_reasoning)

"""Anthropic's routes: a message becomes a chat, and the answer becomes blocks."""

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.anthropic.anthropic_bodies import MessagesShape
from cluster.ingress.anthropic.anthropic_requests import (
    CountTokensRequest,
    MessagesRequest,
    conversation_of,
    generation_of,
)
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
        answering = self._answering
        body = await answering.read(http, MessagesRequest)
        request_params.check_model(body.model, answering.settings)
        bounds = self._bounds_reasoning(http, body)
        conversation, request = await answering.aside(
            http, at_once(lambda: (conversation_of(body), generation_of(body, bounds_reasoning=bounds)))
        )
        chat = await answering.prepare(http, conversation, request)
        fitting = answering.fitting(request, chat.prompt)
        choices = await answering.choices(http, fitting, [chat.prompt], 1, chat)
        shape = MessagesShape(
            f"msg_{http.state.identity.name}",
            body.model,
            len(chat.prompt),
            new_call_id=answering.call_ids(http),
            stopped=lambda: choices[0].stops.found,
            shows_thinking=body.shows_thinking,
            fills_context=fitting is not request,
        )
        return await answering.answer(http, fitting, choices, 1, shape)

    async def count_tokens(self, http: HttpRequest) -> Response:
        body = await self._answering.read(http, CountTokensRequest)
        request_params.check_model(body.model, self._answering.settings)
        self._bounds_reasoning(http, body)
        conversation = await self._answering.aside(http, at_once(lambda: conversation_of(body)))
        return JSONResponse({"input_tokens": len(await self._answering.prompt_of(http, conversation))})

    def _bounds_reasoning(self, http: HttpRequest, body: CountTokensRequest) -> bool:
        """Return whether the model's reasoning can have a budget. One that it cannot have is noted."""
        bounds = self._answering.chat_format.bounds_reasoning
        if body.thinking is not None and body.thinking.budget_tokens and not bounds:
            http.state.notes.append("thinking.budget_tokens: this model's reasoning cannot be bounded")
        return bounds

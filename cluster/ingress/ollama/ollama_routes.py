"""Ollama's routes: chats, prompts, and what its clients ask of models."""

from collections.abc import Sequence
from functools import partial

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.body_shape import TokenEntries
from cluster.ingress.generation.chat_format import PreparedChat
from cluster.ingress.generation.http_responses import JSON_LINES
from cluster.ingress.generation.prompt_length import check_length
from cluster.ingress.generation.request_params import prompts_of
from cluster.ingress.generation.token_checks import check_text
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.ollama.model_lifetime import ModelLifetime
from cluster.ingress.ollama.ollama_bodies import (
    AskedTimes,
    OllamaShape,
    Wording,
    head_of,
    message_wording,
    response_wording,
)
from cluster.ingress.ollama.ollama_models import OllamaModels
from cluster.ingress.ollama.ollama_options import served_name
from cluster.ingress.ollama.ollama_requests import (
    OllamaChat,
    OllamaGenerate,
    OllamaGeneration,
    conversation_of,
    generation_of,
    turn_of,
)
from cluster.ingress.ollama.ollama_vectors import OllamaVectors
from cluster.ingress.openai.fill_in_middle import beginning, fill_in_middle
from cluster.ingress.requests.generation_request import GenerationRequest
from cluster.ingress.tenants.fair_threads import Steps, at_once
from core.clock import current_time

Prompt = tuple[int, ...]


class OllamaRoutes:
    def __init__(self, answering: Answering, models: OllamaModels, lifetime: ModelLifetime) -> None:
        self._answering = answering
        self._lifetime = lifetime
        self._vectors, self._models = OllamaVectors(answering, lifetime), models

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/api/chat", self.chat, OllamaChat),
            HttpRoute("POST", "/api/generate", self.generate, OllamaGenerate),
            *self._vectors.routes(),
            *self._models.routes(),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        """Answer a conversation. Without messages there is nothing to do: the model is loaded."""
        answering = self._answering
        body = await answering.read(http, OllamaChat)
        model = self._model(http, body)
        if not body.messages:
            return await self._loaded(body, message_wording)
        conversation, request = await answering.aside(
            http, at_once(lambda: (conversation_of(body), generation_of(body, model, "messages")))
        )
        chat = await answering.prepare(http, conversation, request)
        return await self._answer(http, body, request, chat.prompt, chat, message_wording)

    async def generate(self, http: HttpRequest) -> Response:
        """Answer one prompt: a turn of a chat, or as it is."""
        answering = self._answering
        body = await answering.read(http, OllamaGenerate)
        model = self._model(http, body)
        body.check()
        if not (body.prompt or body.suffix or body.images):
            return await self._loaded(body, response_wording)
        if body.is_plain:
            prompt, ends = await answering.aside(http, lambda: self._plain_prompt(body))
            work = partial(generation_of, body, model, "prompt", ends)
            request = await answering.aside(http, at_once(work))
            await answering.check_grammar(request, request.grammar)
            return await self._answer(http, body, request, prompt, None, response_wording)
        conversation, request = await answering.aside(
            http, at_once(lambda: (turn_of(body), generation_of(body, model, "prompt")))
        )
        chat = await answering.prepare(http, conversation, request)
        prompt = self._after(body.context or (), chat.prompt)
        return await self._answer(http, body, request, prompt, chat, response_wording)

    def _after(self, context: Sequence[int], turn: Prompt) -> Prompt:
        """Return a turn after an earlier answer, without what begins every text."""
        begin = tuple(beginning(self._answering.tokenizer))
        again = len(begin) if context and turn[: len(begin)] == begin else 0
        return (*context, *turn[again:])

    def _plain_prompt(self, body: OllamaGenerate) -> Steps[tuple[Prompt, tuple[int, ...]]]:
        """Return (prompt, token ids that end the answer beside the model's own). Raises RequestError."""
        tokenizer, settings = self._answering.tokenizer, self._answering.settings
        if not body.suffix:
            (prompt,) = yield from prompts_of(body.prompt, "prompt", tokenizer, settings)
            return prompt, ()
        yield
        for name, text in (("prompt", body.prompt), ("suffix", body.suffix)):
            check_length(text, name, tokenizer, settings.max_context_tokens)
        check_text(body.suffix, "suffix", tokenizer, settings.vocab_size)
        filled = fill_in_middle(tokenizer, body.prompt, body.suffix)
        return filled.prompt, filled.end

    async def _answer(
        self,
        http: HttpRequest,
        body: OllamaGeneration,
        request: GenerationRequest,
        prompt: Prompt,
        chat: PreparedChat | None,
        wording: Wording,
    ) -> Response:
        answering = self._answering
        request = answering.fitting(request, prompt)
        choices = await answering.choices(http, request, [prompt], 1, chat)
        has_context = isinstance(body, OllamaGenerate) and chat is not None and not chat.images
        shape = OllamaShape(
            body.model,
            wording,
            AskedTimes(http.state.arrival_at, current_time()),
            new_call_id=answering.call_ids(http),
            entries=TokenEntries(answering.tokenizer) if body.logprobs else None,
            context=prompt if has_context else None,
        )
        return await answering.answer(http, request, choices, 1, shape, form=JSON_LINES)

    def _model(self, http: HttpRequest, body: OllamaGeneration) -> str:
        """Return the name by which this server has the model. Raises RequestError."""
        settings = self._answering.settings
        model, most = served_name(body.model, settings), settings.max_context_tokens
        self._lifetime.keep(http, body.keep_alive)
        if body.options.num_ctx is not None and body.options.num_ctx > most:
            http.state.notes.append(f"options.num_ctx: this server's context has {most} tokens")
        return model

    async def _loaded(self, body: OllamaGeneration, wording: Wording) -> Response:
        """Answer who wants nothing but the model in memory, or out of it."""
        if not body.unloads:
            await self._lifetime.load()
        reason = "unload" if body.unloads else "load"
        return JSONResponse({**head_of(body.model), **wording(""), "done": True, "done_reason": reason})

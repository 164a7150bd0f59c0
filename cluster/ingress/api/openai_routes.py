"""OpenAI's routes, and vLLM's for tokens."""

import time
import uuid
from datetime import UTC, datetime
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.api import request_params
from cluster.ingress.api.answering import Answering, HttpRoute, aside
from cluster.ingress.api.beam_requests import beams_of
from cluster.ingress.api.chat_bodies import ChatShape
from cluster.ingress.api.fill_in_middle import fill_in_middle
from cluster.ingress.api.openai_bodies import CompletionShape, Extras
from cluster.ingress.api.openai_requests import (
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    validate,
)
from cluster.ingress.api.prompt_length import check_length
from cluster.ingress.api.structured import grammar_of
from cluster.ingress.api.token_checks import check_text
from core.errors import RequestError
from core.types import Grammar


class OpenAIRoutes:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._started = int(time.time())

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/v1/chat/completions", self.chat, ChatRequest),
            HttpRoute("POST", "/v1/completions", self.completions, CompletionRequest),
            HttpRoute("GET", "/v1/models", self.models),
            HttpRoute("GET", "/v1/models/{name:path}", self.model),
            HttpRoute("POST", "/tokenize", self.tokenize, TokenizeRequest),
            HttpRoute("POST", "/detokenize", self.detokenize, DetokenizeRequest),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        body = validate(ChatRequest, await self._answering.body(http))
        request_params.check_model(body.model, self._answering.settings)
        n = request_params.check_count(body, 1, self._answering.settings)
        chat = await self._answering.prepare(http, body)
        beams = beams_of(body, n, chat.grammar, self._answering.settings)
        choices = self._answering.choices(http, body, [chat.prompt], n, chat, grammar=chat.grammar)
        shape = ChatShape(
            f"chatcmpl-{uuid.uuid4().hex}",
            body.model,
            self._answering.tokenizer,
            _extras(body, logprobs=bool(body.logprobs)),
            choices,
            1,
            new_call_id=self._answering.chat_format.new_call_id,
        )
        return await self._answering.answer(http, body, choices, 1, shape, beams)

    async def completions(self, http: HttpRequest) -> Response:
        body = validate(CompletionRequest, await self._answering.body(http))
        request_params.check_model(body.model, self._answering.settings)
        prompts, ends = await aside(http, lambda: self._prompts(body))
        n = request_params.check_count(body, len(prompts), self._answering.settings)
        text = grammar_of(body.response_format, body.structured_outputs)
        grammar = Grammar(text=text) if text else None
        await self._answering.check_grammar(body, grammar)
        beams = beams_of(body, n, grammar, self._answering.settings)
        count = n if beams is None else body.n or 1
        choices = self._answering.choices(http, body, prompts, count, grammar=grammar, ends=ends)
        echoes: dict[int, str] = {}
        if body.echo:
            echoes = {
                c.index: self._answering.tokenizer.decode(
                    c.request.prompt, skip_special_tokens=body.skip_special_tokens
                )
                for c in choices
            }
        shape = CompletionShape(
            f"cmpl-{uuid.uuid4().hex}",
            body.model,
            self._answering.tokenizer,
            _extras(body, logprobs=body.logprobs is not None),
            choices,
            len(prompts),
            echoes=echoes,
            num_best=body.n or 1,
        )
        return await self._answering.answer(http, body, choices, len(prompts), shape, beams)

    def _prompts(self, body: CompletionRequest) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """Return (prompts, token ids that end the answers beside the model's own). Raises RequestError."""
        tokenizer, settings = self._answering.tokenizer, self._answering.settings
        if not body.suffix:
            is_cut = body.truncate_prompt_tokens is not None
            return request_params.prompts_of(body.prompt, "prompt", tokenizer, settings, is_cut=is_cut), ()
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(body, name):
                raise RequestError(f"{name} does not go with suffix", field=name)
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        prefixes = [text for text in texts if isinstance(text, str)]
        if len(prefixes) < len(texts):
            raise RequestError("suffix goes with prompts that are texts, not token ids", field="suffix")
        check_length(body.suffix, "suffix", tokenizer, settings.max_context_tokens)
        for prefix in prefixes:
            check_length(prefix, "prompt", tokenizer, settings.max_context_tokens)
        check_text(body.suffix, "suffix", tokenizer, settings.vocab_size)
        filled = [fill_in_middle(tokenizer, prefix, body.suffix) for prefix in prefixes]
        return [each.prompt for each in filled], filled[0].end

    async def models(self, http: HttpRequest) -> Response:
        settings = self._answering.settings
        names = (settings.model_name, *settings.aliases, *settings.adapters)
        page = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return JSONResponse({"object": "list", "data": [self._model_entry(name) for name in names], **page})

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        request_params.check_model(name, self._answering.settings)
        return JSONResponse(self._model_entry(name))

    async def tokenize(self, http: HttpRequest) -> Response:
        body = validate(TokenizeRequest, await self._answering.body(http))
        request_params.check_model(body.model, self._answering.settings)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", field="prompt")
        tokenizer, text = self._answering.tokenizer, body.prompt
        if text is None:
            ids = list(await self._answering.prompt_of(http, body.as_chat))
        else:
            ids = await aside(
                http, lambda: tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
            )
        return JSONResponse(
            {"tokens": ids, "count": len(ids), "max_model_len": self._answering.settings.max_context_tokens}
        )

    async def detokenize(self, http: HttpRequest) -> Response:
        body = validate(DetokenizeRequest, await self._answering.body(http))
        request_params.check_model(body.model, self._answering.settings)
        if body.tokens and max(body.tokens) >= self._answering.settings.vocab_size:
            raise RequestError(f"token id {max(body.tokens)} is outside the vocabulary", field="tokens")
        text = await aside(
            http, lambda: self._answering.tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return JSONResponse({"prompt": text})

    def _model_entry(self, name: str) -> dict[str, Any]:
        """Return a model as the clients of OpenAI, vLLM and Anthropic read it."""
        settings = self._answering.settings
        adapter = settings.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "root": settings.model_name if adapter is None else adapter.folder,
            "parent": None if adapter is None else settings.model_name,
            "max_model_len": settings.max_context_tokens,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._started, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": settings.max_context_tokens,
            "max_tokens": settings.max_context_tokens,
        }


def _extras(body: Common, *, logprobs: bool) -> Extras:
    return Extras(
        logprobs=logprobs,
        usage=body.wants_usage,
        usage_everywhere=body.wants_usage_everywhere,
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
    )

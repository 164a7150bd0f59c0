"""OpenAI's routes, and vLLM's for tokens."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.generation import request_params
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.choices import ChoiceStream
from cluster.ingress.generation.prompt_length import check_length
from cluster.ingress.generation.token_checks import check_text
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.openai.beam_requests import beams_of
from cluster.ingress.openai.chat_bodies import ChatShape
from cluster.ingress.openai.fill_in_middle import FillInMiddle, fill_in_middle
from cluster.ingress.openai.openai_bodies import CompletionShape, Extras
from cluster.ingress.openai.openai_requests import check_count, conversation_of, generation_of
from cluster.ingress.openai.request_bodies import (
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from cluster.ingress.tenants.fair_threads import Steps, at_once
from core.errors import RequestError


class OpenAIRoutes:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/v1/chat/completions", self.chat, ChatRequest),
            HttpRoute("POST", "/v1/completions", self.completions, CompletionRequest),
            HttpRoute("POST", "/tokenize", self.tokenize, TokenizeRequest),
            HttpRoute("POST", "/detokenize", self.detokenize, DetokenizeRequest),
            HttpRoute("GET", "/tokenizer_info", self.tokenizer_info),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        answering = self._answering
        body = await answering.read(http, ChatRequest)
        request_params.check_model(body.model, answering.settings)
        n = check_count(body, 1, answering.settings)
        conversation, request = await answering.aside(
            http, at_once(lambda: (conversation_of(body), generation_of(body)))
        )
        chat = await answering.prepare(http, conversation, request)
        beams = beams_of(body, request, n, chat.grammar, answering.settings)
        choices = await answering.choices(http, request, [chat.prompt], n, chat)
        shape = ChatShape(
            http.state.identity,
            body.model,
            answering.tokenizer,
            _extras(body, logprobs=bool(body.logprobs)),
            choices,
            1,
            new_call_id=answering.call_ids(http),
        )
        return await answering.answer(http, request, choices, 1, shape, beams)

    async def completions(self, http: HttpRequest) -> Response:
        body = await self._answering.read(http, CompletionRequest)
        request_params.check_model(body.model, self._answering.settings)
        num_prompts = len(request_params.items_of(body.prompt))
        n = check_count(body, num_prompts, self._answering.settings)
        prompts, ends = await self._answering.aside(http, lambda: self._prompts(body))
        request = await self._answering.aside(http, at_once(lambda: replace(generation_of(body), ends=ends)))
        await self._answering.check_grammar(request, request.grammar)
        beams = beams_of(body, request, n, request.grammar, self._answering.settings)
        count = n if beams is None else body.n or 1
        choices = await self._answering.choices(http, request, prompts, count)
        echoes: dict[int, str] = {}
        if body.echo:
            echoes = await self._answering.aside(http, lambda: self._echoes(body, choices))
        shape = CompletionShape(
            http.state.identity,
            body.model,
            self._answering.tokenizer,
            _extras(body, logprobs=body.logprobs is not None),
            choices,
            len(prompts),
            echoes=echoes,
            num_best=body.n or 1,
        )
        return await self._answering.answer(http, request, choices, len(prompts), shape, beams)

    def _echoes(self, body: CompletionRequest, choices: Sequence[ChoiceStream]) -> Steps[dict[int, str]]:
        """Return the prompts' texts, by choice."""
        texts: dict[tuple[int, ...], str] = {}
        decode = self._answering.tokenizer.decode
        for prompt in {choice.request.prompt for choice in choices}:
            yield
            texts[prompt] = decode(prompt, skip_special_tokens=body.skip_special_tokens)
        return {choice.index: texts[choice.request.prompt] for choice in choices}

    def _prompts(self, body: CompletionRequest) -> Steps[tuple[list[tuple[int, ...]], tuple[int, ...]]]:
        """Return (prompts, token ids that end the answers beside the model's own). Raises RequestError."""
        tokenizer, settings = self._answering.tokenizer, self._answering.settings
        if not body.suffix:
            is_cut = body.truncate_prompt_tokens is not None
            plain = request_params.prompts_of(body.prompt, "prompt", tokenizer, settings, is_cut=is_cut)
            return (yield from plain), ()
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(body, name):
                raise RequestError(f"{name} does not go with suffix", field=name)
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        prefixes = [text for text in texts if isinstance(text, str)]
        if len(prefixes) < len(texts):
            raise RequestError("suffix goes with prompts that are texts, not token ids", field="suffix")
        check_length(body.suffix, "suffix", tokenizer, settings.max_context_tokens)
        check_text(body.suffix, "suffix", tokenizer, settings.vocab_size)
        filled: list[FillInMiddle] = []
        for prefix in prefixes:
            yield
            check_length(prefix, "prompt", tokenizer, settings.max_context_tokens)
            filled.append(fill_in_middle(tokenizer, prefix, body.suffix))
        return [each.prompt for each in filled], filled[0].end

    async def tokenize(self, http: HttpRequest) -> Response:
        body = await self._answering.read(http, TokenizeRequest)
        request_params.check_model(body.model, self._answering.settings)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", field="prompt")
        if body.prompt is None:
            conversation = await self._answering.aside(http, at_once(lambda: conversation_of(body.as_chat)))
            ids = list(await self._answering.prompt_of(http, conversation))
        else:
            ids = await self._answering.tokens_of(http, body.prompt, special=body.add_special_tokens)
        return JSONResponse(
            {"tokens": ids, "count": len(ids), "max_model_len": self._answering.settings.max_context_tokens}
        )

    async def detokenize(self, http: HttpRequest) -> Response:
        body = await self._answering.read(http, DetokenizeRequest)
        request_params.check_model(body.model, self._answering.settings)
        if body.tokens and max(body.tokens) >= self._answering.settings.vocab_size:
            raise RequestError(f"token id {max(body.tokens)} is outside the vocabulary", field="tokens")
        return JSONResponse({"prompt": await self._answering.text_of(http, body.tokens)})

    async def tokenizer_info(self, http: HttpRequest) -> Response:
        """Return the tokenizer's own configuration, with the chat template that is used."""
        tokenizer, folder = self._answering.tokenizer, self._answering.settings.tokenizer_folder
        file = None if folder is None else folder / "tokenizer_config.json"
        own = (
            json.loads(await asyncio.to_thread(file.read_bytes)) if file is not None and file.exists() else {}
        )
        known = {
            "tokenizer_class": "",
            "vocab_size": tokenizer.vocab_size,
            "chat_template": tokenizer.template,
        }
        return JSONResponse({**known, **own, "chat_template": tokenizer.template or None})


def _extras(body: Common, *, logprobs: bool) -> Extras:
    wanted = body.stream_options or StreamOptions()
    return Extras(
        logprobs=logprobs,
        usage=bool(wanted.include_usage),
        usage_everywhere=bool(wanted.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
    )

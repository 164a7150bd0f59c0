"""Turns a request and its prompts into an answer, for every route that generates."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import BaseModel

from cluster.ingress.delivery.beam_search import BeamParams
from cluster.ingress.delivery.generator import ChatTokenizer, Generator
from cluster.ingress.delivery.shared_prompt import SharedPrompt
from cluster.ingress.generation import request_params
from cluster.ingress.generation.answer_identity import AnswerIdentity, NewId
from cluster.ingress.generation.body_shape import BodyShape, Json
from cluster.ingress.generation.body_work import BodyWork
from cluster.ingress.generation.chat_format import ChatFormat, PreparedChat
from cluster.ingress.generation.choices import ChoiceRunner, ChoiceStream
from cluster.ingress.generation.detokenize import TextStream
from cluster.ingress.generation.event_numbers import EventNumbers
from cluster.ingress.generation.http_responses import (
    SERVER_SENT_EVENTS,
    Settle,
    StreamForm,
    at_once_settled,
    events,
    gathered,
    streamed,
    unless_gone,
    whole,
)
from cluster.ingress.generation.model_state import state_of
from cluster.ingress.generation.prompt_length import check_counted
from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.generation.resuming import Resuming
from cluster.ingress.generation.token_checks import check_tokens
from cluster.ingress.generation.truncation import ends_of_prompts
from cluster.ingress.grammar.grammar_checker import GrammarChecker
from cluster.ingress.http.http_errors import describe
from cluster.ingress.images.image_intake import images_of
from cluster.ingress.parsers.output_events import PlainParser
from cluster.ingress.parsers.stop_strings import StopStrings
from cluster.ingress.requests.conversation import ChatConversation
from cluster.ingress.requests.generation_request import GenerationRequest, Terms
from cluster.ingress.telemetry.metrics import IngressMetrics
from cluster.ingress.tenants.access import Access, KeyHolder, Tenant
from cluster.ingress.tenants.fair_threads import Steps, at_once
from cluster.ingress.tenants.ledger import UsageLedger
from core.errors import RequestError, ShuttingDown
from core.types import Grammar, Request, SamplingParams, Slo

log = logging.getLogger(__name__)

_VECTORS_AT_ONCE = 32
"""The number of texts of one request that are embedded at a time, so that others' requests come in between."""

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)


class Answering:
    def __init__(
        self,
        generator: Generator,
        tokenizer: ChatTokenizer,
        settings: ApiSettings,
        access: Access,
        metrics: IngressMetrics,
        ledger: UsageLedger,
    ) -> None:
        self._generator, self._access = generator, access
        self.tokenizer, self.settings, self.metrics = tokenizer, settings, metrics
        self._runner = ChoiceRunner(generator, tokenizer, metrics, settings.model_name, ledger)
        folder = settings.tokenizer_folder
        self._grammars = GrammarChecker(folder, settings.vocab_size) if folder is not None else None
        self.chat_format = ChatFormat(tokenizer, settings)
        self.work = BodyWork(settings)
        self.resuming = Resuming(generator, settings.resume_s)

    async def state(self) -> str:
        return await state_of(self._generator)

    async def read(self, http: HttpRequest, kind: type[B]) -> B:
        """Return the body, validated. Raises RequestError, naming the field."""
        return await self.work.read(http, kind)

    async def aside(self, http: HttpRequest, work: Callable[[], Steps[T]]) -> T:
        """Return the result of `work` on the body that was read. Raises what it raises."""
        return await self.work.do(http, work)

    async def prepare(
        self, http: HttpRequest, conversation: ChatConversation, request: GenerationRequest
    ) -> PreparedChat:
        """Prepare what is to be generated. Raises RequestError."""
        chat = await self._with_images(
            http, conversation, lambda shown: self.chat_format.prepare(shown, request)
        )
        if conversation.effort is not None:
            http.state.effort = chat.effort.taken or "default"
            http.state.notes += [chat.effort.note] if chat.effort.note else []
        await self.check_grammar(request, chat.grammar)
        return chat

    async def prompt_of(self, http: HttpRequest, conversation: ChatConversation) -> tuple[int, ...]:
        """Return a conversation's tokens, which the tenant pays for. Raises RequestError."""
        await _check_account(http)
        prompt = await self._with_images(http, conversation, self.chat_format.prompt_of)
        http.state.holder.account.spend(len(prompt))
        return prompt

    async def tokens_of(self, http: HttpRequest, text: str, *, special: bool) -> list[int]:
        """Return a text's tokens, which the tenant pays for. `special`: with those that begin every text. Raises RequestError."""
        check_counted(text, "prompt", self.settings.max_context_tokens)
        await _check_account(http)
        encode = partial(self.tokenizer.encode, text, add_special_tokens=special)
        tokens = await self.aside(http, at_once(encode))
        http.state.holder.account.spend(len(tokens))
        return tokens

    async def text_of(self, http: HttpRequest, tokens: Sequence[int]) -> str:
        """Return the text of tokens, which the tenant pays for. Raises RequestError."""
        await _check_account(http)
        decode = partial(self.tokenizer.decode, tokens, skip_special_tokens=False)
        text = await self.aside(http, at_once(decode))
        http.state.holder.account.spend(len(tokens))
        return text

    async def _with_images(
        self, http: HttpRequest, conversation: ChatConversation, work: Callable[[ChatConversation], T]
    ) -> T:
        """Do `work` on the conversation once its images are there."""
        fetcher = self.settings.image_fetcher
        if fetcher is not None:
            messages = await unless_gone(http, fetcher.with_data(conversation.messages))
            if messages is not None:
                conversation = replace(conversation, messages=messages)
        num_more = sum(len(image.url) for image in images_of(conversation.messages))
        return await self.work.do(http, at_once(lambda: work(conversation)), num_more)

    async def answer(
        self,
        http: HttpRequest,
        request: GenerationRequest,
        choices: list[ChoiceStream],
        num_prompts: int,
        shape: BodyShape,
        beams: BeamParams | None = None,
        *,
        form: StreamForm = SERVER_SENT_EVENTS,
        settle: Settle = at_once_settled,
    ) -> Response:
        """`beams`: the choices are the best that a beam search finds. `form` is that of a stream. `settle` is awaited before its
        last events."""
        holder: KeyHolder = http.state.holder
        if beams is None:
            pieces = self._runner.run(choices, num_prompts, holder)
        else:
            pieces = self._runner.search(choices, num_prompts, holder, beams)
        if not request.stream:
            return await whole(http, pieces, choices, num_prompts, shape)
        begun, identity = asyncio.Event(), http.state.identity
        written = identity.written if form is SERVER_SENT_EVENTS else ""
        numbers, request_id = EventNumbers(written, identity.after, len(choices)), http.state.request_id
        source = events(
            pieces, choices, num_prompts, shape, request_id, begun, numbers=numbers, settle=settle
        )
        return await streamed(http, source, begun, self.settings.keep_alive_s, form)

    async def whole_body(
        self, http: HttpRequest, choices: list[ChoiceStream], num_prompts: int, shape: BodyShape
    ) -> Json:
        """Return the answer's body, for a route that makes another of it. Raises ClientGone."""
        pieces = self._runner.run(choices, num_prompts, http.state.holder)
        return await unless_gone(http, gathered(pieces, choices, num_prompts, shape))

    async def answer_aside(
        self, http: HttpRequest, choices: list[ChoiceStream], num_prompts: int, shape: BodyShape
    ) -> None:
        """Answer where no connection waits. `shape` is told the end, also of what fails. Raises ShuttingDown."""
        try:
            await gathered(
                self._runner.run(choices, num_prompts, http.state.holder), choices, num_prompts, shape
            )
        except Exception as error:
            if isinstance(error, ShuttingDown):
                raise
            request_id = http.state.request_id
            status, body, _ = describe(error, request_id)
            log.warning("request %s ended in the background: %r", request_id, error)
            shape.error(status, body, request_id)

    def fitting(self, request: GenerationRequest, prompt: Sequence[int]) -> GenerationRequest:
        """Return `request` where the context has room for as many tokens as it asks for; else a copy that asks for as many as
        there is room for."""
        room, wanted = self.settings.max_context_tokens - len(prompt), request.max_tokens
        return request if wanted is None or wanted <= room else replace(request, max_tokens=max(1, room))

    async def choices(
        self,
        http: HttpRequest,
        request: GenerationRequest,
        prompts: list[tuple[int, ...]],
        n: int,
        chat: PreparedChat | None = None,
    ) -> list[ChoiceStream]:
        """Return the choices to generate, and set `http.state.identity`. Raises RequestError."""
        request_params.check_generates(self.settings)
        if http.state.identity is None:
            http.state.identity = await self.resuming.identity(http, streams=request.stream)
        return await self.aside(http, at_once(partial(self._choices, http, request, prompts, n, chat)))

    def _choices(
        self,
        http: HttpRequest,
        asked: GenerationRequest,
        prompts: list[tuple[int, ...]],
        n: int,
        chat: PreparedChat | None,
    ) -> list[ChoiceStream]:
        slo, identity = self._slo(http, asked.terms), http.state.identity
        choices: list[ChoiceStream] = []
        common = request_params.to_sampling(asked, self.settings, self.tokenizer)
        if chat is not None:
            common = replace(common, grammar=chat.grammar, thinking=chat.thinking)
        for prompt in ends_of_prompts(asked, prompts, self.settings.max_context_tokens, self.tokenizer):
            max_tokens = request_params.max_new_tokens(asked, len(prompt), self.settings)
            seed = request_params.seed_of_prompt(asked, identity.new_seed())
            sampling = replace(common, max_tokens=max_tokens, seed=seed)
            shared = SharedPrompt() if n > 1 else None
            for choice in range(n):
                if choice:  # the prompt's tokens are scored once
                    sampling = replace(sampling, num_prompt_logprobs=-1)
                seeded = replace(sampling, seed=request_params.seed_of_choice(sampling.seed or 0, choice))
                field = asked.prompt_field
                request = self._request(http, asked.terms, slo, prompt, seeded, field, retain=asked.retain)
                images = chat.images if chat is not None else ()
                request = replace(request, hints=asked.hints, images=images)
                choices.append(self._choice(len(choices), request, asked, chat, shared, identity))
        log.debug("request %s runs as %s", http.state.request_id, [choice.request.id for choice in choices])
        return choices

    def _slo(self, http: HttpRequest, terms: Terms) -> Slo:
        header = http.headers.get("x-slo-class")
        own = self.settings.slo_classes
        if header is None and terms.service_tier in (None, "auto", "default"):
            header = http.state.holder.slo_class or None
        return self._access.slo(http.state.tenant, header, terms.service_tier, terms.priority, own)

    def _choice(
        self,
        index: int,
        request: Request,
        asked: GenerationRequest,
        chat: PreparedChat | None,
        shared: SharedPrompt | None,
        identity: AnswerIdentity,
    ) -> ChoiceStream:
        request = identity.of_sequence(request, index)
        hidden = chat.hidden_tokens if chat else None
        skips_special = asked.skip_special_tokens and hidden is None
        stops = self._stops(asked, hidden, skips_special=skips_special)
        return ChoiceStream(
            index,
            request,
            TextStream(
                self.tokenizer,
                request.prompt,
                skip_special_tokens=skips_special,
                hidden_tokens=hidden or (),
                placeholders=stops.placeholders,
            ),
            parser=chat.new_parser(stops) if chat else PlainParser(stops),
            stops=stops,
            prompt_only=asked.max_tokens == 0,
            shared=shared,
            begun=identity.begun(request),
        )

    def call_ids(self, http: HttpRequest) -> NewId:
        """Return what makes the ids of an answer's calls."""
        identity: AnswerIdentity = http.state.identity

        def new_call_id(choice: int = 0) -> str:
            return self.chat_format.call_id(identity.new_id(choice))

        return new_call_id

    def _stops(
        self, request: GenerationRequest, hidden: frozenset[int] | None, *, skips_special: bool
    ) -> StopStrings:
        """Return a sequence's stop strings. The special tokens that its text leaves out can be named in them."""
        special = self.tokenizer.special_tokens.items() if request.stops else ()
        return StopStrings(
            request.stops,
            hidden={text: token for text, token in special if skips_special or token in (hidden or ())},
            include=request.include_stop,
            min_tokens=request.min_tokens,
        )

    async def vectors(
        self,
        http: HttpRequest,
        terms: Terms,
        prompts: Sequence[tuple[int, ...]],
        field: str,
        seconds: Sequence[int] = (),
    ) -> list[np.ndarray]:
        """Return what the model makes of each prompt: (embedding_size,) float32, not normalised. `field` is the field of the body
        where the prompts stand. `seconds` says where in each the second text of a pair begins. Raises RequestError, and
        ClientGone when nobody waits for them any more."""
        settings = self.settings
        if settings.pooling is None:
            raise RequestError(
                f"the model {settings.model_name!r} does not embed texts: its folder has no modules.json; started with "
                "model.pooling=last (or mean, or cls) it would",
                field="model",
            )
        limit = settings.longest_text
        longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
        if len(prompts[longest]) > limit:
            raise RequestError(
                f"{field}[{longest}] has {len(prompts[longest])} tokens; this model takes {limit}",
                field=field,
                code="context_length_exceeded",
            )
        slo = self._slo(http, terms)
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=1, pooling=settings.pooling.kind)
        choices = [
            ChoiceStream(
                index,
                self._request(
                    http, terms, slo, prompt, replace(sampling, second_text_at=second), field, retain=False
                ),
                TextStream(self.tokenizer, ()),
                prompt_only=True,
            )
            for index, (prompt, second) in enumerate(zip(prompts, seconds or [0] * len(prompts), strict=True))
        ]
        return await unless_gone(http, self._vectors(choices, http.state.holder))

    def _request(
        self,
        http: HttpRequest,
        terms: Terms,
        slo: Slo,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        prompt_field: str,
        *,
        retain: bool,
    ) -> Request:
        """Return one sequence on the account of the tenant that asks. Raises RequestError where the model does not have its
        tokens."""
        tenant: Tenant = http.state.tenant
        request = Request(
            id=self._generator.new_request_id(),
            prompt=prompt,
            sampling=sampling,
            reply_to=self._generator.address,
            slo=slo,
            salt=tenant.salt(terms.cache_salt),
            adapter=request_params.adapter_of(terms.model, self.settings),
            arrival_at=http.state.arrival_at,
            tenant=tenant.name,
            weight=tenant.rules.weight,
            retain=retain,
        )
        check_tokens(request, prompt_field, self.tokenizer, self.settings.vocab_size)
        return request

    async def _vectors(self, choices: Sequence[ChoiceStream], holder: KeyHolder) -> list[np.ndarray]:
        found: dict[int, np.ndarray] = {}
        async with aclosing(self._runner.run(choices, len(choices), holder, _VECTORS_AT_ONCE)) as pieces:
            async for piece in pieces:
                assert piece.token is not None
                found[piece.index] = np.frombuffer(piece.token.embedding, "<f4")
        return [found[index] for index in range(len(choices))]

    async def check_grammar(self, request: GenerationRequest, grammar: Grammar | None) -> None:
        """Raise RequestError where the answer cannot be held to the grammar."""
        if grammar is None:
            return
        field = request.constrained_by
        request_params.check_constrainable(request, field, self.settings)
        if self._grammars is None:
            raise RequestError(f"{field}: this server's tokenizer cannot be constrained", field=field)
        await self._grammars.check(grammar.text, field)


async def _check_account(http: HttpRequest) -> None:
    """Raise Overloaded where the tenant has had more tokens than it may."""
    async with http.state.holder.account.running(0, 0):
        pass

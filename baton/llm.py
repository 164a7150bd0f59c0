"""Offline use from Python: the whole cluster in this process, behind one blocking call."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from os import environ
from pathlib import Path
from typing import Any

import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.offline_requests import OfflineRequest, Prompt, offline_request, sampling_of
from cluster.ingress.api_factory import api_settings
from cluster.ingress.bodies.body_model import validate
from cluster.ingress.bodies.request_fields import as_tuple
from cluster.ingress.generation.chat_format import ChatFormat
from cluster.ingress.generation.detokenize import TextStream
from cluster.ingress.generation.request_params import check_constrainable, check_generates, prompts_of
from cluster.ingress.generation.token_checks import check_tokens
from cluster.ingress.grammar.grammar_checker import GrammarChecker
from cluster.ingress.model_card import describe_adapter, read_model_card
from cluster.ingress.openai.openai_requests import conversation_of, generation_of
from cluster.ingress.openai.request_bodies import ChatRequest
from cluster.ingress.parsers.stop_strings import StopStrings
from cluster.ingress.requests.conversation import ChatConversation
from cluster.ingress.requests.generation_request import GenerationRequest
from cluster.ingress.tenants.fair_threads import finished
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig, load
from core.errors import Overloaded, ReplicaLost, RequestError
from core.prompt_images import PromptImage
from core.request_checks import check_computable
from core.types import FinishReason, Request, SamplingParams, Slo
from models.text.tokenizer import load_tokenizer

_SLO = Slo(name="batch", ttft_s=3600.0, tpot_s=10.0, priority=-1)


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt."""

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt: Prompt
    """As the caller gave it."""
    request: Request
    stops: tuple[str, ...]


class LLM:
    """A model for offline batches: `LLM("embedded").generate(["def f("])`. Also a context manager; `close` frees it.

    `config` and `overrides` are the server's own configuration; without them there is one instance that does everything. What
    the server's API refuses raises RequestError here. An instance that fails is replaced."""

    def __init__(
        self,
        model: str = "embedded",
        config: ClusterConfig | None = None,
        *,
        adapters: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> None:
        dotted = {key.replace("__", "."): value for key, value in overrides.items()}
        if adapters is not None:
            dotted["model.adapters"] = dict(adapters)
        base = config.model_dump() if config else {"prefill_instances": 0}
        self.config = load(base, environ, {"model.path": model, **dotted})
        self.card = read_model_card(self.config)
        self.tokenizer = load_tokenizer(self.card.folder)
        self._settings = api_settings(self.config, self.card)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-llm", daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        running = LocalCluster.running(self.config, replaces_instances=True)
        try:
            self._cluster = self._call(self._stack.enter_async_context(running))
        except BaseException:
            self._stop_loop()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        adapter: str = "",
        progress: bool = True,
    ) -> list[Completion]:
        """Return one Completion for each prompt (a text or token ids), in the order of the prompts. Without `params`: up to 64
        tokens, sampled as the model's makers recommend. `adapter`: one of those in `model.adapters` (`LLM(path, adapters={"sql":
        folder})`), by name; empty: none. Raises RequestError before anything is generated, and ReplicaLost."""
        key = self._adapter_key(adapter)
        asked = [
            self._asked(prompt, self._body(prompt, params, stop, ignore_eos=ignore_eos), key)
            for prompt in _as_batch(prompts)
        ]
        with Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            disable=not progress,
            transient=True,
        ) as bar:
            task = bar.add_task("", total=len(asked))
            return self._call(self._all(asked, lambda: bar.advance(task)))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        adapter: str = "",
    ) -> Completion:
        """Return the assistant's next turn. Messages are as in the server's API. The rest is as in `generate`."""
        chat = self._chats.prepare(*self._conversation(messages))
        body = self._body(chat.prompt, params, stop, ignore_eos=ignore_eos)
        asked = self._asked(chat.prompt, body, self._adapter_key(adapter), "messages", chat.images)
        return self._call(self._all([asked], lambda: None))[0]

    def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load an adapter that lies in one of `adapters.folders` (`LLM(path, adapters__folders=[...])`). `in_place`: one of this
        name may be there, and goes. Raises ConfigError and RequestError."""
        found = describe_adapter(self.config, self.card, name, path)
        self._call(self._cluster.frontend.adapters.load(found.key, found.folder, in_place=in_place))

    def unload_adapter(self, name: str) -> None:
        """Give up an adapter that was loaded so. Raises RequestError."""
        self._call(self._cluster.frontend.adapters.unload(name))

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._stack.aclose())
            self._stop_loop()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _chats(self) -> ChatFormat:
        return ChatFormat(self.tokenizer, self._settings)

    @cached_property
    def _grammars(self) -> GrammarChecker:
        return GrammarChecker(Path(self.card.folder), self.card.vocab_size)

    def _conversation(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[ChatConversation, GenerationRequest]:
        """Return the messages as the API takes them, with every image that a URL names. Raises RequestError."""
        body = validate(ChatRequest, {"model": self.card.name, "messages": list(messages)})
        conversation, request = conversation_of(body), generation_of(body)
        if (fetcher := self._settings.image_fetcher) is not None:
            fetched = self._call(fetcher.with_data(conversation.messages))
            conversation = conversation if fetched is None else replace(conversation, messages=fetched)
        return conversation, request

    def _body(
        self, prompt: Prompt, params: SamplingParams | None, stop: str | Sequence[str], *, ignore_eos: bool
    ) -> OfflineRequest:
        check_generates(self._settings)
        body = offline_request(self.card.name, prompt, params, stop=stop, ignore_eos=ignore_eos)
        if body.grammar is not None:
            check_constrainable(body.generation, "grammar", self._settings)
            self._call(self._grammars.check(body.grammar.text, "grammar"))
        return body

    def _asked(
        self,
        prompt: Prompt,
        body: OfflineRequest,
        adapter: str,
        field: str = "prompt",
        images: tuple[PromptImage, ...] = (),
    ) -> _Asked:
        """Return what is asked of the cluster for one prompt. `field` is what the prompt was made of. Raises RequestError."""
        (ids,) = finished(prompts_of(body.prompt, field, self.tokenizer, self._settings))
        frontend = self._cluster.frontend
        request = Request(
            id=frontend.new_request_id(),
            prompt=ids,
            sampling=sampling_of(body, len(ids), self._settings, self.tokenizer),
            reply_to=frontend.address,
            adapter=adapter,
            slo=_SLO,
            images=images,
        )
        check_tokens(request, field, self.tokenizer, self._settings.vocab_size)
        check_computable(request, self._settings.vocab_size)
        return _Asked(prompt, request, as_tuple(body.stop))

    async def _all(self, batch: list[_Asked], done: Any) -> list[Completion]:
        limit = asyncio.Semaphore(self.config.schedule.max_queued_requests)

        async def one(asked: _Asked) -> Completion:
            async with limit:
                answer = await self._one(asked)
            done()
            return answer

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(asked)) for asked in batch]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, asked: _Asked) -> Completion:
        """Generate once an instance serves. Raises ReplicaLost where none will."""
        while True:
            try:
                await self._cluster.serving()
            except ReplicaLost as error:
                raise ReplicaLost(f"{error}. Close this LLM and make another one") from None
            try:
                return await self._generated(asked)
            except Overloaded as error:  # the queue has room for all, so instances are missing
                await asyncio.sleep(error.retry_after_s)

    async def _generated(self, asked: _Asked) -> Completion:
        request = replace(asked.request, id=self._cluster.frontend.new_request_id())
        stops = StopStrings(
            asked.stops, hidden=self.tokenizer.special_tokens, min_tokens=request.sampling.min_tokens
        )
        stream = TextStream(self.tokenizer, request.prompt, placeholders=stops.placeholders)
        text, tokens, finish = "", [], FinishReason.STOP
        source = self._cluster.frontend.generate(request)
        try:
            async for token in source:
                tokens.append(token.token)
                stops.begin_token()
                if token.finish is FinishReason.STOP:
                    break
                text += stops.push(stream.push(token.token))
                if stops.found is not None:
                    break
                finish = token.finish or finish
        finally:
            await source.aclose()
        text += stops.push(stream.finish()) + stops.flush()
        ends = finish if stops.found is None else FinishReason.STOP
        return Completion(asked.prompt, text, tuple(tokens), ends)

    def _adapter_key(self, name: str) -> str:
        if not name:
            return ""
        adapters = {**self.card.adapters, **self._cluster.frontend.adapters.served}
        if name not in adapters:
            known = ", ".join(map(repr, adapters)) or "none"
            raise RequestError(f"there is no adapter {name!r}; this model has {known}", field="adapter")
        return adapters[name].key

    def _call(self, work: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

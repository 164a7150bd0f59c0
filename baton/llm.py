"""Offline use from Python: the whole cluster in this process, behind one blocking call."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from os import environ
from secrets import randbits
from typing import Any

import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.ingress.api.api_factory import api_settings
from cluster.ingress.api.body_model import validate
from cluster.ingress.api.chat_format import ChatFormat
from cluster.ingress.api.detokenize import TextStream
from cluster.ingress.api.openai_requests import ChatRequest
from cluster.ingress.model_card import describe_adapter, read_model_card
from cluster.ingress.parsers.stop_strings import StopStrings
from cluster.local import LocalCluster
from core.config import ClusterConfig, load
from core.errors import RequestError
from core.prompt_pictures import Picture
from core.types import FinishReason, Request, SamplingParams, Slo
from models.tokenizer import load_tokenizer

Prompt = str | Sequence[int]


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
    pictures: tuple[Picture, ...] = ()
    adapter: str = ""
    """Its key."""


class LLM:
    """A model for offline batches: `LLM("embedded").generate(["def f("])`. Also a context manager; `close` frees it.

    `config` and `overrides` are the server's own configuration; without them there is one instance that does everything."""

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
        self._chats: ChatFormat | None = None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-llm", daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        try:
            self._cluster = self._call(self._stack.enter_async_context(LocalCluster.running(self.config)))
        except BaseException:
            self._stop_loop()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        adapter: str = "",
        progress: bool = True,
    ) -> list[Completion]:
        """Return one Completion for each prompt (a text or token ids), in the order of the prompts. `adapter`: one of those in
        `model.adapters` (`LLM(path, adapters={"sql": folder})`), by name; empty: none. Raises RequestError."""
        batch, key = _as_batch(prompts), self._adapter_key(adapter)
        params = self._with_eos(params or SamplingParams(max_tokens=64), ignore_eos)
        with Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            disable=not progress,
            transient=True,
        ) as bar:
            task = bar.add_task("", total=len(batch))
            asked = [_Asked(prompt, adapter=key) for prompt in batch]
            return self._call(self._all(asked, params, tuple(stop), lambda: bar.advance(task)))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        adapter: str = "",
    ) -> Completion:
        """Return the assistant's next turn. Messages may have parts, with pictures among them, as in the server's API. `stop`,
        `ignore_eos` and `adapter` are as in `generate`. Raises RequestError."""
        prompt, pictures = self._rendered(messages)
        params = self._with_eos(params or SamplingParams(max_tokens=64), ignore_eos)
        asked = _Asked(prompt, pictures, self._adapter_key(adapter))
        return self._call(self._all([asked], params, tuple(stop), lambda: None))[0]

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

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Prompt, tuple[Picture, ...]]:
        if not any(isinstance(message.get("content"), list) for message in messages):
            text = self.tokenizer.render_chat(list(messages))
            return self.tokenizer.encode(text, add_special_tokens=False), ()
        self._chats = self._chats or ChatFormat(self.tokenizer, api_settings(self.config, self.card))
        body = validate(ChatRequest, {"model": self.card.name, "messages": list(messages)})
        chat = self._chats.prepare(body)
        return chat.prompt, chat.pictures

    async def _all(
        self, batch: list["_Asked"], params: SamplingParams, stop: tuple[str, ...], done: Any
    ) -> list[Completion]:
        limit = asyncio.Semaphore(self.config.schedule.max_queued_requests)

        async def one(asked: _Asked, seed: int) -> Completion:
            async with limit:
                answer = await self._one(asked, replace(params, seed=seed), stop)
            done()
            return answer

        seeds = [params.seed or randbits(63)] * len(batch)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(one(asked, seed)) for asked, seed in zip(batch, seeds, strict=True)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, asked: "_Asked", params: SamplingParams, stop: tuple[str, ...]) -> Completion:
        prompt = asked.prompt
        ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        self._check(ids, params)
        frontend = self._cluster.frontend
        request = Request(
            id=frontend.new_request_id(),
            prompt=ids,
            sampling=params,
            reply_to=frontend.address,
            adapter=asked.adapter,
            slo=Slo(name="batch", ttft_s=3600.0, tpot_s=10.0, priority=-1),
            pictures=asked.pictures,
        )
        stops = StopStrings(stop, hidden=self.tokenizer.special_tokens, min_tokens=params.min_tokens)
        stream = TextStream(self.tokenizer, ids, placeholders=stops.placeholders)
        text, tokens, finish = "", [], FinishReason.STOP
        source = frontend.generate(request)
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
        return Completion(prompt, text, tuple(tokens), finish if stops.found is None else FinishReason.STOP)

    def _adapter_key(self, name: str) -> str:
        if not name:
            return ""
        adapters = {**self.card.adapters, **self._cluster.frontend.adapters.served}
        if name not in adapters:
            known = ", ".join(map(repr, adapters)) or "none"
            raise RequestError(f"there is no adapter {name!r}; this model has {known}", field="adapter")
        return adapters[name].key

    def _check(self, ids: tuple[int, ...], params: SamplingParams) -> None:
        if not ids:
            raise RequestError("a prompt is empty", field="prompts")
        if len(ids) >= self.card.max_context_tokens:
            raise RequestError(
                f"a prompt has {len(ids)} tokens; the model takes {self.card.max_context_tokens} with the output",
                field="prompts",
            )

    def _with_eos(self, params: SamplingParams, ignore_eos: bool) -> SamplingParams:
        stops = params.stop_token_ids if ignore_eos else (*params.stop_token_ids, *self.card.eos_token_ids)
        return replace(
            params, stop_token_ids=stops, masked_until_min=(*params.stop_token_ids, *self.card.eos_token_ids)
        )

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
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

"""The timed client: streams one request after another over HTTP and notes when each token came."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from baton.bench.bench_workload import BenchRequest
from baton.bench.sse import DONE, SseReader, error_message


@dataclass(slots=True, kw_only=True)
class Record:
    """What happened to one offered request. Times are seconds since the run's start."""

    sent_at: float
    tokens_at: list[float] = field(default_factory=list[float])
    """When each piece of the answer came; a piece is one token, or a few that form a character."""
    done_at: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    """The kind of failure, empty if none."""
    detail: str = ""
    """What the server said about the failure."""
    late_s: float = 0.0
    """How much later than planned an open loop sent it: more than a little means that the client is too slow."""


class Client:
    def __init__(
        self, base_url: str, model: str, api_key: str, timeout_s: float, extra: dict[str, Any], *, chat: bool
    ) -> None:
        headers = {"Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1024)
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout_s, limits=limits)
        self._model, self._chat, self._timeout_s, self._extra = model, chat, timeout_s, extra

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, job: BenchRequest, origin_at: float) -> Record:
        """Stream `job`; an error is part of the record."""
        body = json.dumps(self._body(job)).encode()
        record = Record(sent_at=time.perf_counter() - origin_at)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, record, origin_at)
        except (TimeoutError, httpx.TimeoutException):
            record.error = "timeout"
        except httpx.HTTPError as error:
            record.error, record.detail = f"transport: {type(error).__name__}", str(error)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            record.error, record.detail = "malformed event", str(error)
        record.done_at = time.perf_counter() - origin_at
        if not record.error and not record.tokens_at:
            record.error = "no token"
        return record

    async def _stream(self, body: bytes, record: Record, origin_at: float) -> None:
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", path, content=body, headers=headers) as answer:
            if answer.status_code != 200:
                record.error, record.detail = (
                    f"HTTP {answer.status_code}",
                    error_message(await answer.aread()),
                )
                return
            reader, done = SseReader(), False
            async for piece in answer.aiter_bytes():
                now = time.perf_counter() - origin_at
                for payload in reader.feed(piece):
                    if payload == DONE:
                        done = True  # read on: a connection can be used again only when its stream was read to the end
                    else:
                        _note(json.loads(payload), record, now)
            if not done and not record.error:
                record.error = "stream cut short"

    def _body(self, job: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": job.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        if not self._chat:
            return {**body, "prompt": job.prompt}
        messages = job.prompt if isinstance(job.prompt, list) else [{"role": "user", "content": job.prompt}]
        return {**body, "messages": messages}


def _note(event: dict[str, Any], record: Record, now: float) -> None:
    """Put what `event` says into `record`."""
    if error := event.get("error"):
        record.error, record.detail = "error in the stream", str(error)
    if usage := event.get("usage"):
        record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if not record.tokens_at and record.output_tokens:
            # Its only tokens have no text: an end of text, or part of a character.
            record.tokens_at.append(now)
    choice = (event.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
        record.tokens_at.append(now)


async def open_loop(
    client: Client, jobs: Sequence[BenchRequest], on_done: Callable[[Record], None]
) -> list[Record]:
    """Send each job at its arrival time, whatever has become of the others."""
    origin_at = time.perf_counter()

    async def one(job: BenchRequest) -> Record:
        await asyncio.sleep(max(0.0, job.arrival_at - (time.perf_counter() - origin_at)))
        record = await client.send(job, origin_at)
        record.late_s = record.sent_at - job.arrival_at
        on_done(record)
        return record

    return list(await asyncio.gather(*(one(job) for job in jobs)))


async def closed_loop(
    client: Client, jobs: Sequence[BenchRequest], concurrency: int, on_done: Callable[[Record], None]
) -> list[Record]:
    """Keep `concurrency` requests running until all jobs are done."""
    origin_at = time.perf_counter()
    todo, records = iter(jobs), list[Record]()

    async def worker() -> None:
        for job in todo:
            record = await client.send(job, origin_at)
            records.append(record)
            on_done(record)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return records

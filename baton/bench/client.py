"""The timed client: streams one request after another over HTTP and notes when each token came."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from baton.bench.workload import Job


@dataclass(slots=True)
class Record:
    """What happened to one offered request. Times are seconds since the run's start."""

    sent_s: float
    tokens_s: list[float] = field(default_factory=list[float])
    done_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


class Client:
    def __init__(
        self, base_url: str, model: str, api_key: str, chat: bool, timeout_s: float, extra: dict[str, Any]
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1024)
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout_s, limits=limits)
        self._model, self._chat, self._extra = model, chat, extra

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, job: Job, origin_s: float) -> Record:
        """Stream `job`; an error is part of the record."""
        record = Record(time.perf_counter() - origin_s)
        try:
            await self._stream(job, record, origin_s)
        except httpx.HTTPError as error:
            record.error = f"transport: {type(error).__name__}"
        record.done_s = time.perf_counter() - origin_s
        if not record.error and not record.tokens_s:
            record.error = "no token"
        return record

    async def _stream(self, job: Job, record: Record, origin_s: float) -> None:
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        async with self._http.stream("POST", path, json=self._body(job)) as answer:
            if answer.status_code != 200:
                record.error = f"HTTP {answer.status_code}"
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now = time.perf_counter() - origin_s
                event = json.loads(line[6:])
                if "error" in event:
                    record.error = "error in the stream"
                    return
                if _has_text(event):
                    record.tokens_s.append(now)
                if usage := event.get("usage"):
                    record.prompt_tokens, record.output_tokens = (
                        usage["prompt_tokens"],
                        usage["completion_tokens"],
                    )

    def _body(self, job: Job) -> dict[str, Any]:
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


def _has_text(event: dict[str, Any]) -> bool:
    choices = event.get("choices") or [{}]
    return bool(choices[0].get("text") or (choices[0].get("delta") or {}).get("content"))


async def open_loop(client: Client, jobs: Sequence[Job], on_done: Callable[[Record], None]) -> list[Record]:
    """Send each job at its arrival time, whatever has become of the others."""
    origin_s = time.perf_counter()

    async def one(job: Job) -> Record:
        await asyncio.sleep(max(0.0, job.arrival_s - (time.perf_counter() - origin_s)))
        record = await client.send(job, origin_s)
        on_done(record)
        return record

    return list(await asyncio.gather(*(one(job) for job in jobs)))


async def closed_loop(
    client: Client, jobs: Sequence[Job], concurrency: int, on_done: Callable[[Record], None]
) -> list[Record]:
    """Keep `concurrency` requests running until all jobs are done."""
    origin_s = time.perf_counter()
    todo, records = iter(jobs), list[Record]()

    async def worker() -> None:
        for job in todo:
            record = await client.send(job, origin_s)
            records.append(record)
            on_done(record)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return records

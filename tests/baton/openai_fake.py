"""An OpenAI endpoint whose words and delays are known, for the tests of its clients."""

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from cluster.ingress.http.http_server import HttpServer
from tests.patience import PATIENCE_S


@dataclass(kw_only=True)
class Fake:
    first_s: float = 0.0
    gap_s: float = 0.0
    endless: bool = False
    breaks_at: int = 0
    """Events have ids, and the connection breaks after this one, each time that it has been reached."""
    bodies: "queue.Queue[dict[str, Any]]" = field(default_factory=queue.Queue)
    url: str = ""

    def seen(self) -> list[dict[str, Any]]:
        return list(self.bodies.queue)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/v1/models", lambda: {"data": [{"id": "fake"}]}, response_model=None)
        app.add_api_route("/tokenize", lambda: {"tokens": [5, 900, 7]}, methods=["POST"], response_model=None)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.add_api_route(path, self._answer, methods=["POST"], response_model=None)
        return app

    async def _answer(self, request: Request) -> StreamingResponse | JSONResponse:
        body = await request.json()
        self.bodies.put(body)
        if body.get("prompt") == "refuse" or "refuse" in str(body.get("messages", [{}])[-1].get("content")):
            return JSONResponse({"error": {"message": "too many requests"}}, 429)
        if self.breaks_at:
            return StreamingResponse(self._numbered(body, int(request.headers.get("last-event-id", 0))))
        return StreamingResponse(self._events(body))

    async def _numbered(self, body: dict[str, Any], after: int) -> AsyncIterator[str]:
        number = 0
        async for event in self._events(body):
            number += 1
            if number > after:
                yield f"id: {number}\n{event}"
            if number == after + self.breaks_at:
                raise ConnectionError

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        await asyncio.sleep(self.first_s)
        tokens, count = body["max_tokens"], 0
        while self.endless or count < tokens:
            # U+2028 and U+0085 are no line ends of an event stream
            text = "a\u2028\u0085" if count == 0 else f" {count}"
            choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
            yield f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n"
            count += 1
            await asyncio.sleep(max(self.gap_s, 0.01 if self.endless else 0.0))
        yield f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 3, 'completion_tokens': tokens}})}\n\n"
        yield "data: [DONE]\n\n"


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """`fake` on a thread of its own, at `fake.url`."""
    ready, end = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        server = HttpServer(fake.app(), "127.0.0.1", [0], shared=False)
        fake.url = f"http://127.0.0.1:{server.port}"
        loops.append(asyncio.get_running_loop())
        server.start()
        ready.set()
        await end.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield fake
    finally:
        loops[0].call_soon_threadsafe(end.set)
        thread.join(PATIENCE_S)

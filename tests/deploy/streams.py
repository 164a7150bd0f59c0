"""Streams of letters from a paced ingress, and what became of each."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from baton.bench.sse import DONE, SseReader
from tests.cluster.ingress.api.fakes import NAME
from tests.patience import until

_STAGGER_S = 0.05
"""Loops begin one after another: at any moment streams are in every stage."""


@dataclass(kw_only=True)
class Stream:
    started_at: float
    arrivals: list[float] = field(default_factory=list[float])
    """When each event came, on the client's clock; several in one piece have one time."""
    status: int = 0
    error: str = ""
    done: bool = False

    @property
    def outcome(self) -> str:
        """ok; cut (broken off visibly after the first byte); refused (before it); silent (ended as if it were whole)."""
        if self.done:
            return "ok"
        if not self.arrivals:
            return "refused"
        return "cut" if self.error else "silent"

    @property
    def retriable(self) -> bool:
        """Would an OpenAI client have tried again?"""
        return bool(self.error) or self.status in (429, 500, 502, 503, 504)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def stream(
    client: httpx.AsyncClient, num_tokens: int, receipts: "Receipts | None" = None, name: int = 0
) -> Stream:
    got = Stream(started_at=time.monotonic())
    prompt = "x" if receipts is None else receipts.prompt(name)
    body = {"model": NAME, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
    reader = SseReader()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            got.status = answer.status_code
            async for piece in answer.aiter_raw():
                events = reader.feed(piece) if answer.status_code == 200 else []
                got.done = got.done or DONE in events
                num_tokens_come = sum(event != DONE for event in events)
                got.arrivals += [time.monotonic()] * num_tokens_come
                if receipts is not None:
                    receipts.give(name, num_tokens_come)
    except httpx.HTTPError as error:
        got.error = repr(error)
    return got


def client_of(url: str) -> httpx.AsyncClient:
    """One for all streams: each stream has a connection of its own all the same."""
    return httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None))


async def burst(
    url: str, num_streams: int, num_tokens: int, receipts: "Receipts | None" = None
) -> list[Stream]:
    """`num_streams` at once."""
    async with client_of(url) as client:
        return await asyncio.gather(*(stream(client, num_tokens, receipts, i) for i in range(num_streams)))


class Receipts:
    """Tells the ingress, past the load balancer, which tokens a client has received.

    A stream whose tokens wait for receipts ends only if whatever lies between passes each token on at once, however busy
    the machine is."""

    def __init__(self) -> None:
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._port = 0

    @classmethod
    @asynccontextmanager
    async def listening(cls) -> "AsyncGenerator[Receipts]":
        receipts = cls()
        async with receipts.serving():
            yield receipts

    @asynccontextmanager
    async def serving(self) -> "AsyncGenerator[None]":
        async with await asyncio.start_server(self._welcome, "127.0.0.1", 0) as server:
            self._port = server.sockets[0].getsockname()[1]
            yield
            for writer in self._writers.values():
                writer.close()

    def prompt(self, name: int) -> str:
        """A prompt for which `connected_receipts` finds the way here."""
        return f"{self._port} {name}"

    def give(self, name: int, num_tokens: int) -> None:
        self._writers[name].write(b"." * num_tokens)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[int(await reader.readline())] = writer
        writer.write(b".")


@asynccontextmanager
async def connected_receipts(prompt: str) -> AsyncGenerator[asyncio.StreamReader | None]:
    """One byte comes at the start, and one for each token received. None: the prompt names no `Receipts`."""
    port, _, name = prompt.partition(" ")
    if not name:
        yield None
        return
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    try:
        writer.write(f"{name}\n".encode())
        yield reader
    finally:
        writer.close()


class Load:
    """`num_loops` clients, each with one stream after another, inside the block."""

    def __init__(self, url: str, num_loops: int, num_tokens: int) -> None:
        self._url, self._num_loops, self._num_tokens = url, num_loops, num_tokens
        self._stop = asyncio.Event()
        self.streams: list[Stream] = []
        """The streams that have ended."""

    async def __aenter__(self) -> "Load":
        self._client = client_of(self._url)
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(self._num_loops)]
        await self.more(2 * self._num_loops)
        return self

    async def more(self, num_streams: int) -> None:
        """Wait until so many more have come whole, however long the machine takes for them."""
        wanted = self._num_whole() + num_streams
        await until(lambda: self._num_whole() >= wanted)

    def _num_whole(self) -> int:
        return sum(stream.done for stream in self.streams)

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def _run(self, i: int) -> None:
        await asyncio.sleep(i * _STAGGER_S)
        while not self._stop.is_set():
            self.streams.append(await stream(self._client, self._num_tokens))

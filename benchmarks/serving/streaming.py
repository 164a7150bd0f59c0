"""How many tokens a second one ingress can stream: from an instance's message for each step to server-sent events.

    python -m benchmarks.serving.streaming [--json FILE] [--rounds 10]

One process is an ingress, with mail over TCP, the embedded model's tokenizer and HTTP, as under Ray. This one stands for a
scheduler, for an instance, which sends a token of each sequence in each step, and for the clients. A step is sent when all
clients have their tokens of the one before, so nothing is waited for and nothing piles up. What counts is the ingress's time on
processors, of all its threads, from the system's account; the least of the rounds counts."""

import asyncio
import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.report import parser, write
from cluster.ingress.api_factory import build_app
from cluster.ingress.delivery.frontend import Frontend
from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.model_card import read_model_card
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.access import Access, read_rules
from core.clock import WallClock
from core.config.cluster_config import load
from core.garbage import leave_out_all_there_is
from core.messages import Message, PlaceReply, PlaceRequest, Submit, Tokens
from core.types import FinishReason, Request, Route, TokenOut
from models.text.tokenizer import load_tokenizer
from net.mail import TcpMail

PREDICTION = (
    "50 us of a processor for a token of a chat, so 20,000 tokens a second by one ingress; wanted are 17,000"
)
STREAMS, STEPS, WARM_STEPS = 256, 60, 10
KEY = b"a benchmark's key"
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps in the warm sun for an hour or two. "
CONFIG: dict[str, Any] = {"prefill_instances": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Tell me a story."},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me a story."}]},
}


def ingress(scheduler: str, pipe: Connection, values: dict[str, Any] = CONFIG) -> None:
    """Serve until something comes by `pipe`."""
    uvloop.run(_ingress(scheduler, pipe, values))


async def _ingress(scheduler: str, pipe: Connection, values: dict[str, Any]) -> None:
    config = load(values, {})
    card = read_model_card(config)
    observers = make_observers(card.name, "")

    async def schedulers() -> list[str]:
        return [scheduler]

    frontend = Frontend(
        TcpMail(KEY, config=config.mail),
        WallClock(),
        config.schedule,
        config.engine.block_size,
        resolve_schedulers=schedulers,
        request_timeout_s=config.serve.request_timeout_s,
        observe=observers.observe,
    )
    app = build_app(frontend, config, card, Access(read_rules(config)), observers)
    server = HttpServer(app, "127.0.0.1", [0], shared=False)
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), over.set)
    running = asyncio.create_task(frontend.run())
    leave_out_all_there_is()
    server.start()
    pipe.send(server.port)
    await over.wait()
    running.cancel()
    await frontend.close()
    await server.stop()
    observers.close()


class Backend:
    """A scheduler that knows one instance, and that instance."""

    def __init__(self, tokens: list[int]) -> None:
        """`tokens` are generated over and over."""
        self._tokens = tokens
        self._scheduler, self._instance = TcpMail(KEY), TcpMail(KEY)
        self._scheduler.listen(self._place, lambda _: None)
        self._instance.listen(self._submit, lambda _: None)
        self.address = self._scheduler.address
        self._running: list[Request] = []
        self._changed = asyncio.Event()

    async def have(self, num_requests: int) -> None:
        """Wait until so many requests are here."""
        while len(self._running) < num_requests:
            self._changed.clear()
            await self._changed.wait()

    def step(self, index: int, is_last: bool) -> None:
        """Send token `index` of each request."""
        token = self._tokens[index % len(self._tokens)]
        finish = FinishReason.LENGTH if is_last else None
        sampled = [
            TokenOut(request_id=one.id, attempt=one.attempt, index=index, token=token, finish=finish)
            for one in self._running
        ]
        self._instance.send(self._running[0].reply_to, Tokens(tuple(sampled)))
        if is_last:
            self._running.clear()

    async def close(self) -> None:
        await self._scheduler.close()
        await self._instance.close()

    def _place(self, sender: str, message: Message) -> None:
        if isinstance(message, PlaceRequest):
            route = Route(decode=self._instance.address)
            self._scheduler.send(sender, PlaceReply(message.request_id, message.attempt, route))

    def _submit(self, _: str, message: Message) -> None:
        if isinstance(message, Submit):
            self._running.append(message.request)
            self._changed.set()


class Client(asyncio.Protocol):
    """One stream. `heard` is called with the number of events that have come."""

    def __init__(self, request: bytes, heard: Callable[[int], None]) -> None:
        self._request, self._heard, self._last = request, heard, b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._heard((self._last + data).count(b"\n\n"))
        self._last = b"\n" if data.endswith(b"\n") and not data.endswith(b"\n\n") else b""


class Clients:
    def __init__(self) -> None:
        self._num_events, self._wanted = 0, 0
        self._there: asyncio.Future[None] | None = None

    async def open(self, port: int, path: str, count: int, num_tokens: int) -> list[asyncio.Transport]:
        asked = {"model": "baton-embedded", "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
        body = json.dumps(asked | BODIES[path]).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: ingress\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        made = [
            await loop.create_connection(lambda: Client(head.encode() + body, self._heard), "127.0.0.1", port)
            for _ in range(count)
        ]
        return [transport for transport, _ in made]

    async def have(self, num_events: int) -> None:
        """Wait until so many events have come in all."""
        self._wanted = num_events
        if self._num_events < num_events:
            self._there = asyncio.get_running_loop().create_future()
            await self._there
        assert self._num_events == num_events, f"{self._num_events} events in place of {num_events}"

    def _heard(self, num_events: int) -> None:
        self._num_events += num_events
        if self._num_events >= self._wanted and self._there is not None and not self._there.done():
            self._there.set_result(None)


def processor_s(pid: int) -> float:
    """Return the time of all threads of a process on processors."""
    accounts = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(account.read_text().split()[0]) for account in accounts) / 1e9


async def stream(backend: Backend, pid: int, port: int, path: str, streams: int, steps: int) -> float:
    """Return the ingress's time for each token."""
    clients = Clients()
    connections = await clients.open(port, path, streams, steps)
    await backend.have(streams)
    opening = int("chat" in path)  # a chat's first event names the role
    began_at, warm = 0.0, min(WARM_STEPS, steps // 2)
    for index in range(steps):
        backend.step(index, index + 1 == steps)
        is_over = index + 1 == steps  # the last token is followed by [DONE]
        await clients.have(streams * (index + 1 + opening + is_over))
        if index + 1 == warm:
            began_at = processor_s(pid)
    taken_s = processor_s(pid) - began_at
    for connection in connections:
        connection.close()
    return taken_s / (streams * (steps - warm))


async def measure(streams: int, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """{path: {what: value}}"""
    card = read_model_card(load(CONFIG, {}))
    backend = Backend(load_tokenizer(card.folder).encode(TEXT, add_special_tokens=False))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=ingress, args=(backend.address, theirs))
    process.start()
    try:
        port: int = await asyncio.to_thread(ours.recv)
        assert process.pid is not None
        least: dict[str, float] = {}
        for _ in range(rounds + 1):
            for path in BODIES:
                taken_s = await stream(backend, process.pid, port, path, streams, steps)
                least[path] = min(taken_s, least.get(path, taken_s))
    finally:
        ours.send("over")
        await asyncio.to_thread(process.join)
        await backend.close()
    return {path: {"us": 1e6 * taken_s, "tokens_per_s": 1 / taken_s} for path, taken_s in least.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10)
    args = options.parse_args()
    streams, steps, rounds = (4, 6, 0) if args.smoke else (STREAMS, STEPS, args.rounds)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(measure(streams, steps, rounds))
    for path, found in results.items():
        print(f"{path:22s} {found['us']:6.1f} us a token   {found['tokens_per_s']:8.0f} tokens/s")
    write(
        args.json,
        "benchmarks.serving.streaming",
        {"prediction": PREDICTION, "streams": streams, "results": results},
    )


if __name__ == "__main__":
    main()

"""Streams through a load balancer, before two ingresses that are killed in turn.

    python -m tests.chaos.lost_behind_balancers [--streams 64] [--seconds 60] [--every 5] [--json FILE]

A quarter of the clients comes back with `Last-Event-ID`, a quarter with the Responses SDK's `starting_after`, a quarter repeats a
request that is not streamed with its `Idempotency-Key`: each compares its tokens with those of an undisturbed run. A quarter is
OpenAI's SDK alone, without its retries, whose streams may break off visibly after their first event."""

import asyncio
import json
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.report import parser, write
from tests.chaos.lost_ingresses import (
    BREAKS,
    CHATS,
    NUM_BODIES,
    PAUSE_S,
    RETRIABLE,
    ROLES,
    Clients,
    body_of,
    kill_in_turn,
    overrides,
)
from tests.chaos.world import World
from tests.deploy.balancers import BALANCERS, balancer
from tests.forked import FORKED, PRELOADED
from tests.patience import PATIENCE_S
from tests.ports import free_port

WHOLE = ("last-event-id: whole", "starting_after: whole", "idempotency-key: whole", "plain: whole")
_LONGEST_S = 4 * PATIENCE_S
_ENDS = ("response.completed", "response.incomplete")


def harmless(outcome: str) -> bool:
    """Return whether a client that does nothing about it may see this."""
    return outcome in ("plain: whole", "plain: refused, retriable", "plain: broken off visibly")


@dataclass
class Response:
    """What has come of a response."""

    id: str = ""
    text: str = ""
    last: int = -1
    """The number of the last event that came."""
    is_whole: bool = False

    def take(self, event: Any) -> None:
        assert event.sequence_number == self.last + 1, f"{event.sequence_number} after {self.last}"
        assert event.type not in ("error", "response.failed"), event
        self.last = event.sequence_number
        if event.type == "response.created":
            self.id = event.response.id
        elif event.type == "response.output_text.delta":
            self.text += event.delta
        self.is_whole = self.is_whole or event.type in _ENDS


@dataclass
class Behind:
    """The clients, and what became of them."""

    chats: Clients
    texts: dict[int, str] = field(default_factory=dict[int, str])
    """What undisturbed responses said."""
    counts: Counter[str] = field(default_factory=Counter[str])

    @property
    def ways(self) -> list[Callable[[int, random.Random], Awaitable[None]]]:
        return [self.resumed, self.respond, self.repeat, self.plain]

    async def learn(self) -> None:
        await self.chats.learn()
        texts = await asyncio.gather(*map(self._response, range(NUM_BODIES)))
        self.texts = dict(enumerate(texts))

    async def ask_until(self, over_at: float, seed: int) -> None:
        rng = random.Random(seed)
        ask = self.ways[seed % len(self.ways)]
        while time.monotonic() < over_at:
            async with asyncio.timeout(_LONGEST_S):
                await ask(rng.randrange(NUM_BODIES), rng)

    async def resumed(self, number: int, rng: random.Random) -> None:
        said = await self.chats.answer(number, rng)
        assert said == self.chats.expected[number], f"{said} in place of {self.chats.expected[number]}"
        self.counts["last-event-id: whole"] += 1

    async def respond(self, number: int, rng: random.Random) -> None:
        said = await self._response(number)
        assert said == self.texts[number], f"{said!r} in place of {self.texts[number]!r}"
        self.counts["starting_after: whole"] += 1

    async def repeat(self, number: int, rng: random.Random) -> None:
        """Send a request that is not streamed until it has its answer."""
        body = {**body_of(number, self.chats.num_tokens), "stream": False}
        headers = {"idempotency-key": uuid.uuid4().hex}
        async with httpx.AsyncClient(base_url=self.chats.url, timeout=PATIENCE_S) as client:
            while True:
                try:
                    answer = await client.post(CHATS, json=body, headers=headers)
                    if answer.status_code == 200:
                        break
                    assert answer.status_code in RETRIABLE, answer.text
                except BREAKS:
                    pass
                self.counts["idempotency-key: repeated"] += 1
                await asyncio.sleep(PAUSE_S)
        assert answer.json()["choices"][0]["token_ids"] == self.chats.expected[number]
        self.counts["idempotency-key: whole"] += 1

    async def plain(self, number: int, rng: random.Random) -> None:
        """Ask once, as who does nothing about it."""
        outcome = await self._asked_once(number)
        self.counts[f"plain: {outcome}"] += 1
        if outcome != "whole":
            await asyncio.sleep(PAUSE_S)

    async def _asked_once(self, number: int) -> str:
        body, said, begun = body_of(number, self.chats.num_tokens), list[int](), False
        more = {name: body.pop(name) for name in ("ignore_eos", "return_token_ids")}
        try:
            async with (
                self._sdk() as sdk,
                await sdk.chat.completions.create(**body, extra_body=more) as chunks,
            ):
                async for chunk in chunks:
                    begun = True
                    said += getattr(chunk.choices[0], "token_ids", None) or ()
        except openai.APIStatusError as error:
            assert not begun
            return "refused, retriable" if error.status_code in RETRIABLE else f"refused {error.status_code}"
        except (openai.APIConnectionError, *BREAKS):
            return "broken off visibly" if begun else "refused, retriable"
        except openai.APIError as error:
            return f"an error in the stream: {error}"
        return "whole" if said == self.chats.expected[number] else "wrong or cut silently"

    async def _response(self, number: int) -> str:
        """Return a response's text, whatever happens to the ingresses that give it. Its events come once, in order."""
        asked: dict[str, Any] = {"input": f"Tell me story {number}.", "temperature": 0.0}
        asked |= {"max_output_tokens": self.chats.num_tokens + number, "extra_body": {"ignore_eos": True}}
        asked["extra_headers"] = {"idempotency-key": uuid.uuid4().hex}
        got = Response()
        async with self._sdk() as sdk:
            while not got.is_whole:
                try:
                    if got.id:
                        self.counts["starting_after: resumed"] += 1
                        coming = sdk.responses.retrieve(got.id, stream=True, starting_after=got.last)
                    else:
                        coming = sdk.responses.create(model="m", stream=True, **asked)
                    async with await coming as events:
                        async for event in events:
                            got.take(event)
                except openai.APIStatusError as error:
                    if error.status_code not in RETRIABLE:
                        raise
                except (openai.APIConnectionError, *BREAKS):
                    pass
                if not got.is_whole:
                    await asyncio.sleep(PAUSE_S)
        return got.text

    def _sdk(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.chats.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )


async def run(
    folder: Path, kind: str, *, streams: int, seconds: float, every_s: float, num_tokens: int
) -> dict[str, int]:
    """Return what became of the streams behind a `kind` of balancer."""
    ports = [free_port(), free_port()]
    own = {f"ingress{number}": {"serve.port": port} for number, port in enumerate(ports)}
    values = overrides() | {"serve.store": f"sqlite:///{folder}/store.db"}
    async with World(folder / "world", values, apart=False, roles=ROLES, own=own) as world:
        with balancer(kind, ports, folder) as url:
            behind = Behind(Clients(world, num_tokens, url))
            await behind.learn()
            behind.counts.clear()
            behind.chats.counts.clear()
            over_at = time.monotonic() + seconds
            async with asyncio.TaskGroup() as group:
                killing = kill_in_turn(world, over_at, every_s, with_decode=False)
                killed = group.create_task(killing)
                for seed in range(streams):
                    group.create_task(behind.ask_until(over_at, seed))
            await world.settled()
            told = {f"last-event-id: {what}": count for what, count in behind.chats.counts.items()}
            return {"killed": killed.result(), **dict(sorted((told | behind.counts).items()))}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--every", type=float, default=5.0)
    options.add_argument("--tokens", type=int, default=20)
    args = options.parse_args()
    FORKED.set_forkserver_preload([*PRELOADED, "tests.chaos.ingress_node"])
    streams, seconds, every_s = (4, 4.0, 2.0) if args.smoke else (args.streams, args.seconds, args.every)
    behind: dict[str, dict[str, int]] = {}
    for kind in [*BALANCERS][:1] if args.smoke else BALANCERS:
        with tempfile.TemporaryDirectory(prefix="baton-doors-") as name:
            found = run(
                Path(name), kind, streams=streams, seconds=seconds, every_s=every_s, num_tokens=args.tokens
            )
            behind[kind] = asyncio.run(found)
    content = {"streams": streams, "seconds": seconds, "every_s": every_s, "behind": behind}
    write(args.json, "tests.chaos.lost_behind_balancers --json FILE", content)
    sys.stdout.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()

"""Streams whose ingresses are killed, one after the other, and whose clients go on at the other one.

    python -m tests.chaos.lost_ingresses [--streams 64] [--seconds 60] [--every 5]

Each client compares the tokens of each answer with those of an undisturbed run. With `--decode` a decode instance is killed with
every second ingress: its answers are generated again from their seeds."""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from models.files.hub import resolve
from tests.chaos.world import World
from tests.forked import FORKED, PRELOADED
from tests.patience import PATIENCE_S

ROLES = ("decode", "decode", "ingress", "ingress")
NUM_BODIES = 12
BREAKS = (httpx.TransportError, httpx.StreamError)
CHATS = "/v1/chat/completions"
RETRIABLE = (429, 502, 503, 504)
PAUSE_S = 0.05


def overrides() -> dict[str, Any]:
    return {
        "model.path": str(resolve("embedded")),
        "model.name": "m",
        "prefill_instances": 0,
        "engine.block_size": 16,
        "engine.num_blocks": 800,
        "engine.max_batch_tokens": 256,
        "engine.num_threads": 1,
        "engine.deterministic": True,
        "mail.peer_timeout_s": PATIENCE_S / 2,
        "serve.response_store_bytes": 1 << 20,
    }


def body_of(number: int, num_tokens: int) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": f"Tell me story {number}."}],
        "max_tokens": num_tokens + number,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


@dataclass
class Clients:
    world: World
    num_tokens: int
    url: str = ""
    """Where all are asked; empty: at any of the ingresses."""
    expected: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    counts: Counter[str] = field(default_factory=Counter[str])

    def ports(self) -> list[int]:
        nodes = self.world.nodes.values()
        return [node.http for node in nodes if node.role == "ingress" and node.process.is_alive and node.http]

    async def learn(self) -> None:
        answers = [self.answer(number, random.Random(number)) for number in range(NUM_BODIES)]
        self.expected = dict(enumerate(await asyncio.gather(*answers)))

    async def ask_until(self, over_at: float, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < over_at:
            number = rng.randrange(NUM_BODIES)
            said = await self.answer(number, rng)
            assert said == self.expected[number], f"{number}: {said} in place of {self.expected[number]}"
            self.counts["answers"] += 1
            self.counts["tokens"] += len(said)

    async def answer(self, number: int, rng: random.Random) -> list[int]:
        """Return an answer's tokens, whatever happens to the ingresses that give it."""
        tokens: list[int] = []
        headers = {"idempotency-key": uuid.uuid4().hex}
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client, asyncio.timeout(4 * PATIENCE_S):
            while True:
                url = self.url or f"http://127.0.0.1:{rng.choice(self.ports())}"
                try:
                    if await self._read(client, url, body_of(number, self.num_tokens), headers, tokens):
                        return tokens
                except BREAKS:
                    pass
                self.counts["resumed" if "last-event-id" in headers else "asked again"] += 1
                await asyncio.sleep(PAUSE_S)

    async def _read(
        self,
        client: httpx.AsyncClient,
        url: str,
        body: dict[str, Any],
        headers: dict[str, str],
        tokens: list[int],
    ) -> bool:
        """Add what comes to `tokens`, and the last event's id to `headers`. Returns whether the answer has ended."""
        async with client.stream("POST", f"{url}{CHATS}", json=body, headers=headers) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode()
                assert response.status_code in RETRIABLE, said
                return False
            event_id = ""
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line == "data: [DONE]":
                    return True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    assert "choices" in chunk, f"an error in the stream: {chunk}"
                    tokens += chunk["choices"][0].get("token_ids", ())
                    headers["last-event-id"] = event_id
        return False


async def kill_in_turn(world: World, over_at: float, every_s: float, *, with_decode: bool) -> int:
    """Kill an ingress every so many seconds, and start another one in its place. Returns how many were killed."""
    number = 0
    while time.monotonic() + every_s < over_at:
        await asyncio.sleep(every_s)
        names = [f"ingress{number % 2}", *(["decode0"] if with_decode and number % 2 else [])]
        await asyncio.gather(*map(world.kill, names))
        for name in names:
            await world.start(name)
        number += 1
    return number


async def run(
    folder: Path, *, streams: int, seconds: float, every_s: float, num_tokens: int, with_decode: bool = False
) -> dict[str, Any]:
    async with World(folder, overrides(), apart=False, roles=ROLES) as world:
        clients = Clients(world, num_tokens)
        await clients.learn()
        over_at = time.monotonic() + seconds
        asking = [clients.ask_until(over_at, seed) for seed in range(streams)]
        killing = kill_in_turn(world, over_at, every_s, with_decode=with_decode)
        async with asyncio.TaskGroup() as group:
            killed = group.create_task(killing)
            for one in asking:
                group.create_task(one)
        await world.settled()
        return {"killed": killed.result(), **clients.counts}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--every", type=float, default=5.0)
    options.add_argument("--tokens", type=int, default=100)
    options.add_argument("--decode", action="store_true")
    args = options.parse_args()
    FORKED.set_forkserver_preload([*PRELOADED, "tests.chaos.ingress_node"])
    with tempfile.TemporaryDirectory(prefix="baton-ingresses-") as name:
        found = asyncio.run(
            run(
                Path(name) / "world",
                streams=args.streams,
                seconds=args.seconds,
                every_s=args.every,
                num_tokens=args.tokens,
                with_decode=args.decode,
            )
        )
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

"""Limits and the ledger of four ingresses, while one of them and the scheduler that leads are killed under load.

    python -m tests.chaos.lost_limits [--seconds 150] [--postgres] [--json FILE]

Clients of two tenants ask for about twice what is allowed: one tenant has a limit of requests, the other one of tokens. Each goes
on with an answer that has broken off until it has the whole of it. Written down are what was granted, in the minute with the most
and in the one with the least, and what the ledger has next to what the clients have counted. The database is gone, too, from the
kill until others come in their place: PostgreSQL has crashed and restarts, or SQLite's file is locked. A third tenant stores
responses and has a batch meanwhile."""

import asyncio
import json
import random
import sys
import tempfile
import time
import uuid
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import parser, write
from cluster.scheduler.limit_keeper import SETTLE_S
from cluster.store.sql_store import SqlStore
from cluster.store.usage_port import DAY_S, UsageCounts, UsageQuery
from tests.chaos.databases import Database, new_database
from tests.chaos.lost_ingresses import BREAKS, CHATS, PAUSE_S, RETRIABLE, overrides
from tests.chaos.stored_records import StoredRecords
from tests.chaos.world import World
from tests.forked import FORKED, PRELOADED
from tests.patience import PATIENCE_S

ROLES = ("decode", "ingress", "ingress", "ingress", "ingress")
MINUTE_S = 60.0
NUM_CLIENTS = 4
"""The number of clients of each tenant."""
_NUM_OUTPUT = (4, 20)
_REFUSED_S = 0.25
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "temperature": 1.0,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_BROUGHT_IN_S = 30.0
"""By then another ingress has brought in what the one that was killed has written down."""


@dataclass
class Tenant:
    """What its clients have got, and when."""

    name: str
    limit: int
    of_tokens: bool
    world: World = field(repr=False)
    granted: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(when, how much of what is limited)"""
    counts: UsageCounts = field(default_factory=UsageCounts)
    """What whole answers have used."""
    num_prompt: int = 0
    """Tokens of its prompts, all of which are the same. The first answer says it."""
    num_refused: int = 0
    num_broken: int = 0

    async def ask_until(self, over_at: float, pause_s: float, seed: int) -> None:
        rng = random.Random(seed)
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            while time.monotonic() < over_at:
                await self._answer(client, rng, over_at)
                await asyncio.sleep(pause_s * (0.5 + rng.random()))

    async def _answer(self, client: httpx.AsyncClient, rng: random.Random, over_at: float) -> None:
        """Have one whole answer, unless it has not begun when all is over."""
        body = {**BODY, "max_tokens": rng.randint(*_NUM_OUTPUT), "seed": rng.randrange(1 << 30)}
        headers = {"idempotency-key": uuid.uuid4().hex, "authorization": f"Bearer {self.name}"}
        while "last-event-id" in headers or time.monotonic() < over_at:
            try:
                if await self._read(client, body, headers):
                    return
            except BREAKS:
                self.num_broken += 1
            await asyncio.sleep(PAUSE_S if "last-event-id" in headers else _REFUSED_S)

    async def _read(self, client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> bool:
        """Count what comes. Returns whether the answer has ended."""
        ports = [n.http for n in self.world.nodes.values() if n.role == "ingress" and n.process.is_alive]
        url = f"http://127.0.0.1:{random.choice(ports)}{CHATS}"
        async with client.stream("POST", url, json=body, headers=headers) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode()
                assert response.status_code in RETRIABLE, said
                self.num_refused += 1
                return False
            self._grant(0 if self.of_tokens else 1)
            event_id = ""
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line == "data: [DONE]":
                    return True
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]), first="last-event-id" not in headers)
                    headers["last-event-id"] = event_id or headers.get("last-event-id", "")
        return False

    def _take(self, chunk: dict[str, Any], *, first: bool) -> None:
        assert "choices" in chunk, f"an error in the stream: {chunk}"
        num_tokens = sum(len(choice.get("token_ids") or ()) for choice in chunk["choices"])
        if self.of_tokens:
            self._grant(num_tokens + (self.num_prompt if first else 0))
        if usage := chunk.get("usage"):
            self.counts += UsageCounts(1, usage["prompt_tokens"], 0, usage["completion_tokens"])
            self.num_prompt = usage["prompt_tokens"]

    def _grant(self, amount: int) -> None:
        if amount:
            self.granted.append((time.monotonic(), amount))


def minutes(granted: Sequence[tuple[float, int]], begin: float, end: float) -> list[int]:
    """Return how much was granted in each minute that begins with a grant, from `begin` on, and ends before `end`."""
    times, sums = [at for at, _ in granted], [0, *accumulate(amount for _, amount in granted)]
    starts = [at for at in times if begin <= at and at + MINUTE_S <= end]
    return [sums[bisect_left(times, at + MINUTE_S)] - sums[bisect_left(times, at)] for at in starts]


async def ledger_of(store: SqlStore, tenants: Sequence[Tenant]) -> dict[str, UsageCounts]:
    """Return what the ledger has, by tenant, once it has what clients have counted, or after some time."""
    until = time.monotonic() + _BROUGHT_IN_S
    while True:
        found = await store.usage(UsageQuery(0, 4_000_000_000, DAY_S, ("tenant",)))
        by: dict[str, UsageCounts] = {}
        for one in found:
            name = str(one.by["tenant"])
            by[name] = by.get(name, UsageCounts()) + one.counts
        if time.monotonic() >= until or all(_plain(by.get(t.name)) == _plain(t.counts) for t in tenants):
            return by
        await asyncio.sleep(0.5)


def _plain(counts: UsageCounts | None) -> list[int]:
    return [0] * 3 if counts is None else [counts.num_requests, counts.prompt_tokens, counts.output_tokens]


async def kill_both(world: World, database: Database, at_s: float, for_s: float) -> list[str]:
    """Kill an ingress and the scheduler that leads, and start others in their place later. Returns which. Until then the database
    is gone, too."""
    await asyncio.sleep(at_s)
    schedulers = [node for node in world.nodes.values() if node.role == "scheduler"]
    names = [min(schedulers, key=lambda node: node.address).name, "ingress1"]
    async with database.gone():
        await asyncio.gather(*map(world.kill, names))
        await asyncio.sleep(for_s)
    for name in names:
        await world.start(name)
    return names


async def run(
    folder: Path,
    database: Database,
    *,
    requests: int,
    tokens: int,
    seconds: float,
    kill_at_s: float,
    pauses_s: tuple[float, float],
) -> dict[str, Any]:
    """`requests` and `tokens` per minute are allowed. The clients of each tenant pause so long between two answers."""
    tenants_of = {"requests": (requests, False), "tokens": (tokens, True)}
    values = overrides() | {
        "serve.schedulers": 2,
        "serve.store": database.url,
        "serve.usage_dir": str(folder / "uses"),
        "engine.max_num_seqs": 64,
    }
    for name, (limit, of_tokens) in tenants_of.items():
        what = "max_tokens_per_min" if of_tokens else "max_requests_per_min"
        values |= {f"tenants.{name}.keys": [name], f"tenants.{name}.{what}": limit}
    values["tenants.records.keys"] = ["records"]
    async with World(folder / "world", values, apart=False, roles=ROLES) as world:
        await asyncio.sleep(SETTLE_S)
        tenants = [Tenant(name, *limit, world) for name, limit in tenants_of.items()]
        records = StoredRecords(world, "records")
        await records.begin_batch()
        began_at = time.monotonic()
        over_at = began_at + seconds
        async with asyncio.TaskGroup() as group:
            killed = group.create_task(kill_both(world, database, kill_at_s, seconds / 10))
            group.create_task(records.store_until(over_at, pauses_s[0]))
            for tenant, pause_s in zip(tenants, pauses_s, strict=True):
                for seed in range(NUM_CLIENTS):
                    group.create_task(tenant.ask_until(over_at, pause_s, seed))
        stored = await records.told()
        await world.settled()
        store = SqlStore(lambda: database.url, PATIENCE_S)
        ledger = await ledger_of(store, tenants)
        await asyncio.to_thread(store.close)
    found = {tenant.name: _told(tenant, ledger, began_at, over_at) for tenant in tenants}
    return {"killed": killed.result(), "tenants": found, "store": stored}


def _told(tenant: Tenant, ledger: dict[str, UsageCounts], began_at: float, over_at: float) -> dict[str, Any]:
    granted = minutes(tenant.granted, began_at, over_at)
    return {
        "limit_per_min": tenant.limit,
        "most_in_a_minute": max(granted, default=0),
        "least_in_a_minute": min(granted, default=0),
        "granted": sum(amount for _, amount in tenant.granted),
        "refused": tenant.num_refused,
        "broken_off": tenant.num_broken,
        "clients_counted": _plain(tenant.counts),
        "ledger": _plain(ledger.get(tenant.name)),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=150.0)
    options.add_argument("--postgres", action="store_true")
    args = options.parse_args()
    FORKED.set_forkserver_preload([*PRELOADED, "tests.chaos.ingress_node"])
    seconds = 8.0 if args.smoke else args.seconds
    with (
        tempfile.TemporaryDirectory(prefix="baton-limits-") as name,
        new_database(Path(name), postgres=args.postgres) as database,
    ):
        found = asyncio.run(
            run(
                Path(name),
                database,
                requests=60,
                tokens=1000,
                seconds=seconds,
                kill_at_s=seconds * 0.4,
                pauses_s=(0.4, 0.4),
            )
        )
    content = {
        "seconds": seconds,
        "ingresses": ROLES.count("ingress"),
        "database": database.url.partition(":")[0],
        **found,
    }
    write(args.json, "tests.chaos.lost_limits --json FILE", content)
    sys.stdout.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()

"""A whole cluster under every kind of request, with a fault every few seconds.

    python -m benchmarks.soak.soak --minutes 60 --json benchmarks/results/soak.json     (make soak)

What carries it: the chaos tests' world of forked processes, each a production scheduler, instance or HTTP ingress over TCP.
Ray Serve would take 6 to 15 s and seconds of a processor to replace a process, so a fault every few seconds would leave little
but starts; its own replacing is tested in `tests/e2e/`. The model is the embedded one, and one instance has two ranks. Clients
come by HTTP alone. They compare each answer, greedy or seeded, with that of the undisturbed cluster.

Expected: no failed request, no wrong answer, memory and descriptors of the processes that live through within 2 % after the
warm-up, and nothing left. What this machine does not allow is left out, and the report says why. A picture lies beside it."""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM

from benchmarks.report import parser, write
from benchmarks.soak.soak_clients import Client, NoAnswer, Tally
from benchmarks.soak.soak_faults import SURVIVORS, Faults, SmallDisk
from benchmarks.soak.soak_picture import draw
from benchmarks.soak.soak_requests import ADAPTER, MODEL, Asked, requests
from benchmarks.soak.soak_watch import Growth, Traces, Watch, growth
from models.files.hub import resolve
from tests.chaos.databases import new_database
from tests.chaos.world import World
from tests.forked import FORKED, PRELOADED
from tests.models.peft_adapters import make_adapter

ROLES = ("prefill", "decode", "decode", "ingress", "ingress")
_MIB = 1 << 20
_DISK_BYTES = 80 * _MIB
_LOOK_S = 1.0
_LEAVES = 0.06
"""The share of streams that their client leaves."""
_PAUSE_S = 0.4
"""The longest that a client pauses, so that the machine is not saturated."""
_MOST_GROWTH = 0.02
_WARM_SHARE = 0.35
_LEFT_OUT = {
    "embeddings": "the embedded model generates, and a model that embeds does not",
    "pictures": "the embedded model reads text alone",
}
_TEMPLATE = """\
{%- if tools -%}<|system|>\n{%- for tool in tools -%}{{ tool | tojson }}\n{%- endfor -%}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}<|assistant|>\n{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>
{%- endfor -%}<|endoftext|>
{%- else -%}<|{{ 'user' if message.role == 'user' else 'system' }}|>\n{{ message.content }}\n
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>\n{%- endif -%}
"""
"""The embedded model's own shows no tools."""


def make_model(folder: Path) -> None:
    """Write the embedded model with a chat template that has tools, and an adapter for it."""
    shutil.copytree(resolve("embedded"), folder, ignore=shutil.ignore_patterns("*.py", "draft"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("\\n", "\n"))
    make_adapter(folder / "lora", AutoModelForCausalLM.from_pretrained(folder).float().eval(), 1)


def overrides(folder: Path, disk: Path, store: str, transport: str) -> dict[str, Any]:
    model = folder / "model"
    return {
        "model.path": str(model),
        "model.name": MODEL,
        "model.adapters": {ADAPTER: str(model / "lora")},
        "engine.block_size": 16,
        "engine.num_blocks": 160,
        "engine.max_batch_tokens": 128,
        "engine.num_threads": 1,
        "engine.deterministic": True,
        "engine.host_cache_bytes": 2 * _MIB,
        "engine.disk_cache_bytes": 8 * _MIB,
        "engine.disk_cache_path": str(disk / "kv"),
        "mail.heartbeat_s": 0.2,
        "mail.peer_timeout_s": 2.0,
        "schedule.local_threshold_tokens": 16,
        "serve.schedulers": 2,
        "serve.store": store,
        "serve.batch_dir_bytes": 8 * _MIB,
        "serve.response_store_bytes": 64 << 10,
        "transfer.transport": transport,
        "transfer.checksum": True,
    }


@dataclass
class Soak:
    world: World
    faults: Faults
    tally: Tally
    num_clients: int
    every_s: float
    rng: random.Random
    watch: Watch = field(default_factory=Watch)
    ports: set[int] = field(default_factory=set[int])
    """All that ingresses listened on."""

    def listening(self) -> list[int]:
        found = [
            n.http for n in self.world.nodes.values() if n.role == "ingress" and n.process.is_alive and n.http
        ]
        self.ports |= {*found}
        return found

    def client(self) -> Client:
        return Client(self.listening, self.tally)

    async def learn(self) -> None:
        """Note what each request is answered without any fault, by each ingress."""
        async with self.client() as client:
            await client.ready()
            for asked in requests():
                first, second = [await client.answer(asked) for _ in range(2)]
                if first != second:
                    raise AssertionError(
                        f"{asked.name} is answered otherwise each time: {first} and {second}"
                    )
                self.tally.expected[asked.name] = first

    async def run(self, duration_s: float, progress: Progress) -> None:
        bar = progress.add_task("soak", total=duration_s)
        began = time.monotonic()
        until = began + duration_s
        watching = asyncio.create_task(self._watch())
        clients = [asyncio.create_task(self._ask(until)) for _ in range(self.num_clients)]
        clients.append(asyncio.create_task(self._batches(until)))
        while (now := time.monotonic()) < until:
            progress.update(bar, completed=now - began, description=self._described())
            await asyncio.sleep(min(self.every_s, until - now))
            if time.monotonic() < until:
                await self.faults.one()
        await asyncio.gather(*clients)
        await self.world.settled()
        watching.cancel()

    def _described(self) -> str:
        tally = self.tally
        return (
            f"{tally.right.total()} right, {len(tally.wrong)} wrong, {len(tally.failed)} failed, "
            f"{len(self.faults.happened)} faults"
        )

    async def _watch(self) -> None:
        while True:
            living = [(name, n.process.pid) for name, n in self.world.nodes.items() if n.process.is_alive]
            self.watch.look(living, time.monotonic())
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, until: float) -> None:
        """Be one client after the other."""
        while time.monotonic() < until:
            async with self.client() as client:
                for _ in range(self.rng.randrange(1, 12)):
                    if time.monotonic() > until:
                        break
                    await self._one(client, self.rng.choice(requests()))
                    await asyncio.sleep(self.rng.random() * _PAUSE_S)

    async def _one(self, client: Client, asked: Asked) -> None:
        began_at = time.monotonic()
        leaves = asked.streams and self.rng.random() < _LEAVES
        try:
            answer = await client.answer(asked, leaves_after=self.rng.randrange(1, 5) if leaves else 0)
        except NoAnswer as error:
            self.tally.failed.append(f"{asked.name}: {error}")
            return
        if leaves and answer is None:
            self.tally.left += 1
        else:
            self.tally.judge(asked, answer, began_at)

    async def _batches(self, until: float) -> None:
        plain = [asked for asked in requests() if not asked.streams and asked.path.startswith("/v1/c")]
        async with self.client() as client:
            while time.monotonic() < until:
                asked, began_at = self.rng.choice(plain), time.monotonic()
                try:
                    for answer in await client.batch(asked):
                        self.tally.judge(asked, answer, began_at)
                except NoAnswer as error:
                    self.tally.failed.append(f"batch of {asked.name}: {error}")
                await asyncio.sleep(_PAUSE_S)


@dataclass(frozen=True)
class Ended:
    """What a soak has shown."""

    soak: Soak
    began: float
    seconds: float
    left: dict[str, list[str]]
    held: str
    """What was held when all clients had gone, or what ended the soak early; empty where nothing was."""

    @property
    def warm_at(self) -> float:
        return self.began + _WARM_SHARE * self.seconds

    @property
    def growths(self) -> list[Growth]:
        samples = self.soak.watch.samples
        return [
            growth(name, samples[name, pid], self.warm_at)
            for name, pid in sorted(samples)
            if name in SURVIVORS
        ]

    @property
    def grown(self) -> list[str]:
        """Return the processes that have taken more than they may."""
        found = [(one.name, "memory", *one.rss_bytes) for one in self.growths]
        found += [(one.name, "descriptors", *one.descriptors) for one in self.growths]
        return [
            f"{name}: {what}" for name, what, before, after in found if after > before * (1 + _MOST_GROWTH)
        ]

    @property
    def is_right(self) -> bool:
        tally = self.soak.tally
        return not (tally.failed or tally.wrong or self.held or self.grown or any(self.left.values()))

    def draw(self, path: Path) -> None:
        soak = self.soak
        draw(
            path,
            soak.tally.answered,
            soak.faults.happened,
            soak.watch,
            began=self.began,
            warm_at=self.warm_at,
        )


def report(ended: Ended) -> dict[str, Any]:
    soak, tally = ended.soak, ended.soak.tally
    took = sorted(seconds for _, seconds in tally.answered) or [0.0]
    return {
        "seconds": round(ended.seconds),
        "clients": soak.num_clients,
        "faults": len(soak.faults.happened),
        "faults_by_kind": soak.faults.counts,
        "left_out": _LEFT_OUT | soak.faults.left_out,
        "answers": tally.right.total() + len(tally.wrong),
        "wrong_answers": len(tally.wrong),
        "failed_requests": len(tally.failed),
        "answers_by_request": dict(sorted(tally.right.items())),
        "batches": tally.num_batches,
        "streams_left_by_their_client": tally.left,
        "answers_that_could_not_be_stored": tally.num_unstored,
        "asked_again": dict(tally.again.most_common()),
        "seconds_of_an_answer": {
            "p50": round(statistics.median(took), 3),
            "p99": round(took[int(len(took) * 0.99)], 3),
            "max": round(took[-1], 3),
        },
        "lived_through": [one.as_json() for one in ended.growths],
        "grown": ended.grown,
        "held_at_the_end": ended.held,
        "left_at_the_end": ended.left,
        "failures": tally.failed[:20] + tally.wrong[:20],
    }


async def soak(args: argparse.Namespace, folder: Path) -> Ended:
    traces = Traces()
    with (
        SmallDisk(folder / "disk", _DISK_BYTES) as disk,
        new_database(disk.folder, postgres=args.postgres) as database,
    ):
        await asyncio.to_thread(make_model, folder / "model")
        rng = random.Random(args.seed)
        wanted = overrides(folder, disk.folder, database.url, args.transport)
        own = {"decode1": {"decode.pp": 2}}
        held = ""
        async with World(folder / "world", wanted, apart=False, roles=ROLES, own=own) as world:
            run = Soak(world, Faults(world, rng, disk, database), Tally(), args.clients, args.every, rng)
            await run.learn()
            began = time.monotonic()
            columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
            with Progress(*columns) as progress:
                try:
                    await run.run(args.minutes * 60, progress)
                except (
                    AssertionError,
                    TimeoutError,
                ) as error:  # a process does not start again, or something is held
                    held = (
                        str(error).replace(str(folder), "")
                        or f"{type(error).__name__}: a process does not start again"
                    )
            seconds = time.monotonic() - began
            run.listening()
        left = traces.left(run.watch.pids | world.pids, run.ports, folder)
    return Ended(run, began, seconds, left, held)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--clients", type=int, default=6)
    options.add_argument(
        "--every", type=float, default=3.0, help="seconds from the end of a fault to the next one"
    )
    options.add_argument(
        "--transport", default="tcp", choices=["auto", "shm", "tcp"], help="faults of KV need tcp"
    )
    options.add_argument(
        "--postgres", action="store_true", help="keep batches and answers there, not in SQLite"
    )
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--keep", type=Path, metavar="FILE", help="write the processes' log there")
    args = options.parse_args()
    if args.smoke:
        args.minutes, args.clients, args.every = 0.2, 2, 2.0
    FORKED.set_forkserver_preload([*PRELOADED, "tests.chaos.ingress_node"])
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as name:
        try:
            ended = asyncio.run(soak(args, Path(name)))
        finally:
            if args.keep and (log := Path(name) / "world" / "log").exists():
                shutil.copy(log, args.keep)
    content = report(ended) | {"database": "PostgreSQL" if args.postgres else "SQLite"}
    print(json.dumps(content, indent=1))
    command = (
        f"benchmarks.soak.soak --minutes {args.minutes:g} --seed {args.seed} --transport {args.transport}"
    )
    write(args.json, command + " --postgres" * args.postgres, content)
    if args.json:
        ended.draw(args.json.with_suffix(".svg"))
    # A busy machine refuses requests, and seconds show no growth: neither is a mistake that a smoke run looks for.
    failed = bool(ended.soak.tally.wrong) if args.smoke else not ended.is_right
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

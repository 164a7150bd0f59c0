"""A cluster of real processes that a test may stop, kill, restart and make misbehave."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.forked_node import ForkedNode
from tests.chaos.model import WITNESS, Model
from tests.deploy.network import NetworkEnd
from tests.far_host import FAR
from tests.patience import PATIENCE_S

OVERRIDES: dict[str, Any] = {
    "engine.block_size": 4,
    "engine.num_blocks": 120,
    "engine.max_batch_tokens": 16,
    "mail.heartbeat_s": 0.1,
    "mail.peer_timeout_s": 1.0,
    "mail.reconnect_s": 0.5,
    "transfer.drain_timeout_s": 1.0,
    "schedule.local_threshold_tokens": 0,
}
ON_DEVICE = "on_device"
"""A key beside the configuration's: KV pools lie in the memory of simulated devices."""
ENCRYPTED = "encrypted"
"""A key beside the configuration's: nodes listen at an address that others take for another host's."""
_BESIDE = (ON_DEVICE, ENCRYPTED)
ROLES = ("prefill", "prefill", "decode", "decode", "frontend", "frontend")
_READY_S = 90.0
_FIRST_SHARED = 1_000_000
"""Prompts have numbers from here on where several share them. No world has so many others."""


@dataclass(kw_only=True)
class Process:
    """One node. `name` stays when the process is replaced."""

    name: str
    role: str
    process: ForkedNode
    address: str = ""
    http: int = 0
    """The port of an ingress."""
    events: "asyncio.Queue[dict[str, Any]]" = field(default_factory=asyncio.Queue)
    reader: "asyncio.Task[None] | None" = None
    num_commands: int = 0
    ended: bool = False
    """Nothing more comes from it."""

    def do(self, **command: Any) -> None:
        self.process.write(json.dumps(command).encode() + b"\n")

    async def carry_out(self, **command: Any) -> None:
        """Give a command and wait until it has been obeyed. Other processes' messages may come before a command that was only
        written."""
        self.num_commands += 1
        self.do(number=self.num_commands, **command)
        while (await self.wait_for("obeyed"))["number"] != self.num_commands:
            pass

    async def goes_on(self) -> bool:
        """Let no further step hang. Returns False when one hangs already, and the process has ended by itself."""
        try:
            await self.carry_out(do="hang", how="")
            if not (await self.status())["hung"]:
                return True
        except AssertionError:
            pass  # it has ended
        async with asyncio.timeout(PATIENCE_S):
            await self.process.wait()
        return False

    def state(self) -> str:
        """The kernel's letter for it."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    async def has_stopped(self) -> None:
        """It says that it is trapped just before it stops; a SIGCONT that came earlier would be lost."""
        async with asyncio.timeout(PATIENCE_S):
            while self.state() != "T":
                await asyncio.sleep(0.001)

    async def status(self) -> dict[str, Any]:
        while not self.events.empty():
            self.events.get_nowait()
        self.do(do="status")
        return await self.wait_for("status")

    async def wait_for(self, event: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            while not (self.ended and self.events.empty()):
                seen = await self.events.get()
                if seen["event"] == event:
                    return seen
        raise AssertionError(f"{self.name} has ended and will not say {event!r}: the log says why")


@dataclass(kw_only=True)
class Stream:
    """What a client has got so far. `gaps_s` are the pauses before each token, the first counted from the start."""

    prompt: tuple[int, ...]
    max_tokens: int
    model: Model = WITNESS
    tokens: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    error: str | None = None
    finish: str | None = None
    lost: list[str] = field(default_factory=list)
    """Instances that it lost."""
    routes: list[tuple[str, str]] = field(default_factory=list)
    """Prefill and decode of each attempt, by address. No prefill: decode has computed the prompt itself."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    last_at: float = 0.0

    @property
    def expected(self) -> tuple[int, ...]:
        return self.model.undisturbed(self.prompt, self.tokens, self.max_tokens)


class World:
    """`async with World(folder, overrides) as world`. Afterwards no process, segment or port of it is left."""

    def __init__(
        self,
        folder: Path,
        wanted: dict[str, Any],
        apart: bool = True,
        places: Mapping[str, NetworkEnd] | None = None,
        model: Model = WITNESS,
        *,
        roles: Sequence[str] = ROLES,
        own: Mapping[str, dict[str, Any]] | None = None,
        num_spares: int = 0,
    ) -> None:
        """`apart`: every prompt is computed by a prefill instance as long as there is one, whatever it costs. `places`: where on a
        network each node is, by its name. `own`: what a node has in its configuration beside what all have. `num_spares`: of
        schedulers, beyond `serve.schedulers`."""
        self.folder, self.apart, self.model, self.num_spares = folder, apart, model, num_spares
        self.places, self.roles, self.own = places or {}, tuple(roles), own or {}
        folder.mkdir(parents=True, exist_ok=True)
        self.overrides = OVERRIDES | model.overrides | wanted
        self.nodes: dict[str, Process] = {}
        self.streams: dict[str, Stream] = {}
        self._count = self._num_shared = 0
        self.pids: set[int] = set()
        self._kept: dict[str, socket.socket] = {}
        """By node that was killed: what keeps others from taking its port, should it start again."""

    async def __aenter__(self) -> "World":
        names = [f"{role}{self.roles[:i].count(role)}" for i, role in enumerate(self.roles)]
        count = self.overrides.get("serve.schedulers", 1) + self.num_spares
        try:
            for name in ["scheduler"] if count == 1 else [f"scheduler{i}" for i in range(count)]:
                await self.start(name)
            async with asyncio.TaskGroup() as starting:
                for name in names:
                    starting.create_task(self.start(name))
            await self.settled()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for kept in self._kept.values():
            kept.close()
        for node in self.nodes.values():
            node.process.signal(signal.SIGCONT)
            node.process.end_input()
        for node in self.nodes.values():
            try:
                async with asyncio.timeout(5):
                    await node.process.wait()
            except TimeoutError:
                node.process.signal(signal.SIGKILL)
                await node.process.wait()
            if node.reader is not None:
                node.reader.cancel()

    async def start(self, name: str, port: int = 0) -> Process:
        role = name.rstrip("0123456789")
        place = self.places.get(name)
        spec = {
            "name": name,
            "host": place.address if place else FAR if self.overrides.get(ENCRYPTED) else "127.0.0.1",
            "netns": str(place.path) if place else "",
            "role": role,
            "folder": str(self.folder),
            "port": port,
            "overrides": {key: value for key, value in self.overrides.items() if key not in _BESIDE}
            | self.own.get(name, {}),
            "on_device": self.overrides.get(ON_DEVICE, False),
            "apart": self.apart,
            "num_spares": self.num_spares,
        }
        process = await asyncio.to_thread(ForkedNode, spec, self.folder / "log")
        output = await process.connect()
        node = self.nodes[name] = Process(name=name, role=role, process=process)
        self.pids.add(process.pid)
        node.reader = asyncio.create_task(self._read(node, output))
        ready = await node.wait_for("ready", _READY_S)
        node.address, node.http = ready["address"], ready["http"]
        if (kept := self._kept.pop(name, None)) is not None:
            kept.close()
        return node

    async def kill(self, name: str) -> int:
        """SIGKILL. Returns the port it listened on."""
        node = self.nodes[name]
        node.process.signal(signal.SIGKILL)
        await node.process.wait()
        port = int(node.address.rpartition(":")[2])
        if name not in self.places:
            self._kept[name] = _bound(port)
        return port

    def freeze(self, name: str) -> None:
        self.nodes[name].process.signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.nodes[name].process.signal(signal.SIGCONT)

    def generate(
        self, frontend: str, prompt: tuple[int, ...], max_tokens: int, *, grammar: str = "", seed: int = 0
    ) -> str:
        name = f"s{self._count}"
        self._count += 1
        self.streams[name] = Stream(
            prompt=prompt,
            max_tokens=max_tokens,
            model=self.model,
            last_at=asyncio.get_running_loop().time(),
        )
        self.nodes[frontend].do(
            do="generate",
            id=f"{name}@{frontend}",
            prompt=list(prompt),
            max_tokens=max_tokens,
            grammar=grammar,
            seed=seed,
        )
        return name

    def fresh_prompt(self, num_tokens: int) -> tuple[int, ...]:
        """One that no cache has seen."""
        self._count += 1
        return self.model.prompt(self._count, num_tokens)

    def shared_prompt(self, count: int, num_tokens: int) -> tuple[int, ...]:
        """One of `count`, each in turn."""
        self._num_shared += 1
        return self.model.prompt(_FIRST_SHARED + self._num_shared % count, num_tokens)

    async def restored_blocks(self) -> dict[str, int]:
        """By address, the blocks that each instance has read from lower tiers since it began."""
        return (await self.nodes["scheduler"].status())["restored"]

    async def route(self, frontend: str) -> tuple[str, str]:
        """Names of the prefill and the decode instance of the one request of this frontend; empty where there is none."""
        address = self.nodes[frontend].address
        routes = (await self.nodes["scheduler"].status())["routes"]
        mine = next((route for route in routes if route[0] == address), ["", "", ""])
        by_address = {node.address: name for name, node in self.nodes.items()}
        return by_address.get(mine[1], ""), by_address.get(mine[2], "")

    async def settled(self) -> None:
        """All instances are registered and nothing is held anywhere. Raises TimeoutError, saying what is."""
        wanted = {n.address for n in self.nodes.values() if n.role in ("prefill", "decode")}
        held: dict[str, Any] = {}
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    held = {}
                    for name, node in self.nodes.items():
                        held[name] = "no answer"
                        held[name] = await node.status()
                    schedulers = [held[n.name] for n in self.nodes.values() if n.role == "scheduler"]
                    known = all(set(one["instances"]) == wanted for one in schedulers)
                    met = all(len(one["peers"]) == len(schedulers) - 1 for one in schedulers)
                    if known and met and not any(status["held"] for status in held.values()):
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            rest = {k: v if isinstance(v, str) else v["held"] for k, v in held.items()}
            raise TimeoutError(f"after {PATIENCE_S:g} s: {rest}; log: {self.folder / 'log'}") from None

    def segments_left(self) -> list[str]:
        """Shared-memory files of this world's dead processes."""
        living = {n.process.pid for n in self.nodes.values() if n.process.is_alive}
        files = [name for name in os.listdir("/dev/shm") if name.startswith("baton-kv-")]
        return [name for name in files if int(name.split("-")[2]) in self.pids - living]

    async def _read(self, node: Process, output: asyncio.StreamReader) -> None:
        try:
            while line := await output.readline():
                event = json.loads(line)
                if event["event"] in ("token", "end"):
                    self._note(event)
                else:
                    node.events.put_nowait(event)
        except (ConnectionResetError, BrokenPipeError):
            pass  # it ended before it had read all that was sent
        finally:
            node.process.close()
            node.ended = True
            node.events.put_nowait({"event": "ended"})

    def _note(self, event: dict[str, Any]) -> None:
        stream = self.streams[event["id"].partition("@")[0]]
        now = asyncio.get_running_loop().time()
        if event["event"] == "end":
            stream.error = event["error"]
            stream.finish, stream.lost = event.get("finish"), event.get("lost", [])
            stream.routes = [(prefill, decode) for prefill, decode in event.get("routes", [])]
            stream.done.set()
            return
        assert event["index"] == len(stream.tokens), "a token came twice, or out of order"
        stream.tokens.append(event["token"])
        stream.gaps_s.append(now - stream.last_at)
        stream.last_at = now


def _bound(port: int) -> socket.socket:
    """Return a socket that has a port and does not listen: it refuses connections, the kernel gives the port to nobody who asks
    for any, and who asks for this one gets it."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", port))
    return kept

"""Two ingresses with their HTTP servers before one real decode instance, in one process."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import torch
import transformers

from cluster.ingress.delivery.frontend import Frontend
from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.http_app import create_app
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.access import Access, Rules
from cluster.instance.instance import Instance
from cluster.instance.instance_parts import InstanceParts, Role
from cluster.instance.real_parts import local_parts
from cluster.local import LocalCluster
from cluster.store.store_port import Store
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig, load
from core.ports import Mail
from kvtransfer.transport.loopback_transport import LoopbackFabric
from models.files.hub import resolve as find_model
from net.loopback_mail import LoopbackMail, LoopbackNetwork
from tests.cluster.ingress.api.fakes import NAME, ByteTokenizer
from tests.cluster.ingress.api.harness import OPEN, SETTINGS
from tests.patience import PATIENCE_S, until

KEEP_S = 30.0
LENGTH = 60
CHAT = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Tell me."}],
    "max_tokens": LENGTH,
    "temperature": 1.0,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}
CHATS = "/v1/chat/completions"
_VALUES: dict[str, Any] = {
    "engine.block_size": 4,
    "engine.num_blocks": 400,
    "prefill_instances": 0,
    "decode_instances": 1,
}


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=256, pad_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return folder


class Ingress:
    def __init__(
        self,
        network: LoopbackNetwork,
        scheduler: str,
        config: ClusterConfig,
        *,
        keep_s: float,
        rules: Rules,
        store: Store | None,
    ) -> None:
        async def resolve() -> list[str]:
            return [scheduler]

        self._mail: LoopbackMail = network.join("frontend")
        self.frontend = Frontend(
            self._mail,
            WallClock(),
            config.schedule,
            config.engine.block_size,
            resolve_schedulers=resolve,
            request_timeout_s=PATIENCE_S,
        )
        self._running = asyncio.create_task(self.frontend.run())
        settings = replace(SETTINGS, max_context_tokens=400, resume_s=keep_s)
        self.app = create_app(
            self.frontend, cast(Any, ByteTokenizer()), settings, Access(rules), make_observers(NAME), store
        )
        [background] = self.app.state.background
        self._background = asyncio.create_task(background.run())
        self._server = HttpServer(self.app, "127.0.0.1", [0], shared=False)
        self._server.start()
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._http = httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S)

    async def kill(self) -> None:
        """End it for its peers, as if its process had been killed."""
        self._background.cancel()
        await self._mail.close()

    async def stop(self) -> None:
        await self._http.aclose()
        self._background.cancel()
        await self.frontend.close()
        await self._server.stop()
        self._running.cancel()

    async def events(
        self, body: dict[str, Any], *, path: str = CHATS, count: int | None = None, **headers: str
    ) -> list[str]:
        """Return the first `count` events of a stream, or all, each as it came. The connection ends then."""
        return await self._read("POST", path, count, headers, body)

    async def get_events(self, path: str, count: int | None = None, **headers: str) -> list[str]:
        return await self._read("GET", path, count, headers, None)

    async def post(self, body: dict[str, Any], *, path: str = CHATS, **headers: str) -> httpx.Response:
        return await self._http.post(path, json=body, headers=_named(headers))

    async def delete(self, path: str) -> httpx.Response:
        return await self._http.delete(path)

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(path)

    async def _read(
        self, method: str, path: str, count: int | None, headers: dict[str, str], body: Any
    ) -> list[str]:
        found: list[str] = []
        async with self._http.stream(method, path, json=body, headers=_named(headers)) as response:
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code}: {(await response.aread()).decode()}")
            event = ""
            async for line in response.aiter_lines():
                event += line + "\n"
                if not line:
                    if not event.startswith(":"):
                        found.append(event)
                    event = ""
                    if len(found) == count:
                        break
        return found


class World:
    def __init__(self, cluster: LocalCluster, ingresses: list[Ingress]) -> None:
        self.cluster, self.ingresses = cluster, ingresses

    @property
    def instances(self) -> list[Instance]:
        return self.cluster.instances

    @property
    def num_computed(self) -> int:
        return sum(one.work_counts().computed_tokens for one in self.instances)

    @property
    def num_running(self) -> int:
        return sum(one.num_jobs for one in self.instances)

    async def is_idle(self) -> None:
        await until(lambda: not any(one.num_jobs or one.num_used_blocks for one in self.instances))


@contextlib.asynccontextmanager
async def two_ingresses(
    folder: Path, *, keep_s: float = KEEP_S, rules: Rules = OPEN, store: Store | None = None, **values: Any
) -> AsyncGenerator[World]:
    config = load(None, {}, {"model.path": str(folder), **_VALUES, **values})
    network, fabric = LoopbackNetwork(), LoopbackFabric()
    found = find_model(config.model.path)
    addresses: list[str] = []

    def join(name: str) -> LoopbackMail:
        mail = network.join(name)
        if name == "scheduler":
            addresses.append(mail.address)
        return mail

    def parts(role: Role, mail: Mail) -> InstanceParts:
        return local_parts(config, found, role, mail, fabric)

    async with LocalCluster.assembled(config, join, parts) as cluster:
        ingresses = [
            Ingress(network, addresses[0], config, keep_s=keep_s, rules=rules, store=store) for _ in range(2)
        ]
        world = World(cluster, ingresses)
        try:
            for ingress in ingresses:
                async with asyncio.timeout(PATIENCE_S):
                    while not (await ingress.frontend.ready())[0]:
                        await asyncio.sleep(0.005)
            yield world
        finally:
            for ingress in ingresses:
                await ingress.stop()


def last_id(events: list[str]) -> str:
    return events[-1].partition("\n")[0].removeprefix("id: ")


def data_of(events: list[str]) -> list[Any]:
    """The JSON of each event; the end is a text."""
    lines = [line for event in events for line in event.split("\n") if line.startswith("data: ")]
    return [line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]) for line in lines]


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}

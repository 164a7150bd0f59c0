"""The API over a fake generator, for in-process clients."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai

from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.http_app import create_app
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.access import Access, Rules, TenantRules
from cluster.store.store_port import Store
from core.types import Slo
from tests.cluster.ingress.api.fakes import END, NAME, ByteTokenizer, FakeGenerator

OK = {"model": NAME, "prompt": "x"}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SETTINGS = ApiSettings(
    model_name=NAME,
    max_context_tokens=200,
    vocab_size=257,
    eos_token_ids=(END,),
    default_sampling={"temperature": 0.5},
)
CLASSES = {"standard": Slo(), "chat": Slo(name="chat", ttft_s=1.0, tpot_s=0.05, priority=1)}
OPEN = Rules(CLASSES, {"": TenantRules()})


def message_of(error: Any) -> str:
    """The message of an error as any of the APIs writes it."""
    return error if isinstance(error, str) else error["message"]


class Api:
    def __init__(
        self,
        generator: FakeGenerator,
        settings: ApiSettings = SETTINGS,
        rules: Rules = OPEN,
        tokenizer: ByteTokenizer | None = None,
        now: Callable[[], float] = time.monotonic,
        *,
        store: Store | None = None,
    ) -> None:
        """`now`: the time by which tenants' limits are counted. `store`: what several ingresses share."""
        self.generator = generator
        self.tokenizer = tokenizer or ByteTokenizer()
        self.access = Access(rules, now)
        self.app = create_app(generator, self.tokenizer, settings, self.access, make_observers(NAME), store)
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://api")
        self.openai = openai.AsyncOpenAI(
            base_url="http://api/v1", api_key="k", http_client=self.http, max_retries=0
        )

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(
            path, content=content, headers={"content-type": "application/json", **headers}
        )

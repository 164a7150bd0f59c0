"""Agents' sessions over HTTP on instances that have room for two of them: what stays, what goes, and what is read back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from cluster.ingress.api_factory import build_app
from cluster.ingress.model_card import read_model_card
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.live_rules import LiveRules
from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.reports import SessionCounts
from tests.patience import PATIENCE_S

PROMPT = 320
"""The tokens of a prompt: 20 blocks of 48."""
WHOLE = PROMPT - 16
"""What is found at least of one that is cached."""


class Agents:
    def __init__(self, http: httpx.AsyncClient, cluster: LocalCluster) -> None:
        self.client = openai.AsyncOpenAI(
            base_url="http://api/v1", api_key="k", http_client=http, max_retries=0
        )
        self.http, self.cluster = http, cluster

    async def ask(self, first: int, **hints: Any) -> int:
        """How many tokens of the prompt that begins with `first` were cached."""
        answer = await self.client.completions.create(
            model="m",
            prompt=[first, *(50 + index % 40 for index in range(PROMPT - 1))],
            max_tokens=2,
            extra_body={"cache_hints": hints} if hints else {},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    async def hint(self, session: str, action: str) -> int:
        """How many instances know the session."""
        answer = await self.http.post("/v1/cache_hints", json={"session": session, "action": action})
        return len(answer.json()["instances"])

    async def told(self, fits: Callable[[SessionCounts], bool]) -> None:
        """Wait until an instance has reported such counts."""
        async with asyncio.timeout(PATIENCE_S):
            while not any(
                fits(one.work.sessions) for one in (await self.cluster.frontend.status()).instances
            ):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def served(pools: tuple[int, int], **keys: Any) -> AsyncIterator[Agents]:
    values = {"prefill_instances": pools[0], "decode_instances": pools[1], "model.name": "m"}
    values |= {"engine.num_blocks": 48, "engine.block_size": 16}
    # With targets prompts go to the prefill instance, wherever they would end soonest.
    values |= {"slo_classes": {"standard": {"ttft_s": 2.0, "tpot_s": 0.1}}}
    config = load(None, {}, values | keys)
    async with LocalCluster.running(config) as cluster:
        app = build_app(
            cluster.frontend, config, read_model_card(config), LiveRules(config).access, make_observers("m")
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
            yield Agents(http, cluster)


@pytest.mark.parametrize("pools", [(0, 1), (1, 1)], ids=["any role", "a pair"])
async def test_a_pinned_session_stays_until_it_is_released(pools: tuple[int, int]) -> None:
    async with served(pools) as agents:
        await agents.ask(1, session="s", pin=True)
        await agents.ask(2, session="t")
        for other in range(3, 6):
            await agents.ask(other)
        assert await agents.ask(1) >= WHOLE
        assert await agents.ask(2) == 0
        await agents.told(lambda counts: counts.pinned_blocks == 20)
        assert await agents.hint("s", "release") == sum(pools)
        assert await agents.hint("s", "release") == 0
        for other in range(6, 8):
            await agents.ask(other)
        assert await agents.ask(1) == 0


@pytest.mark.parametrize("pools", [(0, 1), (1, 1)], ids=["any role", "a pair"])
async def test_a_session_is_read_back_when_its_client_says_so(pools: tuple[int, int]) -> None:
    async with served(pools, **{"engine.host_cache_bytes": 1 << 28}) as agents:
        await agents.ask(1, session="s", prefetch=False)
        for other in range(2, 6):
            await agents.ask(other)
        assert await agents.hint("s", "prefetch") == sum(pools)
        await agents.told(lambda counts: counts.prefetched == 1)
        assert await agents.ask(1) >= WHOLE

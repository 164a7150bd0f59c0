"""What clients of a store have been told is in it, and whether it is: responses, and a batch that runs meanwhile."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import openai

from tests.chaos.lost_ingresses import PAUSE_S, RETRIABLE
from tests.chaos.world import World
from tests.patience import PATIENCE_S

NUM_LINES = 40
_WARNING = "x-baton-warning"
_BATCH_S = 2 * PATIENCE_S
T = TypeVar("T")


@dataclass
class StoredRecords:
    world: World
    key: str
    responses: set[str] = field(default_factory=set[str])
    """The responses whose end a client has, which said that they are stored."""
    num_not_stored: int = 0
    batch_id: str = ""

    async def begin_batch(self) -> None:
        lines = [
            {
                "custom_id": f"line{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": "m",
                    "messages": [{"role": "user", "content": f"{number}?"}],
                    "max_tokens": 8,
                },
            }
            for number in range(NUM_LINES)
        ]
        text = "\n".join(map(json.dumps, lines)).encode()
        file = await self._had(lambda sdk: sdk.files.create(file=("lines.jsonl", text), purpose="batch"))
        batch = await self._had(
            lambda sdk: sdk.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        )
        self.batch_id = batch.id

    async def store_until(self, over_at: float, pause_s: float) -> None:
        while time.monotonic() < over_at:
            answer = await self._had(
                lambda sdk: sdk.responses.with_raw_response.create(
                    model="m", input="Tell me a story.", max_output_tokens=4, extra_body={"ignore_eos": True}
                )
            )
            response = answer.parse()
            if not response.to_dict().get("store", True) or answer.headers.get(_WARNING):
                self.num_not_stored += 1
            else:
                self.responses.add(response.id)
            await asyncio.sleep(pause_s)

    async def told(self) -> dict[str, int]:
        """Return how much is there of what there should be."""
        found = await asyncio.gather(*map(self._is_there, self.responses))
        answers = await self._answered_lines()
        return {
            "responses_stored": len(found),
            "responses_lost": found.count(False),
            "responses_said_not_to_be_stored": self.num_not_stored,
            "batch_lines": NUM_LINES,
            "batch_lines_answered_once": sum(count == 1 for count in answers.values()),
        }

    async def _is_there(self, response_id: str) -> bool:
        try:
            return (await self._had(lambda sdk: sdk.responses.retrieve(response_id))).id == response_id
        except openai.NotFoundError:
            return False

    async def _answered_lines(self) -> Counter[str]:
        async with asyncio.timeout(_BATCH_S):
            while True:
                batch = await self._had(lambda sdk: sdk.batches.retrieve(self.batch_id))
                if batch.status in ("completed", "failed", "expired", "cancelled"):
                    break
                await asyncio.sleep(0.5)
        output = batch.output_file_id
        if output is None:
            return Counter()
        content = await self._had(lambda sdk: sdk.files.content(output))
        lines = [json.loads(line) for line in content.text.splitlines()]
        return Counter(line["custom_id"] for line in lines if line["response"]["status_code"] == 200)

    async def _had(self, ask: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
        """Return what any ingress answers, at last."""
        while True:
            ports = [n.http for n in self.world.nodes.values() if n.role == "ingress" and n.process.is_alive]
            url = f"http://127.0.0.1:{random.choice(ports)}/v1"
            async with openai.AsyncOpenAI(
                base_url=url, api_key=self.key, max_retries=0, timeout=PATIENCE_S
            ) as sdk:
                try:
                    return await ask(sdk)
                except openai.APIStatusError as error:
                    if error.status_code not in RETRIABLE:
                        raise
                except openai.APIConnectionError:
                    pass
            await asyncio.sleep(PAUSE_S)

"""Clients of a soak. As vendors' SDKs do, a client asks again after a refusal that says to, and after a broken connection."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.soak.soak_requests import Asked, Streamed, lasting

Ports = Callable[[], list[int]]
"""The ports of all ingresses that listen now."""
_AGAIN = frozenset({408, 429, 503, 507})
_PAUSE_S = 0.3
_PATIENCE_S = 90.0
_BATCH_S = 180.0
_BATCH_LINES = 4


class NoAnswer(Exception):
    """No answer came, however often it was asked for."""


class Broken(Exception):
    """A connection broke, or an answer says to ask again."""


@dataclass(slots=True)
class Tally:
    """What became of all requests."""

    expected: dict[str, Any] = field(default_factory=dict[str, Any])
    """The undisturbed answers, by request."""
    right: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])
    left: int = 0
    """Streams that their client left."""
    again: Counter[str] = field(default_factory=Counter[str])
    """Why clients asked again."""
    answered: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When each answer was complete, and how long it took with all tries."""
    num_batches: int = 0
    num_unstored: int = 0
    """Right answers that say that they were not stored, as they may while the database is away."""

    def judge(self, asked: Asked, answer: Any, began_at: float) -> None:
        now, expected = time.monotonic(), self.expected[asked.name]
        self.answered.append((now, now - began_at))
        if answer == expected:
            self.right[asked.name] += 1
        elif answer == _unstored(expected):
            self.right[asked.name] += 1
            self.num_unstored += 1
        else:
            self.wrong.append(
                f"{asked.name}: {json.dumps(answer)[:600]} instead of {json.dumps(expected)[:600]}"
            )


def _unstored(expected: Any) -> Any:
    """Return an answer as it is where it could not be stored."""
    is_stored = isinstance(expected, dict) and "store" in expected
    return expected | {"store": False} if is_stored else expected


class Client:
    """One client, which keeps connections alive. Use it in `async with`."""

    def __init__(self, ports: Ports, tally: Tally) -> None:
        self._ports, self._tally = ports, tally
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(_PATIENCE_S), trust_env=False)
        self._turn = 0

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def answer(self, asked: Asked, *, leaves_after: int = 0) -> Any:
        """Return what lasts of the answer. Raises NoAnswer. `leaves_after`: go after so many pieces of a stream."""
        return await self._until_answered(lambda base: self._ask(base, asked, leaves_after))

    async def _until_answered(self, attempt: Callable[[str], Any]) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await attempt(self._base())
            except (httpx.TransportError, Broken) as error:
                why = str(error) if isinstance(error, Broken) else type(error).__name__
                self._tally.again[why] += 1
                if time.monotonic() > deadline:
                    raise NoAnswer(f"no answer within {_PATIENCE_S:g} s; at last: {why}") from None
                await asyncio.sleep(_PAUSE_S)

    def _base(self) -> str:
        ports = self._ports()
        if not ports:
            raise Broken("no ingress listens")
        self._turn += 1
        return f"http://127.0.0.1:{ports[self._turn % len(ports)]}"

    async def _ask(self, base: str, asked: Asked, leaves_after: int) -> Any:
        if not asked.streams:
            return lasting(_content(await self._http.post(base + asked.path, json=asked.body)))
        streamed = Streamed()
        async with self._http.stream("POST", base + asked.path, json=asked.body) as response:
            if response.status_code != 200:
                await response.aread()
                _content(response)
            num_pieces = 0
            async for piece in response.aiter_bytes():
                streamed.feed(piece)
                num_pieces += 1
                if num_pieces == leaves_after:
                    return None
        if streamed.error:
            raise Broken(f"a stream's error: {streamed.error[:200]}")
        if not streamed.is_over:
            raise Broken("a stream that ended early")
        return streamed.answer

    async def batch(self, asked: Asked) -> list[Any]:
        """Return what lasts of the answers to a batch of the same request. Raises NoAnswer. Nothing of it is left stored."""
        lines = [
            {"custom_id": str(i), "method": "POST", "url": asked.path, "body": asked.body}
            for i in range(_BATCH_LINES)
        ]
        data = "\n".join(map(json.dumps, lines)).encode()
        form = {"files": {"file": ("lines.jsonl", data)}, "data": {"purpose": "batch"}}
        file = await self._call("POST", "/v1/files", **form)
        batch = await self._call(
            "POST",
            "/v1/batches",
            json={"input_file_id": file["id"], "endpoint": asked.path, "completion_window": "24h"},
        )
        deadline = time.monotonic() + _BATCH_S
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            if time.monotonic() > deadline:
                raise NoAnswer(
                    f"a batch is {batch['status']} after {_BATCH_S:g} s: {batch['request_counts']}"
                )
            await asyncio.sleep(_PAUSE_S)
            batch = await self._call("GET", f"/v1/batches/{batch['id']}")
        if batch["status"] != "completed" or not batch.get("output_file_id"):
            raise NoAnswer(f"a batch has {batch['status']}: {json.dumps(batch)[:400]}")
        rows = await self._lines(batch["output_file_id"])
        for each in (file["id"], batch["output_file_id"]):
            await self._call("DELETE", f"/v1/files/{each}")
        self._tally.num_batches += 1
        return [lasting(row["response"]["body"]) for row in rows]

    async def _lines(self, file_id: str) -> list[dict[str, Any]]:
        async def read(base: str) -> list[dict[str, Any]]:
            response = await self._http.get(f"{base}/v1/files/{file_id}/content")
            if response.status_code != 200:
                _content(response)
            return [json.loads(line) for line in response.text.splitlines()]

        return await self._until_answered(read)

    async def _call(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        async def call(base: str) -> dict[str, Any]:
            response = await self._http.request(method, base + path, **more)
            if method == "DELETE" and response.status_code == 404:
                return {}  # an earlier try, whose answer was lost, has deleted it
            return _content(response)

        return await self._until_answered(call)

    async def ready(self) -> None:
        """Wait until all ingresses would answer. Raises NoAnswer."""

        async def look(_: str) -> None:
            for port in self._ports():
                if (await self._http.get(f"http://127.0.0.1:{port}/ready")).status_code != 200:
                    raise Broken("an ingress is not ready")

        await self._until_answered(look)


def _content(response: httpx.Response) -> Any:
    """Return the answer. Raises Broken where it says to ask again, NoAnswer for any other refusal."""
    if response.status_code == 200:
        return response.json()
    said = response.text[:300]
    if response.status_code in _AGAIN:
        raise Broken(f"{response.status_code}: {_code(response)}")
    raise NoAnswer(f"{response.status_code}: {said}")


def _code(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return str(error.get("code") or error.get("type"))
    except (ValueError, KeyError, AttributeError, TypeError):
        return response.text[:100]

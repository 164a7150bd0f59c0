"""Asks Ollama's routes, streamed or not, and puts a stream's lines together as its clients do."""

import json
from typing import Any

from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import Api

CHAT, GENERATE = "/api/chat", "/api/generate"
ASK: list[Any] = [{"role": "user", "content": "Weather in Zürich?"}]


async def lines(api: Api, path: str, **body: Any) -> list[dict[str, Any]]:
    """The lines of a stream."""
    answer = await api.post(path, {"model": NAME, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


async def answer(api: Api, path: str = CHAT, *, stream: bool = False, **body: Any) -> dict[str, Any]:
    """The answer as one object: of a stream's lines the last, with what all of them say."""
    if path == CHAT:
        body = {"messages": ASK, **body}
    if not stream:
        got = await api.post(path, {"model": NAME, "stream": False, **body})
        assert got.status_code == 200, got.text
        return got.json()
    every = await lines(api, path, **body)
    assert [line["done"] for line in every] == [False] * (len(every) - 1) + [True]
    whole = dict(every[-1])
    said: dict[str, Any] = {}
    for line in every:
        for name, value in (line["message"] if path == CHAT else line).items():
            if name in ("content", "response", "thinking", "tool_calls"):
                said[name] = said[name] + value if name in said else value
        if "logprobs" in line:
            whole["logprobs"] = [*whole.get("logprobs", []), *line["logprobs"]]
    return whole | ({"message": {"role": "assistant", **said}} if path == CHAT else said)


async def refusal(api: Api, path: str = CHAT, status: int = 400, **body: Any) -> str:
    if path == CHAT:
        body = {"messages": ASK, **body}
    got = await api.post(path, {"model": NAME, **body})
    assert got.status_code == status, got.text
    error = got.json()
    assert error.keys() == {"error"}
    return error["error"]

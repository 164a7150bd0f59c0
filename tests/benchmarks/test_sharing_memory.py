"""The door that swaps for each request: what the live comparison of models that share memory is held against."""

import asyncio
from typing import Any

import httpx

from benchmarks.serving.sharing_memory import NUM_AWAKE, LeastRecentlyUsed

MODELS = ["a", "b", "c", "d"]


class Server:
    """Models that sleep and wake up as they are told. Never more than two are awake once four have been told to sleep."""

    def __init__(self) -> None:
        self.awake, self.told = {*MODELS}, list[str]()
        self.begun = False

    async def answer(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        what, model = request.url.path[1:], request.url.params["model"]
        self.told.append(f"{what} {model}")
        (self.awake.add if what == "wake_up" else self.awake.remove)(model)
        assert not self.begun or len(self.awake) <= NUM_AWAKE
        return httpx.Response(200)


async def opened() -> tuple[Server, LeastRecentlyUsed]:
    server = Server()
    http = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(server.answer))
    door = LeastRecentlyUsed(http, MODELS)
    await door.begin()
    assert server.awake == {"a", "b"}
    server.begun = True
    server.told.clear()
    return server, door


async def ask(door: LeastRecentlyUsed, server: Server, model: str, held: asyncio.Event | None = None) -> str:
    async with door.admit(model):
        assert model in server.awake
        if held is not None:
            await held.wait()
        await asyncio.sleep(0)
        assert model in server.awake, "it ends what it has begun"
    return model


async def test_the_model_that_was_not_used_for_longest_makes_way() -> None:
    server, door = await opened()
    for model in ("a", "b", "a", "c"):
        await ask(door, server, model)
    assert server.told == ["sleep b", "wake_up c"]
    await ask(door, server, "b")
    assert server.told[2:] == ["sleep a", "wake_up b"]


async def test_what_runs_is_ended_first_and_who_comes_meanwhile_waits() -> None:
    server, door = await opened()
    held = asyncio.Event()
    running: list[Any] = [asyncio.create_task(ask(door, server, model, held)) for model in ("a", "b")]
    await asyncio.sleep(0.01)
    waiting = [asyncio.create_task(ask(door, server, model)) for model in ("c", "a")]
    await asyncio.sleep(0.01)
    assert server.told == []
    held.set()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*running, *waiting) == ["a", "b", "c", "a"]


async def test_every_request_is_served_however_many_models_are_asked_at_once() -> None:
    server, door = await opened()
    asked = [MODELS[number * 7 % len(MODELS)] for number in range(40)]
    async with asyncio.timeout(5):
        assert await asyncio.gather(*(ask(door, server, model) for model in asked)) == asked
    assert len(server.awake) == NUM_AWAKE

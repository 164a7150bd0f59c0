"""A body's memory is free once its request is answered, without a garbage collection, whatever the answer is.

A full collection keeps all other requests waiting, for as long as it takes to free what is left: a second for two million objects."""

import asyncio
import gc
import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from cluster.ingress.tenants import ledger
from core.errors import Overloaded, ReplicaLost, RequestError, forget_frames
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CHATS, COMPLETIONS, SETTINGS, Api

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
NUM_PARTS, NUM_OTHERS = 3000, 500
"""The objects of a body, and how many more the test's client and the server may leave."""
TURNS = [{"role": ("user", "assistant")[number % 2], "content": "x"} for number in range(NUM_PARTS)]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}] * NUM_PARTS}]
TOOLS = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(NUM_PARTS)]
ITEMS = [{"type": "message", **turn} for turn in TURNS]
REFUSE = [*TURNS, {"role": "user", "content": "refuse me"}]

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "answered": (CHATS, {"messages": TURNS}),
    "streamed": (CHATS, {"messages": TURNS, "stream": True}),
    "parts": (CHATS, {"messages": PARTS}),
    "refused by the template": (CHATS, {"messages": REFUSE}),
    "a wrong type": (CHATS, {"messages": [*TURNS, {"role": "user", "content": 1}]}),
    "an unknown role": (CHATS, {"messages": [*TURNS, {"role": "x", "content": "x"}]}),
    "tools": (CHATS, {"messages": TURNS[:1], "tools": TOOLS}),
    "a wrong limit": (CHATS, {"messages": TURNS, "max_tokens": -1}),
    "a number out of range": (CHATS, {"messages": TURNS, "temperature": 9}),
    "too many prompts": (COMPLETIONS, {"prompt": [[65]] * NUM_PARTS}),
    "messages": (MESSAGES, {"messages": TURNS, "max_tokens": 5}),
    "refused messages": (MESSAGES, {"messages": REFUSE, "max_tokens": 5}),
    "wrong messages": (MESSAGES, {"messages": [*TURNS, {"role": "user"}], "max_tokens": 5}),
    "streamed messages": (MESSAGES, {"messages": TURNS, "max_tokens": 5, "stream": True}),
    "Ollama's chat": ("/api/chat", {"messages": TURNS}),
    "Ollama's prompt": ("/api/generate", {"prompt": "x", "context": [65] * NUM_PARTS}),
    "responses": (RESPONSES, {"input": ITEMS, "store": False}),
    "refused responses": (RESPONSES, {"input": [*ITEMS, {"type": "message", **REFUSE[-1]}], "store": False}),
    "wrong responses": (RESPONSES, {"input": [*ITEMS, {"type": "message", "role": "user"}], "store": False}),
    "no JSON": (CHATS, {"messages": TURNS, "temperature": float("nan")}),
}
FAILURES = {
    "refused by an instance": RequestError("not this one"),
    "overloaded": Overloaded("full", 1.0),
    "lost": ReplicaLost("gone"),
    "a fault of ours": ValueError("a bug"),
}


@pytest.fixture(autouse=True)
def nothing_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of a store makes as many objects as half a body has."""
    monkeypatch.setattr(ledger, "FLUSH_S", 3600.0)


@contextmanager
def nothing_is_left() -> Generator[None]:
    logging.disable()  # pytest keeps what is logged, with its tracebacks
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        yield
        assert len(gc.get_objects()) - before < NUM_OTHERS
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


async def answer(api: Api, path: str, body: dict[str, Any]) -> None:
    """Send the body, and read the answer to its end. The first request makes what stays."""
    for _ in range(2):
        await api.post(path, {"model": NAME, **body, "messages": TURNS[:1]})
    with nothing_is_left():
        await api.post(path, {"model": NAME, **body})
        await asyncio.sleep(0.05)


def roomy(generator: FakeGenerator, max_context_tokens: int = 100_000) -> Api:
    return Api(generator, replace(SETTINGS, max_context_tokens=max_context_tokens))


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", BODIES)
async def test_no_part_of_a_body_is_left_behind_its_answer(kind: str) -> None:
    await answer(roomy(FakeGenerator("ok")), *BODIES[kind])


@pytest.mark.parametrize("kind", ["answered", "parts", "messages", "responses"])
async def test_no_part_is_left_of_a_body_that_is_too_long(kind: str) -> None:
    await answer(roomy(FakeGenerator("ok"), 200), *BODIES[kind])


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", ["answered", "streamed", "streamed messages", "responses"])
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_no_part_is_left_of_a_body_whose_generation_fails(
    kind: str, failure: Exception, num_tokens: int
) -> None:
    generator = FakeGenerator("hello")
    generator.fail_at = (num_tokens, failure)
    await answer(roomy(generator), *BODIES[kind])


def test_an_error_lets_go_of_the_frames_of_all_that_led_to_it() -> None:
    def fail() -> None:
        try:
            raise ValueError("cause")
        except ValueError as cause:
            raise RequestError("what the client gets") from cause

    with pytest.raises(RequestError) as caught:
        fail()
    error = caught.value
    forget_frames(error)
    assert isinstance(error.__cause__, ValueError)
    assert error.__traceback__ is None
    assert error.__cause__.__traceback__ is None

"""Ollama's keep_alive, where the model sleeps on demand."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from cluster.ingress.ollama.model_lifetime import seconds_of
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.ollama.ollama_answers import ASK, CHAT, GENERATE

ON_DEMAND = replace(SETTINGS, sleeps_on_demand=True)


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        *((0, 0.0), (90, 90.0), (2.5, 2.5), (-1, inf), ("0", 0.0), ("5m", 300.0), ("1h30m", 5400.0)),
        *(("-1m", inf), ("250ms", 0.25), ("1.5h", 5400.0), ("300", 300.0)),
    ],
)
def test_a_duration_is_read_as_ollama_reads_it(keep_alive: Any, seconds: float) -> None:
    assert seconds_of(keep_alive) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": ASK}), (GENERATE, {"prompt": "x"})], ids=["chat", "generate"]
)
async def test_the_model_stays_awake_for_as_long_as_the_last_request_says(path: str, body: Any) -> None:
    api = Api(FakeGenerator(), ON_DEMAND)
    answer = await api.post(path, {"model": NAME, "stream": False, "keep_alive": "10m", **body})
    assert answer.status_code == 200
    assert "x-baton-warning" not in answer.headers
    assert api.generator.model_sleep.asked == ["keep 600"]


async def test_an_empty_chat_wakes_the_model_or_lets_it_sleep() -> None:
    api = Api(FakeGenerator(), ON_DEMAND)
    api.generator.model_sleep.is_asleep = True
    assert (await api.post(CHAT, {"model": NAME})).json()["done_reason"] == "load"
    assert (await api.post(CHAT, {"model": NAME, "keep_alive": 0})).json()["done_reason"] == "unload"
    assert api.generator.model_sleep.asked == ["wake", "keep 0"]


async def test_a_model_that_does_not_sleep_on_demand_is_not_woken() -> None:
    api = Api(FakeGenerator())
    api.generator.model_sleep.is_asleep = True
    answer = await api.post(CHAT, {"model": NAME, "keep_alive": 0})
    assert "does not sleep on demand" in answer.headers["x-baton-warning"]
    await api.post(CHAT, {"model": NAME})
    assert not api.generator.model_sleep.asked


async def test_a_sleeping_model_does_not_run() -> None:
    api = Api(FakeGenerator())
    assert (await api.http.get("/api/ps")).json()["models"]
    api.generator.model_sleep.is_asleep = True
    assert not (await api.http.get("/api/ps")).json()["models"]
    assert (await api.http.get("/api/tags")).json()["models"]

"""An operator has the model sleep and wake up: vLLM's routes, `baton models`, and what a client is told meanwhile."""

import asyncio
from typing import Any

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from baton.cli.main import app
from cluster.ingress.tenants.access import Rules, TenantRules
from core.errors import ModelAsleep, RequestError
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, COMPLETIONS, OK, SETTINGS, Api
from tests.cluster.ingress.http.test_disconnect import serving


async def test_the_routes_have_the_model_sleep_and_wake_up() -> None:
    api = Api(FakeGenerator())
    assert (await api.http.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert (await api.http.post("/sleep?level=2&mode=keep&drop_kv=true")).json() == {"is_sleeping": True}
    assert (await api.http.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await api.http.post("/wake_up?tags=weights&tags=kv_cache")).json() == {"is_sleeping": False}
    assert (await api.http.post("/sleep")).status_code == 200
    assert api.generator.model_sleep.asked == [
        "sleep 2 pauses=True timeout_s=60 drops=True",
        "wake",
        "sleep 1 pauses=False timeout_s=60 drops=False",
    ]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=0", "level"),
        ("/sleep?mode=abort", "mode"),
        ("/sleep?mode=later", "mode"),
        ("/sleep?timeout=soon", "timeout"),
        ("/sleep?timeout=-1", "timeout"),
        ("/sleep?timeout=nan", "timeout"),
        ("/sleep?lewel=1", "lewel"),
        ("/wake_up?tags=scheduling", "tags"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(path: str, field: str) -> None:
    api = Api(FakeGenerator())
    answer = await api.http.post(path)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert not api.generator.model_sleep.asked


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")]
)
async def test_operators_alone_may_do_so(method: str, path: str) -> None:
    rules = Rules(CLASSES, {"": TenantRules(), "acme": TenantRules((SecretStr("key"),), ("chat",))})
    api = Api(FakeGenerator(), SETTINGS, rules)
    assert (await api.http.request(method, path)).status_code == 401
    refused = await api.http.request(method, path, headers={"Authorization": "Bearer key"})
    assert refused.status_code == 403
    assert not api.generator.model_sleep.asked


@pytest.mark.parametrize(("retry_after_s", "header"), [(12.3, "13"), (0.0, None)])
async def test_a_request_for_a_sleeping_model_says_when_to_come_again(
    retry_after_s: float, header: str | None
) -> None:
    generator = FakeGenerator()
    generator.fail_at = (0, ModelAsleep("the model sleeps", retry_after_s))
    answer = await Api(generator).post(COMPLETIONS, OK)
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, header)
    assert answer.json()["error"]["code"] == "model_asleep"


async def test_a_model_that_stays_awake_is_said_to() -> None:
    generator = FakeGenerator()
    generator.model_sleep.refusal = RequestError("always awake", status=403, code="model_stays_awake")
    answer = await Api(generator).http.post("/sleep")
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "model_stays_awake"


async def test_the_command_asks_and_shows_the_state() -> None:
    generator = FakeGenerator()

    async def run(port: int, *words: str) -> Any:
        command = ["models", *words, "--base-url", f"http://127.0.0.1:{port}/v1"]
        return await asyncio.to_thread(CliRunner().invoke, app, command)

    async with serving(generator) as (_, port):
        assert "serving" in (await run(port)).output
        assert (await run(port, "sleep", "--level", "2", "--pause")).exit_code == 0
        assert (await run(port, "wake")).exit_code == 0
        assert generator.model_sleep.asked == ["sleep 2 pauses=True timeout_s=60 drops=False", "wake"]
        generator.model_sleep.refusal = RequestError("it is always awake", status=403)
        refused = await run(port, "sleep")
        assert "it is always awake" in str(refused.exception)

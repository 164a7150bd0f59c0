"""What holds on each route to the model: limits, meters, typed errors, and that metrics and traces tell it from the others."""

from typing import Any

import pytest
from pydantic import SecretStr

from cluster.ingress.tenants.access import Rules, TenantRules
from cluster.ingress.tenants.use_limits import UseLimits
from core.errors import Overloaded
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, CLASSES, COMPLETIONS, OK, SETTINGS, Api

KEY = "secret-acme"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: OK,
    CHATS: CHAT,
    "/v1/responses": {"model": NAME, "input": "x"},
    "/v1/messages": {**CHAT, "max_tokens": 20},
    "/api/chat": {**CHAT, "stream": False},
    "/api/generate": {**OK, "stream": False},
}
ROUTES = list(BODIES)


def api(**limits: int) -> Api:
    acme = TenantRules((SecretStr(KEY),), ("standard",), UseLimits(**limits))
    server = TenantRules((SecretStr("root"),))
    return Api(FakeGenerator(), SETTINGS, Rules(CLASSES, {"": server, "acme": acme}))


async def post(made: Api, route: str, **fields: Any) -> Any:
    return await made.post(route, BODIES[route] | fields, Authorization=f"Bearer {KEY}")


@pytest.mark.parametrize("route", ROUTES)
async def test_it_is_told_from_the_others(route: str) -> None:
    made = api()
    assert (await post(made, route)).status_code == 200
    assert made.generator.routes == [route]
    metrics = (await made.http.get("/metrics", headers={"Authorization": "Bearer root"})).text
    assert f'baton_http_requests_total{{route="{route}",status="200"}} 1.0' in metrics


@pytest.mark.parametrize("route", ROUTES)
async def test_its_tokens_are_the_tenants(route: str) -> None:
    made = api()
    await post(made, route)
    metrics = (await made.http.get("/metrics", headers={"Authorization": "Bearer root"})).text
    num_prompt = len(made.generator.requests[0].prompt)
    assert f'baton_tenant_tokens_total{{kind="prompt",tenant="acme"}} {num_prompt}.0' in metrics
    assert 'baton_tenant_tokens_total{kind="output",tenant="acme"} 12.0' in metrics


@pytest.mark.parametrize("route", ROUTES)
async def test_its_limits_hold(route: str) -> None:
    made = api(requests_per_min=1)
    assert (await post(made, route)).status_code == 200
    refused = await post(made, route)
    assert refused.status_code == 429
    assert float(refused.headers["retry-after"]) > 0
    assert route.startswith("/api/") or refused.json()["error"]["type"] in (
        *("requests", "rate_limit_error", "rate_limit_exceeded"),
    )
    assert len(made.generator.requests) == 1


@pytest.mark.parametrize("route", ROUTES)
async def test_a_mistake_is_named(route: str) -> None:
    refused = await post(api(), route, temperature=9)
    assert refused.status_code == 400
    assert route.startswith("/api/") or refused.json()["error"]["type"] == "invalid_request_error"
    assert "temperature" in refused.text


@pytest.mark.parametrize("route", ROUTES)
async def test_a_full_cluster_says_when_to_come_again(route: str) -> None:
    made = api()
    made.generator.fail_at = (0, Overloaded("every queue is full", retry_after_s=7.0))
    refused = await post(made, route)
    assert refused.status_code in (429, 529)
    assert refused.headers["retry-after"] == "7"

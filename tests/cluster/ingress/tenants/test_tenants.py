"""Keys, tenants and their limits, as the openai client sees them; and what the audit log says of refusals."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import SecretStr

from cluster.ingress.tenants.access import Rules, TenantRules, read_rules
from cluster.ingress.tenants.use_limits import UseLimits
from core.config.cluster_config import load
from core.errors import ConfigError
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, CLASSES, COMPLETIONS, OK, SETTINGS, Api
from tests.patience import until

OPEN_KEY, KEY = "secret-open", "secret-acme"
UNLIMITED = UseLimits()


def api(limits: UseLimits = UNLIMITED, generator: FakeGenerator | None = None) -> Api:
    """One for which no time passes."""
    acme = TenantRules((SecretStr(KEY), SecretStr("second")), ("chat", "standard"), limits)
    rules = Rules(CLASSES, {"": TenantRules((SecretStr(OPEN_KEY),)), "acme": acme})
    return Api(generator or FakeGenerator(), SETTINGS, rules, now=lambda: 0.0)


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_keys_guard_everything_but_health_and_readiness() -> None:
    made = api()
    for path in ("/v1/models", "/metrics", "/cluster"):
        for headers in ({}, bearer("wrong"), {"Authorization": KEY}, bearer(KEY + "x"), bearer("clé")):
            raw = {k: v.encode() for k, v in headers.items()}
            answer = await made.http.get(path, headers=raw)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "secret" not in answer.text
        for key in (OPEN_KEY, KEY, "second"):
            expected = 200 if key == OPEN_KEY or path == "/v1/models" else 403
            assert (await made.http.get(path, headers=bearer(key))).status_code == expected
    assert (await made.http.get("/health")).status_code == 200
    assert (await made.http.get("/ready")).status_code == 200


async def test_a_tenants_requests_bear_its_name_class_and_salt() -> None:
    made = api()
    await made.post(COMPLETIONS, {**OK, "cache_salt": "s"}, **bearer())
    await made.post(COMPLETIONS, {**OK, "cache_salt": "acme/s"}, **bearer(OPEN_KEY))
    await made.post(COMPLETIONS, OK, **bearer())
    await made.post(COMPLETIONS, OK, **bearer(OPEN_KEY))
    first, second, third, fourth = made.generator.requests
    assert (first.tenant, first.slo.name) == ("acme", "chat")
    assert (second.tenant, second.slo.name) == ("", "standard")
    assert len({request.salt for request in made.generator.requests}) == 4, (
        "nobody can name another's prefixes"
    )
    assert (third.salt, fourth.salt) == ("acme/", "")


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
async def test_caches_are_dropped_by_the_operator_alone(path: str) -> None:
    made = api()
    assert (await made.post(path, b"")).status_code == 401
    refused = await made.post(path, b"", **bearer())
    assert refused.status_code == 403
    assert "serve.api_keys" in refused.json()["error"]["message"]
    answer = await made.post(path, b"", **bearer(OPEN_KEY))
    assert answer.status_code == 200
    assert answer.json()["dropped"]["one"] == {"device": 5, "host": 2, "disk": 1, "in_use": 3}


async def test_a_class_is_asked_for_by_header_or_service_tier() -> None:
    made = api()
    for body, headers in (
        ({"service_tier": "standard"}, {}),
        ({"service_tier": "chat"}, {"x-slo-class": "standard"}),
    ):
        await made.post(CHATS, {**CHAT, **body}, **bearer(), **headers)
    await made.post(CHATS, {**CHAT, "service_tier": "auto"}, **bearer())
    assert [request.slo.name for request in made.generator.requests] == ["standard", "standard", "chat"]
    refused = await made.post(CHATS, {**CHAT, "service_tier": "flex"}, **bearer())
    assert refused.json()["error"] == {
        "message": "unknown service_tier 'flex'; there are chat, standard",
        "type": "invalid_request_error",
        "param": "service_tier",
        "code": None,
    }


async def test_requests_per_minute_as_the_openai_client_takes_it() -> None:
    made = api(UseLimits(requests_per_min=2))
    client = made.openai.with_options(api_key=KEY)
    for left in ("1", "0"):
        raw = await client.completions.with_raw_response.create(model=NAME, prompt="x")
        assert raw.headers["x-ratelimit-limit-requests"] == "2"
        assert raw.headers["x-ratelimit-remaining-requests"] == left
    with pytest.raises(openai.RateLimitError) as refused:
        await client.completions.create(model=NAME, prompt="x")
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["retry-after"] == "61", "both leave the minute together"
    assert refused.value.response.headers["x-ratelimit-reset-requests"] == "1m1s"
    assert "tenant 'acme' may have 2 requests per minute, at all ingresses" in refused.value.message
    assert (await made.post(COMPLETIONS, OK, **bearer(OPEN_KEY))).status_code == 200, (
        "others are not concerned"
    )
    assert (await made.http.get("/v1/models", headers=bearer())).status_code == 200


async def test_tokens_are_paid_for_prompt_first_and_output_as_it_comes() -> None:
    made = api(UseLimits(tokens_per_min=30), FakeGenerator("x" * 40))
    answer = await made.post(COMPLETIONS, {**OK, "prompt": "y" * 10, "n": 2, "max_tokens": 15}, **bearer())
    assert answer.status_code == 200
    later = await made.post(COMPLETIONS, {**OK, "max_tokens": 1}, **bearer())
    assert later.status_code == 429
    assert later.headers["x-ratelimit-remaining-tokens"] == "0"
    assert later.headers["retry-after"] == "61", "10 + 2 * 15 tokens of 30 are 10 too many"
    never = await made.post(COMPLETIONS, {**OK, "prompt": "y" * 31}, **bearer())
    assert (never.status_code, "retry-after" in never.headers) == (429, False)
    assert never.headers["x-should-retry"] == "false"
    assert "x-should-retry" not in later.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_sequences_at_once_and_their_end(stream: bool) -> None:
    made = api(UseLimits(concurrent=2), FakeGenerator("x" * 20))
    made.generator.stall_at = 3
    both = {**OK, "n": 2, "max_tokens": 20, "stream": stream}
    running = asyncio.create_task(made.post(COMPLETIONS, both, **bearer()))
    await until(lambda: len(made.generator.requests) == 2)
    refused = await made.post(COMPLETIONS, {**OK, "stream": stream}, **bearer())
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    made.generator.go_on.set()
    assert (await running).status_code == 200
    assert (await made.post(COMPLETIONS, both, **bearer())).status_code == 200
    made.generator.fail_at = (1, RuntimeError("broken"))
    for _ in range(3):
        await made.post(COMPLETIONS, both, **bearer())
    made.generator.fail_at = None
    assert (await made.post(COMPLETIONS, both, **bearer())).status_code == 200, "what failed is given back"


async def test_metrics_by_tenant() -> None:
    made = api(UseLimits(requests_per_min=1))
    for _ in range(2):
        await made.post(COMPLETIONS, {**OK, "prompt": "abc", "max_tokens": 4}, **bearer())
    text = (await made.http.get("/metrics", headers=bearer(OPEN_KEY))).text
    assert 'baton_requests_refused_total{reason="rate_limit_exceeded",tenant="acme"} 1.0' in text
    assert 'baton_tenant_tokens_total{kind="prompt",tenant="acme"} 3.0' in text
    assert 'baton_tenant_tokens_total{kind="output",tenant="acme"} 4.0' in text


async def test_each_refusal_leaves_one_line_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    made = api(UseLimits(requests_per_min=3))
    caplog.set_level(logging.INFO, "cluster.ingress.http.audit")
    cases: list[tuple[Any, dict[str, str], str]] = [
        (OK, bearer("guess"), "status=401 code=invalid_api_key field=-"),
        (
            {**OK, "top_p": 7},
            bearer(),
            "tenant=acme POST /v1/completions status=400 code=invalid_request field=top_p",
        ),
        ({**OK, "model": "what I ask"}, bearer(), "status=404 code=model_not_found field=model"),
        (b"[" * 100_000, bearer(), "status=400 code=invalid_request"),
        (OK, bearer(), "status=429 code=rate_limit_exceeded"),
    ]
    for body, headers, _ in cases:
        await made.post(COMPLETIONS, body, **headers, **{"x-request-id": "mine"})
    await made.http.get("/wp-admin%0A/forged", headers={"x-request-id": "mine"})
    cases.append((None, {}, "tenant=- GET /wp-admin\\n/forged status=404 code=no_such_route"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(cases)
    for line, (_, _, expected) in zip(lines, cases, strict=True):
        assert expected in line
        assert "request=mine client=127.0.0.1 " in line
        assert not any(word in line for word in ("guess", KEY, "what I ask"))


def test_rules_come_from_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# rotated in May\nfrom-file\n\nanother\n")
    content = {"tenants": {"acme": {"keys_file": str(file), "max_concurrent": 4}}}
    rules = read_rules(
        load(content, {"BATON_TENANTS__ACME__KEYS": '["from-env"]', "BATON_SERVE__API_KEYS": '["flat"]'})
    )
    assert [key.get_secret_value() for key in rules.tenants["acme"].keys] == [
        "from-env",
        "from-file",
        "another",
    ]
    assert rules.tenants["acme"].limits == UseLimits(concurrent=4)
    assert "from-" not in repr(rules)
    flat = read_rules(load({"serve": {"api_keys_file": str(file)}}, {}))
    assert [key.get_secret_value() for key in flat.tenants[""].keys] == ["from-file", "another"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"acme": {}}, "neither keys nor a keys_file"),
        ({"acme": {"keys": ["k"], "slo_classes": ["royal"]}}, "'royal' is not among slo_classes"),
        ({"a/b": {"keys": ["k"]}}, "tenants"),
        ({"acme": {"keys": ["k"]}, "b": {"keys": ["k"]}}, "'acme' and 'b' share a key"),
        ({"acme": {"keys": ["three words here"]}}, "tenants.acme.keys: a key must be printable"),
        ({"acme": {"keys_file": "/nowhere"}}, "tenants.acme.keys_file: cannot read"),
        ({"acme": {"keys_file": "/dev/null"}}, "holds no key"),
    ],
)
def test_mistakes_are_refused_at_the_start(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rules(load({"tenants": content}, {}))


async def test_rules_are_replaced_while_requests_run() -> None:
    made = api(UseLimits(concurrent=1), FakeGenerator("x" * 20))
    made.generator.stall_at = 3
    running = asyncio.create_task(made.post(COMPLETIONS, {**OK, "max_tokens": 20}, **bearer()))
    await until(lambda: bool(made.generator.requests))
    acme = TenantRules((SecretStr("new-key"),), (), UseLimits(concurrent=2))
    made.access.replace(Rules(CLASSES, {"": TenantRules(), "acme": acme}))
    assert (await made.post(COMPLETIONS, OK, **bearer())).status_code == 401
    assert (await made.post(COMPLETIONS, {**OK, "n": 2}, **bearer("new-key"))).status_code == 429
    made.generator.go_on.set()
    assert (await running).status_code == 200
    assert (await made.post(COMPLETIONS, {**OK, "n": 2}, **bearer("new-key"))).status_code == 200

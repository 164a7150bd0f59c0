"""API keys that are made by API, through the openai SDK, at ingresses that share a database."""

import asyncio

import openai
import pytest
from pydantic import SecretStr

from cluster.ingress.tenants import made_keys
from cluster.ingress.tenants.access import Rules, TenantRules
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, COMPLETIONS, OK, OPEN, Api
from tests.cluster.store.conftest import OpenStore
from tests.patience import PATIENCE_S

KEYS = "/v1/organization/admin_api_keys"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_keys, "LOOK_S", 0.02)
    monkeypatch.setattr(made_keys, "UNKNOWN_S", 0.0)


def api(opened: OpenStore) -> Api:
    tenants = {"": TenantRules((SecretStr("root"),)), "acme": TenantRules((SecretStr("in-file"),))}
    return Api(FakeGenerator("hello"), rules=Rules(CLASSES, tenants), store=opened())


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status_of(made: Api, key: str) -> int:
    return (await made.post(COMPLETIONS, OK, **as_key(key))).status_code


async def test_a_key_opens_every_ingress_from_when_it_is_made_until_it_is_revoked(opened: OpenStore) -> None:
    one, other = api(opened), api(opened)
    admin = one.openai.with_options(admin_api_key="root").admin.organization.admin_api_keys
    made = await admin.create(
        name="ci", extra_body={"tenant": "acme", "limits": {"max_requests_per_min": 10_000}}
    )
    assert made.value.startswith(made.redacted_value.partition("...")[0])
    assert [await status_of(each, made.value) for each in (one, other)] == [200, 200]
    assert other.generator.requests[-1].tenant == "acme"
    assert await status_of(other, made.value[:-1] + "x") == 401
    assert (await other.http.get("/metrics", headers=as_key(made.value))).status_code == 403, (
        "it is a tenant's"
    )
    listed = await other.http.get(KEYS, headers=as_key("root"))
    assert [(each["id"], each["tenant"]) for each in listed.json()["data"]] == [(made.id, "acme")]
    assert made.value not in listed.text
    await other.openai.with_options(admin_api_key="root").admin.organization.admin_api_keys.delete(made.id)
    assert await status_of(other, made.value) == 401
    async with asyncio.timeout(PATIENCE_S):
        while await status_of(one, made.value) != 401:
            await asyncio.sleep(0.01)
    assert (await one.http.get(f"{KEYS}/{made.id}", headers=as_key("root"))).status_code == 404


async def test_the_store_has_no_key_but_digests(opened: OpenStore) -> None:
    one = api(opened)
    made = await one.post(KEYS, {"name": "a"}, **as_key("root"))
    (record,) = await opened().find("api_key")
    assert made.json()["value"].encode() not in record.body
    assert made.json()["value"][20:40].encode() not in record.body


async def test_a_key_ends_at_its_time_and_has_limits_and_scopes_of_its_own(opened: OpenStore) -> None:
    one = api(opened)
    body = {"name": "a", "scopes": ["metrics"], "expires_in_seconds": 3600}
    reads = (await one.post(KEYS, body, **as_key("root"))).json()["value"]
    assert (await one.http.get("/metrics", headers=as_key(reads))).status_code == 200
    assert await status_of(one, reads) == 403
    body = {"name": "b", "tenant": "acme", "limits": {"max_requests_per_min": 1}}
    made = (await one.post(KEYS, body, **as_key("root"))).json()
    client = one.openai.with_options(api_key=made["value"])
    await client.completions.create(model=NAME, prompt="x")
    with pytest.raises(openai.RateLimitError, match=f"key '{made['id']}' may have 1 requests per minute"):
        await client.completions.create(model=NAME, prompt="x")
    assert await status_of(one, "in-file") == 200, "the tenant's other keys are not concerned"
    one.access.made_keys = made_keys.MadeKeys(opened(), now=lambda: 4e9)
    assert (await one.http.get("/metrics", headers=as_key(reads))).status_code == 401


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"name": "a", "tenant": "nobody"}, "there is no tenant 'nobody'; there are: acme"),
        ({"name": "a", "tenant": "acme", "scopes": ["operator"]}, "scopes among inference"),
        ({"name": "a", "scopes": []}, "scopes among"),
        ({"name": ""}, "name"),
        ({"name": "a", "expires_in_seconds": 0}, "expires_in_seconds"),
    ],
)
async def test_a_key_that_nobody_could_use_is_not_made(
    opened: OpenStore, body: dict[str, object], words: str
) -> None:
    answer = await api(opened).post(KEYS, body, **as_key("root"))
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_only_operators_make_keys_and_only_where_keys_are_asked_for(opened: OpenStore) -> None:
    assert (await api(opened).post(KEYS, {"name": "a"}, **as_key("in-file"))).status_code == 403
    answer = await Api(FakeGenerator(), rules=OPEN, store=opened()).post(KEYS, {"name": "a"})
    assert answer.status_code == 400
    assert "serve.api_keys" in answer.json()["error"]["message"]
    rules = Rules(CLASSES, {"": TenantRules((SecretStr("root"),))})
    answer = await Api(FakeGenerator(), rules=rules).post(KEYS, {"name": "a"}, **as_key("root"))
    assert answer.json()["error"]["message"] == "keys are made in a database: name one in serve.store"

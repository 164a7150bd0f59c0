"""Usage as the openai SDK's admin resource reads it, as CSV, and what budgets refuse by it."""

import asyncio
import csv
import time
from collections import Counter
from typing import Any

import openai
import pytest
from pydantic import SecretStr

from cluster.ingress.tenants import budgets
from cluster.ingress.tenants.access import Rules, TenantRules
from cluster.ingress.tenants.use_limits import UseLimits
from cluster.store.sql_store import SqlStore
from cluster.store.usage_port import DAY_S, UsageBatch, UsageCounts, UsedBy
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, CLASSES, COMPLETIONS, OK, Api
from tests.cluster.store.usage_count import count
from tests.patience import PATIENCE_S

DAY = int(time.time()) // DAY_S * DAY_S
USAGE = "/v1/organization/usage/completions"


def api(store: SqlStore | None = None, **tenants: TenantRules) -> Api:
    named = {name: TenantRules((SecretStr(f"key-{name}"),)) for name in ("a", "b")} | tenants
    everybody = TenantRules((SecretStr("reader metrics"), SecretStr("server inference")))
    return Api(FakeGenerator("hello"), rules=Rules(CLASSES, {"": everybody, **named}), store=store)


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def flushed(made: Api) -> None:
    await made.app.state.ledger.flush()


async def test_the_sdk_finds_what_clients_have_counted_by_tenant_key_model_and_class() -> None:
    made, counted = api(), {name: Counter[str]() for name in ("a", "b", "")}
    for key, name in (("key-a", "a"), ("key-a", "a"), ("key-b", "b"), ("server", "")):
        for path, body in ((CHATS, CHAT), (COMPLETIONS, {**OK, "n": 3, "max_tokens": 2})):
            count(counted[name], await made.post(path, body, **as_key(key)))
    await flushed(made)
    usage = made.openai.with_options(admin_api_key="reader").admin.organization.usage
    grouped: Any = ["project_id", "model", "service_tier", "batch"]
    page = await usage.completions(start_time=DAY - DAY_S, group_by=grouped, limit=31)
    found = {one.project_id: one for bucket in page.data for one in bucket.results}  # type: ignore[union-attr]
    assert not page.has_more
    for name, clients in counted.items():
        one: Any = found[name]
        assert (one.input_tokens, one.output_tokens) == (clients["prompt"], clients["output"])
        assert (one.num_model_requests, one.model, one.service_tier, one.batch) == (
            clients["requests"],
            NAME,
            "standard",
            False,
        )
    by_key = await usage.completions(start_time=DAY - DAY_S, group_by=["api_key_id"], project_ids=["a"])
    (only,) = (one for bucket in by_key.data for one in bucket.results)
    assert only.api_key_id.startswith("key_")  # type: ignore[union-attr]
    assert "key-a" not in only.api_key_id  # type: ignore[union-attr,operator]


async def test_a_tenant_sees_its_own_usage_alone() -> None:
    made = api()
    for key in ("key-a", "key-b", "key-b"):
        await made.post(COMPLETIONS, OK, **as_key(key))
    await flushed(made)
    assert (await made.http.get(f"{USAGE}?start_time={DAY}", headers=as_key("key-a"))).status_code == 403
    for query in ("", "&project_ids=b", "&project_ids=a"):
        answer = await made.http.get(
            f"/v1/usage?start_time={DAY}&group_by=project_id{query}", headers=as_key("key-a")
        )
        results = [one for bucket in answer.json()["data"] for one in bucket["results"]]
        assert [(one["project_id"], one["num_model_requests"]) for one in results] == (
            [("a", 1)] if "b" not in query else []
        )


async def test_pages_and_a_table_have_all_buckets() -> None:
    store = SqlStore()
    minutes = [UsedBy(DAY + 60 * n, "a", "k", "m", "c", False) for n in range(5)]
    await store.add_usage(UsageBatch("w", 0, 5, dict.fromkeys(minutes, UsageCounts(1, 10, 4, 3, 2, 1, 0.5))))
    made = api(store)
    query = {"start_time": DAY, "end_time": DAY + 300, "bucket_width": "1m", "limit": 2}
    starts, page = list[int](), ""
    while page is not None:
        answer = await made.http.get(
            USAGE, params=query | ({"page": page} if page else {}), headers=as_key("reader")
        )
        starts += [bucket["start_time"] for bucket in answer.json()["data"] if bucket["results"]]
        page = answer.json()["next_page"]
    assert starts == [DAY + 60 * n for n in range(5)]
    table = await made.http.get(
        USAGE, params=query | {"group_by": "project_id"}, headers={**as_key("reader"), "Accept": "text/csv"}
    )
    rows = list(csv.DictReader(table.text.splitlines()))
    assert [int(row["start_time"]) for row in rows] == starts
    assert rows[0] | {"start_time": "", "end_time": ""} == {
        "start_time": "", "end_time": "", "project_id": "a", "num_model_requests": "1", "input_tokens": "10",
        "input_cached_tokens": "4", "output_tokens": "3", "output_reasoning_tokens": "2", "num_images": "1",
        "sequence_seconds": "0.5",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "start_time"),
        ("start_time=x", "start_time"),
        ("start_time=1&bucket_width=2d", "bucket_width"),
        ("start_time=1&group_by=user_id", "group_by"),
        ("start_time=1&limit=32", "limit"),
        ("start_time=1&user_ids=me", "user_ids"),
    ],
)
async def test_a_query_that_cannot_be_answered_is_refused_by_name(query: str, field: str) -> None:
    answer = await api().http.get(f"{USAGE}?{query}", headers=as_key("reader"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_a_budget_that_is_used_up_refuses_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "LOOK_S", 0.01)
    if (left_s := DAY_S - time.time() % DAY_S) < PATIENCE_S:  # what a day's budget counts goes with the day
        await asyncio.sleep(left_s)
    made = api(
        a=TenantRules((SecretStr("key-a"),), limits=UseLimits(tokens_per_day=20, tokens_per_month=500))
    )
    client = made.openai.with_options(api_key="key-a")
    for _ in range(5):
        await client.completions.create(model=NAME, prompt="x", max_tokens=5)
        await flushed(made)
        await asyncio.sleep(0.05)
    with pytest.raises(openai.RateLimitError) as refused:
        await client.completions.create(model=NAME, prompt="x", max_tokens=5)
    assert refused.value.code == "insufficient_quota"
    assert (
        "tenant 'a' may have 20 tokens per day, which are used up; the next day begins in"
        in refused.value.message
    )
    assert 0 < int(refused.value.response.headers["retry-after"]) <= DAY_S
    usage = await made.http.get(f"/v1/usage?start_time={DAY}", headers=as_key("key-a"))
    results = [one for bucket in usage.json()["data"] for one in bucket["results"]]
    assert 20 <= sum(one["input_tokens"] + one["output_tokens"] for one in results) <= 36
    assert (await made.post(COMPLETIONS, OK, **as_key("key-b"))).status_code == 200

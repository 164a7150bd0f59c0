"""What one ingress has stored is every ingress', and outlives them: through the openai SDK, on both databases."""

import asyncio
import io
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import SecretStr

from cluster.ingress.batches import batch_job, batch_runner
from cluster.ingress.tenants.access import Rules, TenantRules
from cluster.store import lease_keeper
from cluster.store.sql_store import DOWN_S, SqlStore
from cluster.store.store_port import StoreRecord
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, SETTINGS, Api
from tests.cluster.ingress.batches.test_batches import Server, line
from tests.cluster.store.conftest import OpenStore
from tests.patience import PATIENCE_S, until
from tests.postgres import Postgres, running_postgres

HELLO: Any = {"type": "message", "role": "user", "content": "Hello."}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "LOOK_S", 0.01)
    monkeypatch.setattr(batch_job, "LOOK_S", 0.05)
    monkeypatch.setattr(lease_keeper, "RENEW_S", 0.02)


async def test_any_ingress_answers_for_a_response_also_after_all_have_started_anew(opened: OpenStore) -> None:
    one, other = (Api(FakeGenerator("hello"), store=opened()) for _ in range(2))
    first = await one.openai.responses.create(model=NAME, input="a")
    assert (await other.openai.responses.retrieve(first.id)).output_text == "hello"
    second = await other.openai.responses.create(model=NAME, input="b", previous_response_id=first.id)
    anew = Api(FakeGenerator("hello"), store=opened())
    listed = await anew.openai.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in listed.data] == ["a", "hello", "b"]  # type: ignore[union-attr]
    reference: Any = [{"type": "item_reference", "id": first.output[0].id}, HELLO]
    await anew.openai.responses.create(model=NAME, input=reference)
    await anew.openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await one.openai.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="no item"):
        await one.openai.responses.create(model=NAME, input=reference)


class SlowStore(SqlStore):
    async def put(self, records: Sequence[StoreRecord], **conditions: Any) -> None:
        await asyncio.sleep(0.2)
        await super().put(records, **conditions)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_stored_before_a_client_has_its_end(stream: bool) -> None:
    api = Api(FakeGenerator("hello"), store=SlowStore())
    answer = await api.post("/v1/responses", {"model": NAME, "input": "a", "stream": stream})
    found = re.search(r"resp_[0-9a-f]+", answer.text)
    assert found is not None
    assert (await api.openai.responses.retrieve(found[0])).output_text == "hello"


async def test_only_its_owner_sees_a_response_at_any_ingress(opened: OpenStore) -> None:
    tenants = {name: TenantRules((SecretStr(name),)) for name in ("a", "b")}
    rules = Rules(CLASSES, {"": TenantRules(), **tenants})
    one, other = (Api(FakeGenerator(), rules=rules, store=opened()) for _ in range(2))
    mine = await one.openai.with_options(api_key="a").responses.create(model=NAME, input="secret")
    kept = await one.openai.with_options(api_key="a").conversations.create(items=[HELLO])
    theirs = other.openai.with_options(api_key="b")
    for ask in (
        theirs.responses.retrieve(mine.id),
        theirs.responses.delete(mine.id),
        theirs.responses.cancel(mine.id),
        theirs.responses.create(model=NAME, input=[{"type": "item_reference", "id": mine.output[0].id}]),  # type: ignore[list-item]
        theirs.conversations.retrieve(kept.id),
        theirs.conversations.delete(kept.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask
    assert (await other.openai.with_options(api_key="a").responses.retrieve(mine.id)).id == mine.id


async def test_items_that_two_ingresses_add_at_once_are_all_in_the_conversation(opened: OpenStore) -> None:
    one, other = (Api(FakeGenerator(), store=opened()) for _ in range(2))
    kept = await one.openai.conversations.create()
    adding = [
        api.openai.conversations.items.create(kept.id, items=[{**HELLO, "content": f"{name}{number}"}])
        for number in range(5)
        for name, api in (("one", one), ("other", other))
    ]
    await asyncio.gather(*adding)
    items = [item async for item in other.openai.conversations.items.list(kept.id)]
    texts = {item.content[0].text for item in items}  # type: ignore[union-attr]
    assert texts == {f"{name}{number}" for number in range(5) for name in ("one", "other")}
    assert len({item.id for item in items}) == 10


async def running(api: Api) -> Any:
    """Return a background response that waits for its fourth token."""
    api.generator.stall_at = 3
    response = await api.openai.responses.create(model=NAME, input="a", background=True)
    await until(lambda: bool(api.generator.requests))
    return response


async def test_a_background_response_is_cancelled_or_deleted_at_any_ingress(opened: OpenStore) -> None:
    one, other = (Api(FakeGenerator(), store=opened()) for _ in range(2))
    response = await running(one)
    assert (await other.openai.responses.retrieve(response.id)).status == "in_progress"
    assert (await other.openai.responses.cancel(response.id)).status == "cancelled"
    await until(lambda: len(one.generator.closed) == 1)
    assert (await one.openai.responses.retrieve(response.id)).status == "cancelled"
    response = await running(one)
    await other.openai.responses.delete(response.id)
    await until(lambda: len(one.generator.closed) == 2)
    with pytest.raises(openai.NotFoundError):
        await one.openai.responses.retrieve(response.id)


async def test_a_background_response_whose_ingress_ends_has_failed_in_words(
    opened: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ingress neither renews the lease nor writes the end, as one that was killed."""
    monkeypatch.setattr("cluster.ingress.responses.response_store.LEASE_S", 0.1)
    monkeypatch.setattr(lease_keeper, "RENEW_S", PATIENCE_S)
    one, other = (Api(FakeGenerator(), store=opened()) for _ in range(2))
    response = await running(one)
    async with asyncio.timeout(PATIENCE_S):
        while (found := await other.openai.responses.retrieve(response.id)).status == "in_progress":
            await asyncio.sleep(0.02)
    assert found.error is not None
    assert (found.status, found.error.code) == ("failed", "server_error")
    assert "the ingress that generated this response has ended" in found.error.message
    one.generator.go_on.set()
    async with asyncio.timeout(
        PATIENCE_S
    ):  # it had only been slow, and what it says counts for nothing any more
        await until(lambda: bool(one.generator.finished or one.generator.closed))
    await asyncio.sleep(0.1)
    assert (await other.openai.responses.retrieve(response.id)).status == "failed"


async def test_files_and_batches_are_every_ingress(url: str) -> None:
    one, other = (Server(url, FakeGenerator("fine", pause_s=0.001), room=8 << 20) for _ in range(2))
    contents = bytes(range(256)) * 10_000
    file = await one.client.files.create(file=("x", io.BytesIO(contents)), purpose="batch")
    assert (await other.client.files.content(file.id)).content == contents
    await other.client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        await one.client.files.retrieve(file.id)
    async with one.running():
        batch = await other.submit([line(n) for n in range(60)])
        await until(lambda: len(one.generator.finished) > 5)
    async with other.running():
        done = await one.ended(batch.id)
    answers = await one.answers(done.output_file_id)
    assert Counter(each["custom_id"] for each in answers) == Counter(f"c{n}" for n in range(60))
    assert other.generator.finished


async def test_ingresses_of_another_model_leave_its_batches_alone(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (Server(url, FakeGenerator()) for _ in range(2))
    other.runner = batch_runner.BatchRunner(
        other.app, other.store, other.access, "another", at_once=1, slo_class="batch"
    )
    async with other.running():
        batch = await one.submit([line(0)])
        await asyncio.sleep(0.2)
        assert (await one.client.batches.retrieve(batch.id)).status == "validating"
        async with one.running():
            assert (await one.ended(batch.id)).status == "completed"
    assert other.generator.requests == []


@pytest.fixture
def stopped():
    """A PostgreSQL that has tables, and is gone."""
    with running_postgres() as server:
        url = server.new_database()
        asyncio.run(_used(url))
        server.stop()
        yield server, url


async def _used(url: str) -> None:
    store = SqlStore(lambda: url, PATIENCE_S)
    await store.get("x")
    store.close()


async def test_a_database_that_is_gone_costs_what_needs_it_and_no_chat(stopped: tuple[Postgres, str]) -> None:
    server, url = stopped
    settings = replace(SETTINGS, file_store_bytes=1 << 20)
    api = Api(FakeGenerator("hello"), settings, store=SqlStore(lambda: url, 20.0))
    chat = await api.openai.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}])
    assert chat.choices[0].message.content == "hello"
    for stream in (False, True):
        body = {"model": NAME, "input": "a", "stream": stream}
        answer = await api.post("/v1/responses", body)
        assert answer.status_code == 200
        assert "hello" in answer.text
        warned = "not stored" in answer.headers.get("x-baton-warning", "")
        assert warned or stream, "the first has found out that the database is gone"
    body = {"model": NAME, "input": "a", "stream": True}
    assert any(['"store": false' in (await api.post("/v1/responses", body)).text for _ in range(5)])
    gone = {"id": f"resp_{0:032x}", "conversation": f"conv_{0:032x}"}
    for path, needs in (
        ("/v1/responses", {"model": NAME, "input": "a", "background": True}),
        ("/v1/responses", {"model": NAME, "input": "a", "previous_response_id": gone["id"]}),
        ("/v1/responses", {"model": NAME, "input": "a", "conversation": gone["conversation"]}),
        ("/v1/conversations", {}),
        ("/v1/batches", {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"}),
    ):
        answer = await api.post(path, needs)
        if path != "/v1/batches":
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], answer.headers["retry-after"]) == (
                503,
                "store_unavailable",
                "1",
            ), path
    assert (await api.http.get("/v1/files")).status_code == 503
    server.start()
    await asyncio.sleep(DOWN_S)
    kept = await api.openai.responses.create(model=NAME, input="a")
    assert (await api.openai.responses.retrieve(kept.id)).output_text == "hello"


async def test_a_batch_waits_for_a_database_that_starts_again_and_answers_each_line_once(
    stopped: tuple[Postgres, str],
) -> None:
    server, url = stopped
    server.start()
    one = Server(url, FakeGenerator("fine", pause_s=0.002))
    batch = await one.submit([line(n) for n in range(100)])
    async with one.running():
        await until(lambda: len(one.generator.finished) > 10)
        server.stop(signal.SIGQUIT)
        await until(lambda: not one.store.is_up)
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    done = await one.client.batches.retrieve(batch.id)
                except openai.InternalServerError:
                    done = batch
                if done.status == "completed":
                    break
                await asyncio.sleep(0.05)
    answers = await one.answers(done.output_file_id)
    assert Counter(each["custom_id"] for each in answers) == Counter(f"c{n}" for n in range(100))
    assert len(one.generator.requests) == 100, "what was computed is kept meanwhile"

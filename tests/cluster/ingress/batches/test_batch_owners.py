"""Whose files and batches are whose, and how many of them there may be."""

import io
from pathlib import Path

import openai
import pytest
from pydantic import SecretStr

from cluster.ingress.batches import batch_routes
from cluster.ingress.tenants.access import Rules, TenantRules
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.batches.test_batches import CLASSES, Server, line, quickly

__all__ = ["quickly"]


async def test_keys_without_a_tenant_have_files_and_batches_of_their_own(tmp_path: Path) -> None:
    keys = TenantRules((SecretStr("k"), SecretStr("other inference")))
    acme = TenantRules((SecretStr("acme-1"), SecretStr("acme-2")))
    rules = Rules(CLASSES, {"": keys, "acme": acme})
    own, other, one, two = (
        Server(tmp_path, FakeGenerator(), rules, key) for key in ("k", "other", "acme-1", "acme-2")
    )
    async with own.running():
        batch = await own.ended((await own.submit([line(1)])).id)
    assert batch.status == "completed"
    assert batch.output_file_id is not None
    for file_id in (batch.input_file_id, batch.output_file_id):
        await own.client.files.content(file_id)
        with pytest.raises(openai.NotFoundError):
            await other.client.files.content(file_id)
        with pytest.raises(openai.NotFoundError):
            await other.client.files.delete(file_id)
    with pytest.raises(openai.NotFoundError):
        await other.client.batches.retrieve(batch.id)
    assert (await other.client.files.list()).data == []
    assert (await other.client.batches.list()).data == []
    restarted = Server(tmp_path, FakeGenerator(), rules)
    assert (await restarted.client.batches.retrieve(batch.id)).id == batch.id
    uploaded = await one.client.files.create(file=io.BytesIO(b"{}"), purpose="batch")
    assert [file.id for file in (await two.client.files.list()).data] == [uploaded.id], (
        "a tenant shares its own"
    )
    stored = await own.store.get(batch.input_file_id)
    assert stored is not None
    assert stored.owner not in ("", "k")


async def test_files_from_before_keys_had_their_own_stay_seen_by_keys_without_a_tenant(
    tmp_path: Path,
) -> None:
    before = Server(tmp_path, FakeGenerator())
    file = await before.client.files.create(file=io.BytesIO(b"{}"), purpose="batch")
    rules = Rules(CLASSES, {"": TenantRules((SecretStr("k"),)), "acme": TenantRules((SecretStr("acme"),))})
    now, tenant = Server(tmp_path, FakeGenerator(), rules), Server(tmp_path, FakeGenerator(), rules, "acme")
    assert (await now.client.files.retrieve(file.id)).id == file.id
    with pytest.raises(openai.NotFoundError):
        await tenant.client.files.retrieve(file.id)
    await now.client.files.delete(file.id)


async def test_so_many_batches_wait_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_routes, "MAX_UNFINISHED", 2)
    server = Server(tmp_path, FakeGenerator())
    first = await server.submit([line(1)])
    await server.submit([line(2)])
    with pytest.raises(openai.RateLimitError, match="2 batches wait or run already"):
        await server.submit([line(3)])
    async with server.running():
        await server.ended(first.id)
    await server.submit([line(4)])


async def test_many_small_files_take_room_too(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeGenerator(), room=5 * 4096)

    async def upload() -> int:
        try:
            await server.client.files.create(file=io.BytesIO(b"x"), purpose="batch")
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    assert [await upload() for _ in range(6)] == [200] * 5 + [413]

"""The ledger of usage has what clients count, whatever is killed, on both databases."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from cluster.ingress.tenants import ledger as ledgers
from cluster.ingress.tenants.ledger import UsageLedger, journal_folder
from cluster.ingress.tenants.use_journal import UseJournal
from cluster.store import usage_statements
from cluster.store.sql_store import DOWN_S, SqlStore
from cluster.store.usage_port import DAY_S, UsageBatch, UsageCounts, UsageQuery, UsedBy
from core.errors import StoreUnavailable
from tests.patience import PATIENCE_S, until
from tests.postgres import running_postgres

MINUTE = 1_800_000_000
ONE = UsageCounts(num_requests=1, prompt_tokens=10, output_tokens=3)
WHO: dict[str, Any] = {"tenant": "a", "key_id": "key_1", "model": "m", "slo_class": "chat", "batch": False}


def used(minute: int = MINUTE, tenant: str = "a") -> UsedBy:
    return UsedBy(minute, tenant, "key_1", "m", "chat", False)


def everything(width_s: int = DAY_S) -> UsageQuery:
    return UsageQuery(0, 4_000_000_000, width_s)


async def total(store: SqlStore, width_s: int = DAY_S) -> UsageCounts:
    found = UsageCounts()
    for result in await store.usage(everything(width_s)):
        found += result.counts
    return found


@pytest.fixture(autouse=True)
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_statements, "MINUTES_KEPT_S", 1e10)


async def test_a_batch_that_is_sent_again_counts_once(store: SqlStore) -> None:
    batch = UsageBatch("w", 0, 2, {used(): ONE + ONE})
    assert await store.add_usage(batch) == 2
    assert await store.add_usage(batch) == 2
    assert await store.add_usage(UsageBatch("w", 1, 3, {used(): ONE})) == 2, "some of it is there"
    assert await store.add_usage(UsageBatch("w", 2, 3, {used(): ONE})) == 3
    assert await store.add_usage(UsageBatch("another", 0, 1, {used(): ONE})) == 1
    assert await store.usage_upto("w") == 3
    assert (await total(store)).num_requests == (await total(store, 60)).num_requests == 4


async def test_usage_is_found_by_time_and_by_whose_it_is(store: SqlStore) -> None:
    minutes = [
        used(MINUTE - MINUTE % DAY_S + offset, tenant) for offset in (0, 60, 3600, DAY_S) for tenant in "ab"
    ]
    await store.add_usage(UsageBatch("w", 0, len(minutes), dict.fromkeys(minutes, ONE)))
    day = MINUTE - MINUTE % DAY_S
    for width_s, starts in ((60, (0, 60, 3600)), (3600, (0, 3600)), (DAY_S, (0,))):
        found = await store.usage(UsageQuery(day, day + DAY_S, width_s))
        assert [each.start - day for each in found] == [*starts]
        assert sum(each.counts.prompt_tokens for each in found) == 60
    by = await store.usage(
        UsageQuery(day, day + DAY_S, DAY_S, ("tenant", "batch"), {"key_id": ["key_1"], "batch": [False]})
    )
    assert [(each.by, each.counts.num_requests) for each in by] == [
        ({"tenant": "a", "batch": False}, 3),
        ({"tenant": "b", "batch": False}, 3),
    ]
    assert not await store.usage(UsageQuery(day, day + DAY_S, DAY_S, (), {"model": ["another"]}))


async def test_the_ledger_opens_its_database_before_there_is_anything_to_write() -> None:
    """Not behind the first request: a process that opens one answers slower."""
    store = AsyncMock(SqlStore)
    store.usage_upto.side_effect = StoreUnavailable("down")
    await asyncio.wait_for(UsageLedger(store, None).follow_the_dead(), PATIENCE_S)
    store.usage_upto.assert_awaited_once()


async def test_the_ledger_has_what_the_clients_of_killed_ingresses_have_counted(
    url: str, store: SqlStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "LOOK_S", 0.01)
    folder, counted = tmp_path / "uses", Counter[str]()
    await store.usage_upto("nobody")

    def killed(seed: int) -> Counter[str]:
        ended = subprocess.run(
            [*arguments, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=PATIENCE_S
        )
        assert ended.returncode == -9
        return Counter(json.loads(ended.stdout))

    arguments = [sys.executable, "-m", "tests.cluster.store.usage_process", url, str(folder), "30"]
    # Two that are alive look for what the dead have left, at once.
    looking = [asyncio.create_task(UsageLedger(store, folder).follow_the_dead()) for _ in range(2)]
    for said in await asyncio.gather(*(asyncio.to_thread(killed, seed) for seed in range(2))):
        counted.update(said)
    await until(lambda: not list(folder.iterdir()))
    for task in looking:
        task.cancel()
    found = await total(store)
    assert counted["requests"] == 60
    assert found.num_requests == counted["requests"]
    assert (found.prompt_tokens, found.output_tokens) == (counted["prompt"], counted["output"])


async def test_what_a_database_does_not_take_while_it_restarts_is_in_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "FLUSH_S", 0.005)
    with running_postgres() as server:
        url = server.new_database()
        store = SqlStore(lambda: url, PATIENCE_S)
        ledger = UsageLedger(store, tmp_path)
        for round_ in range(3):
            for _ in range(50):
                ledger.note(ONE, **WHO)
                await asyncio.sleep(0.002)
            if round_ < 2:
                server.stop(9)
                ledger.note(ONE, **WHO)
                await until(lambda: not store.is_up)
                await asyncio.to_thread(server.start)
        await asyncio.sleep(DOWN_S)
        await ledger.close()
        assert (await total(store)).num_requests == 152
        assert not os.listdir(tmp_path), "nothing is left to write"
        store.close()


def test_an_entry_that_was_half_written_when_its_writer_was_killed_does_not_count(tmp_path: Path) -> None:
    async def left() -> int:
        store = SqlStore()
        task = asyncio.create_task(UsageLedger(store, tmp_path).follow_the_dead())
        await until(lambda: not list(tmp_path.iterdir()))
        task.cancel()
        return (await total(store)).num_requests

    journal = UseJournal(tmp_path / "own")
    journal.write((used(), ONE))
    journal.write((used(), ONE))
    (file,) = (tmp_path / "own").iterdir()
    whole = file.read_bytes()
    journal.close()
    (tmp_path / "own").rmdir()
    (tmp_path / "dead.uses").write_bytes(whole[:-5])
    assert asyncio.run(left()) == 1


def test_ingresses_of_one_database_have_one_folder_whatever_the_password_is() -> None:
    one, two = (journal_folder("", f"postgresql://baton:{word}@db/x") for word in ("p", "q"))
    assert one == two != journal_folder("", "postgresql://db/y")
    first, second = (journal_folder("", f"postgresql:///x?host=/run/{name}") for name in ("a", "b"))
    assert first != second, "two servers that listen on sockets"
    assert journal_folder("", "sqlite:////a/b.db") == Path("/a/b.db-usage")
    assert journal_folder("/n", "sqlite:////a/b.db") == Path("/n")
    assert journal_folder("/n", None) is None

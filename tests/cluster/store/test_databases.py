"""Databases that hang, restart, are of another release, or fill up: who needs them is told in time, and nothing is lost."""

import asyncio
import logging
import os
import stat
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from cluster.store import migrate as migrations
from cluster.store.sql_database import SqlDatabase
from cluster.store.sql_engine import file_system_of
from cluster.store.sql_store import DOWN_S, SqlStore
from cluster.store.sql_tables import metadata
from cluster.store.store_port import StoreRecord
from core.errors import Bug, StoreUnavailable
from tests.cluster.store import writing_process
from tests.cluster.store.conftest import OpenStore
from tests.postgres import Postgres, running_postgres

NOTE = StoreRecord(id="x", kind="note", body=b"1")


@pytest.fixture
def own_server():
    """One that a test may stop."""
    with running_postgres() as server:
        yield server


async def test_a_database_that_hangs_costs_a_deadline_and_then_nothing_for_a_while(
    own_server: Postgres,
) -> None:
    with closing(SqlStore(own_server.url, timeout_s=0.5)) as store:
        async with asyncio.timeout(60.0):
            while True:
                try:
                    await store.put([NOTE])
                    break
                except StoreUnavailable:  # opening it may take longer than the deadline
                    await asyncio.sleep(DOWN_S)
        own_server.hang()
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        calls = [store.get("x") for _ in range(50)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        waited_s = loop.time() - began_at
        assert {type(each) for each in outcomes} == {StoreUnavailable}
        assert "has not answered within 0.5 s" in str(outcomes[0])
        assert waited_s < 20.0, "they wait together, however many there are"
        assert any([await _fails_within(store, 0.4) for _ in range(20)]), "what follows does not wait"
        own_server.wake()
        async with asyncio.timeout(60.0):
            while not await _answers(store):
                await asyncio.sleep(0.05)


async def _fails_within(store: SqlStore, wait_s: float) -> bool:
    try:
        async with asyncio.timeout(wait_s):
            await store.get("x")
    except (StoreUnavailable, TimeoutError) as error:
        return isinstance(error, StoreUnavailable)
    return False


async def _answers(store: SqlStore) -> bool:
    try:
        return (await store.get("x")) is not None
    except StoreUnavailable:
        return False


async def test_nothing_that_was_stored_is_lost_where_a_database_is_killed_under_load(
    own_server: Postgres,
) -> None:
    with closing(SqlStore(own_server.url, timeout_s=20.0)) as store:
        await store.put([NOTE])
        stored: set[str] = set()
        is_over = False

        async def write(worker: int) -> None:
            number = 0
            while not is_over:
                number += 1
                name = f"{worker}.{number}"
                try:
                    await store.put([StoreRecord(id=name, kind="note", body=b"1")])
                    stored.add(name)
                except StoreUnavailable:
                    await asyncio.sleep(0.05)

        writing = [asyncio.create_task(write(worker)) for worker in range(4)]
        for how in ("crash", "stop"):
            before = len(stored)
            while len(stored) < before + 20:
                await asyncio.sleep(0.01)
            own_server.stop(*([] if how == "stop" else [9]))
            while store.is_up:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(own_server.start)
        before = len(stored)
        while len(stored) < before + 20:
            await asyncio.sleep(0.01)
        is_over = True
        await asyncio.gather(*writing)
        assert stored <= {record.id for record in await store.find("note")}


def test_the_migrations_lead_to_the_tables_as_they_are(url: str) -> None:
    with closing(SqlDatabase(lambda: url, 20.0)) as database:
        context = database.transact(
            lambda connection: compare_metadata(MigrationContext.configure(connection), metadata)
        )
    assert context == []


def test_the_latest_migration_is_the_one_that_processes_look_for(url: str) -> None:
    with closing(SqlDatabase(lambda: url, 20.0)) as database:
        found = database.transact(
            lambda connection: MigrationContext.configure(connection).get_current_revision()
        )
    assert found == migrations.HEAD


async def test_a_later_releases_database_is_refused_in_words(url: str, opened: OpenStore) -> None:
    await opened().put([NOTE])
    with closing(SqlDatabase(lambda: url, 20.0)) as database:
        database.transact(
            lambda connection: connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        )
    with pytest.raises(StoreUnavailable, match="schema 9999, and this release knows up to"):
        await opened().get("x")


async def test_processes_that_start_at_once_make_the_tables_once(opened: OpenStore) -> None:
    stores = [opened() for _ in range(4)]
    await asyncio.gather(
        *(store.put([StoreRecord(id=f"{n}", kind="note")]) for n, store in enumerate(stores))
    )
    assert len(await stores[0].find("note")) == 4


async def test_processes_that_write_at_once_lose_nothing_and_do_nothing_twice(
    url: str, opened: OpenStore
) -> None:
    store, num = opened(), 15
    await store.put(
        [StoreRecord(id="counter", kind="counter", body=b"0"), StoreRecord(id="file", kind="file", body=b"0")]
    )
    names = ("one", "two", "three")
    made = [
        await asyncio.create_subprocess_exec(sys.executable, writing_process.__file__, url, name, str(num))
        for name in names
    ]
    assert [await process.wait() for process in made] == [0, 0, 0]
    counter = await store.get("counter")
    assert counter is not None
    assert int(counter.body) == num * len(names)
    lines = await store.children("file", 0, 1000)
    assert [line.position for line in lines] == list(range(num * len(names)))
    assert Counter(line.body.decode() for line in lines) == dict.fromkeys(names, num)
    assert sum(note.num_bytes for note in await store.find("note")) == 50


async def test_only_its_owner_reads_a_sqlite_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "store.db"
    with closing(SqlStore(lambda: f"sqlite:///{path}", 20.0)) as store:
        await store.put([NOTE])
        modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_no_password_is_logged_or_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    url = f"postgresql://baton:geheim@/x?host={tmp_path}"
    caplog.set_level(logging.DEBUG)
    with closing(SqlStore(lambda: url, 5.0)) as store, pytest.raises(StoreUnavailable) as refused:
        await store.get("x")
    assert "geheim" not in caplog.text + str(refused.value) + repr(refused.value)
    assert caplog.text.count("does not answer") == 1


async def test_what_a_client_has_written_stands_in_no_error(postgres: Postgres) -> None:
    url = postgres.new_database()
    with closing(SqlStore(lambda: url, 20.0)) as store:
        with pytest.raises(Bug) as refused:
            await store.put([StoreRecord(id="secret\0", kind="note", body=b"secret")])
        assert "secret" not in str(refused.value)
        assert store.is_up, "what one client sends takes the store from nobody else"


def test_the_file_system_of_a_folder_is_known() -> None:
    assert file_system_of(Path("/proc")) == "proc"
    assert file_system_of(Path(os.devnull).parent) != ""

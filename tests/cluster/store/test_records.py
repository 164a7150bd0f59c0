"""What the store promises, on both databases."""

import asyncio
from dataclasses import replace

import pytest

from cluster.store.sql_store import SqlStore
from cluster.store.store_port import Bound, Held, LeaseLost, NoRoom, StoreRecord
from tests.cluster.store.conftest import OpenStore

ROOM = Bound(kind="note", owner="a", num_bytes=30, makes_room=True)


def note(record_id: str, owner: str = "a", num_bytes: int = 10) -> StoreRecord:
    return StoreRecord(
        id=record_id, kind="note", owner=owner, body=b"\x00\xff" + record_id.encode(), num_bytes=num_bytes
    )


async def ids(store: SqlStore) -> set[str]:
    return {record.id for record in await store.find("note")}


async def test_a_record_is_read_as_it_was_written_by_any_process_and_after_a_restart(
    opened: OpenStore,
) -> None:
    first, second = opened(), opened()
    await first.put([replace(note("x"), state="open", position=7)])
    found = await second.get("x")
    assert found == replace(note("x"), state="open", position=7, version=1)
    first.close()
    second.close()
    assert await opened().get("x") == found
    assert await opened().get("y") is None


async def test_records_are_found_by_kind_owner_state_and_id_the_newest_first(store: SqlStore) -> None:
    await store.put(
        [note("1"), note("2", "b"), replace(note("3"), state="open"), replace(note("4"), kind="other")]
    )
    assert [each.id for each in await store.find("note")] == ["3", "2", "1"]
    assert [each.id for each in await store.find("note", owners=("a", "c"))] == ["3", "1"]
    assert [each.id for each in await store.find("note", owners=("a",), state="open")] == ["3"]
    assert [each.id for each in await store.find("note", ids=("1", "2", "none"))] == ["2", "1"]
    await store.put([replace(note("1"), body=b"again")])
    assert [each.id for each in await store.find("note")] == ["3", "2", "1"], "a later write makes none newer"


async def test_a_record_that_somebody_else_has_changed_is_not_replaced(opened: OpenStore) -> None:
    one, other = opened(), opened()
    await one.put([note("x")])
    read = await one.get("x")
    assert read is not None
    assert await other.replace(replace(read, body=b"other"))
    assert not await one.replace(replace(read, body=b"one"))
    found = await one.get("x")
    assert found is not None
    assert found.body == b"other"
    await other.delete("x")
    assert not await one.replace(found)


async def test_the_least_recently_used_of_an_owner_make_room(store: SqlStore) -> None:
    for name in ("1", "2", "3"):
        await store.put([note(name)], bound=ROOM)
    await store.put([note("b", "b", num_bytes=1000)], bound=replace(ROOM, owner="b", num_bytes=1000))
    await store.get("1", touch=True)
    await store.put([note("4")], bound=ROOM)
    assert await ids(store) == {"1", "3", "4", "b"}
    await store.put([note("5", num_bytes=30)], bound=ROOM)
    assert await ids(store) == {"5", "b"}


async def test_where_nothing_makes_room_nothing_is_written(store: SqlStore) -> None:
    full = Bound(kind="note", num_bytes=20, makes_room=False)
    await store.put([note("1"), note("2", "b")], bound=full)
    with pytest.raises(NoRoom):
        await store.put([note("3")], bound=full)
    assert await ids(store) == {"1", "2"}


async def test_writes_at_once_have_no_more_room_than_one(opened: OpenStore) -> None:
    full = Bound(kind="note", num_bytes=20, makes_room=False)
    stores = [opened() for _ in range(3)]
    writes = [store.put([note(f"{n}")], bound=full) for n, store in enumerate(stores * 3)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert sum(outcome is None for outcome in outcomes) == 2
    assert all(isinstance(outcome, NoRoom) for outcome in outcomes if outcome is not None)


async def test_what_has_expired_is_there_no_more_and_leaves_with_the_next_write(store: SqlStore) -> None:
    await store.put([replace(note("old"), lives_s=-1.0), replace(note("new"), lives_s=100.0)])
    assert await store.get("old") is None
    assert await ids(store) == {"new"}
    await store.put([note("1")], bound=replace(ROOM, num_bytes=20))
    assert await ids(store) == {"new", "1"}, "what has expired takes no room"


async def test_children_are_read_from_where_they_are_wanted_and_deleted_with_their_parent(
    store: SqlStore,
) -> None:
    pieces = [
        StoreRecord(id=f"f/{at}", kind="piece", parent="f", position=at, body=b"x" * 10)
        for at in (0, 10, 20, 30)
    ]
    await store.put([note("f"), *pieces])
    assert [each.position for each in await store.children("f", 0, 100)] == [0, 10, 20, 30]
    assert [each.position for each in await store.children("f", 15, 10)] == [10, 20]
    assert [each.position for each in await store.children("f", 20, 1)] == [20]
    await store.delete("f")
    assert await store.children("f", 0, 100) == []
    assert await store.get("f/0") is None
    with pytest.raises(LeaseLost):
        await store.put(pieces[:1])


async def test_one_holder_has_a_record_until_its_lease_ends(opened: OpenStore) -> None:
    one, other = opened(), opened()
    await one.put([note("x")])
    claimed = await one.claim("x", "one", 1000.0)
    assert claimed is not None
    assert claimed.is_held
    assert await other.claim("x", "other", 1000.0) is None
    assert await one.renew(["x", "gone"], "one", -1.0) == {"x"}
    seen = await other.get("x")
    assert seen is not None
    assert not seen.is_held
    await one.put([note("x")], held=Held("x", "one"))
    assert await other.claim("x", "other", 1000.0) is not None
    assert await one.renew(["x"], "one", 1000.0) == frozenset()
    for write in (one.put([note("y")], held=Held("x", "one")), one.replace(seen, held=Held("x", "one"))):
        with pytest.raises(LeaseLost):
            await write
    assert await ids(one) == {"x"}
    await one.release("x", "one")
    assert await one.claim("x", "one", 1.0) is None
    await other.release("x", "other")
    assert await one.claim("x", "one", 1.0) is not None


async def test_a_record_may_be_claimed_as_it_is_written_and_taken_over_by_whoever_ends_it(
    store: SqlStore,
) -> None:
    await store.put([replace(note("x"), holder="one", lease_s=100.0)])
    found = await store.get("x")
    assert found is not None
    assert found.is_held
    assert await store.replace(replace(found, holder="other", lease_s=0.0))
    with pytest.raises(LeaseLost):
        await store.put([note("x")], held=Held("x", "one"))


async def test_of_many_that_claim_at_once_one_has_it(opened: OpenStore) -> None:
    stores = [opened() for _ in range(3)]
    await stores[0].put([note("x")])
    claims = [store.claim("x", f"{n}", 100.0) for n, store in enumerate(stores * 4)]
    assert sum(each is not None for each in await asyncio.gather(*claims)) == 1


async def test_a_store_without_a_database_is_one_processs_own() -> None:
    store = SqlStore()
    await store.put([note("x")])
    assert await store.get("x") is not None
    assert await SqlStore().get("x") is None
    store.close()

"""What the store does, as statements on a connection: SQL that SQLite and PostgreSQL both speak. Each function blocks."""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from cluster.store.sql_tables import records
from cluster.store.store_port import Bound, Held, LeaseLost, NoRoom, StoreRecord

_SWEPT_AT_ONCE = 100
_READ = (
    records.c.id, records.c.kind, records.c.owner, records.c.body, records.c.state, records.c.parent,
    records.c.position, records.c.num_bytes, records.c.version,
)  # fmt: skip


def put(
    connection: sa.Connection, written: Sequence[StoreRecord], held: Held | None, bound: Bound | None
) -> None:
    """Raises LeaseLost and NoRoom, after which the transaction must be rolled back."""
    with _conditions(connection, held, bound):
        _delete(
            connection,
            sa.select(records.c.id).where(records.c.expires_at <= _now(connection)).limit(_SWEPT_AT_ONCE),
        )
        for record in written:
            connection.execute(_upsert(connection, record))


def replace(connection: sa.Connection, record: StoreRecord, held: Held | None, bound: Bound | None) -> bool:
    """Raises LeaseLost and NoRoom, after which the transaction must be rolled back."""
    with _conditions(connection, held, bound):
        is_unchanged = (records.c.id == record.id) & (records.c.version == record.version)
        changed = sa.update(records).where(is_unchanged)
        changed = changed.values(version=records.c.version + 1, **_values(connection, record))
        return connection.execute(changed).rowcount == 1


def get(connection: sa.Connection, record_id: str) -> StoreRecord | None:
    return next(iter(_read(connection, records.c.id == record_id)), None)


def touch(connection: sa.Connection, record_id: str) -> None:
    connection.execute(
        sa.update(records).where(records.c.id == record_id).values(touched_at=_now(connection))
    )


def find(
    connection: sa.Connection, kind: str, wanted: Mapping[str, Sequence[str] | None]
) -> list[StoreRecord]:
    """`wanted`: by column, the values of which it has one; None: it has any."""
    found = records.c.kind == kind
    for column, values in wanted.items():
        if values is not None:
            found &= records.c[column].in_(values)
    return _read(connection, found, records.c.created_at.desc(), records.c.id.desc())


def children(connection: sa.Connection, parent: str, position: int, num_positions: int) -> list[StoreRecord]:
    is_child = records.c.parent == parent
    first = sa.select(sa.func.max(records.c.position)).where(is_child & (records.c.position <= position))
    wanted = is_child & (records.c.position >= sa.func.coalesce(first.scalar_subquery(), 0))
    wanted &= records.c.position < position + num_positions
    return _read(connection, wanted, records.c.position)


def delete(connection: sa.Connection, record_id: str) -> None:
    connection.execute(sa.delete(records).where(records.c.id == record_id))


def claim(connection: sa.Connection, record_id: str, holder: str, lease_s: float) -> StoreRecord | None:
    now = _now(connection)
    is_free = (records.c.lease_until <= now) | (records.c.holder == holder)
    claimed = sa.update(records).where((records.c.id == record_id) & is_free)
    claimed = claimed.values(holder=holder, lease_until=now + lease_s)
    return get(connection, record_id) if connection.execute(claimed).rowcount else None


def renew(connection: sa.Connection, ids: Sequence[str], holder: str, lease_s: float) -> frozenset[str]:
    own = records.c.id.in_(ids) & (records.c.holder == holder)
    connection.execute(sa.update(records).where(own).values(lease_until=_now(connection) + lease_s))
    return frozenset(connection.execute(sa.select(records.c.id).where(own)).scalars())


def release(connection: sa.Connection, record_id: str, holder: str) -> None:
    own = (records.c.id == record_id) & (records.c.holder == holder)
    connection.execute(sa.update(records).where(own).values(holder="", lease_until=0.0))


def _now(connection: sa.Connection) -> sa.ColumnElement[float]:
    """Return the database's clock. SQLite's is this host's."""
    if connection.dialect.name == "postgresql":
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double)
    return sa.literal(time.time(), sa.Double)


def _read(
    connection: sa.Connection, which: sa.ColumnElement[bool], *order: sa.ColumnElement[Any]
) -> list[StoreRecord]:
    now = _now(connection)
    exists = records.c.expires_at.is_(None) | (records.c.expires_at > now)
    is_held = (records.c.lease_until > now).label("is_held")
    rows = connection.execute(sa.select(*_READ, is_held).where(which & exists).order_by(*order)).mappings()
    found: list[Any] = [dict(row) for row in rows]
    return [
        StoreRecord(**row | {"body": bytes(row["body"]), "is_held": bool(row["is_held"])}) for row in found
    ]


def _values(connection: sa.Connection, record: StoreRecord) -> dict[str, Any]:
    now = _now(connection)
    held = {"holder": record.holder, "lease_until": now + record.lease_s} if record.holder else {}
    return {
        "kind": record.kind,
        "owner": record.owner,
        "state": record.state,
        "parent": record.parent,
        "position": record.position,
        "body": record.body,
        "num_bytes": record.num_bytes,
        "touched_at": now,
        "expires_at": sa.null() if record.lives_s is None else now + record.lives_s,
        **held,
    }


def _upsert(connection: sa.Connection, record: StoreRecord) -> Any:
    values = _values(connection, record)
    first = {
        "id": record.id,
        "version": 1,
        "created_at": values["touched_at"],
        "holder": "",
        "lease_until": 0.0,
    }
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    new = insert(records).values(**first | values)
    return new.on_conflict_do_update(index_elements=["id"], set_=values | {"version": records.c.version + 1})


@contextmanager
def _conditions(connection: sa.Connection, held: Held | None, bound: Bound | None) -> Generator[None]:
    """Check before a write that its lease is held, and after it that its bound is kept."""
    _check_held(connection, held)
    if bound is not None:
        _one_at_a_time(connection, bound)
    yield
    if bound is not None:
        _enforce(connection, bound)


def _check_held(connection: sa.Connection, held: Held | None) -> None:
    """Keep others from claiming the record until the transaction ends. Raises LeaseLost."""
    if held is None:
        return
    own = (records.c.id == held.id) & (records.c.holder == held.holder)
    if connection.execute(sa.select(records.c.id).where(own).with_for_update(read=True)).first() is None:
        raise LeaseLost(f"{held.id} is held by somebody else, or was deleted")


def _one_at_a_time(connection: sa.Connection, bound: Bound) -> None:
    """Have writes under the same bound wait for each other, as all of SQLite's do."""
    if connection.dialect.name == "postgresql":
        name = sa.func.hashtextextended(f"{bound.kind} {bound.owner or ''}", 0)
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(name)))


def _enforce(connection: sa.Connection, bound: Bound) -> None:
    counted = records.c.kind == bound.kind
    if bound.owner is not None:
        counted &= records.c.owner == bound.owner
    total = connection.execute(
        sa.select(sa.func.coalesce(sa.func.sum(records.c.num_bytes), 0)).where(counted)
    )
    if total.scalar_one() <= bound.num_bytes:
        return
    if not bound.makes_room:
        raise NoRoom(f"the records of kind {bound.kind!r} would have more than {bound.num_bytes} bytes")
    latest_first = (records.c.touched_at.desc(), records.c.id.desc())
    upto = sa.func.sum(records.c.num_bytes).over(order_by=latest_first).label("upto")
    summed = sa.select(records.c.id, upto).where(counted).subquery()
    too_many = sa.select(summed.c.id).where(summed.c.upto > bound.num_bytes)
    _delete(connection, sa.select(records.c.id).where(records.c.id.in_(too_many)))


def _delete(connection: sa.Connection, ids: sa.Select[Any]) -> None:
    """Delete records, but for those that somebody else deletes or writes just now."""
    unlocked = ids.with_for_update(skip_locked=True)
    connection.execute(sa.delete(records).where(records.c.id.in_(unlocked)))

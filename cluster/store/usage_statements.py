"""What the ledger of usage does, as statements on a connection. Each function blocks."""

import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from cluster.store.sql_tables import usage, usage_writers
from cluster.store.usage_port import (
    DAY_S,
    MINUTE_S,
    UsageBatch,
    UsageCounts,
    UsageQuery,
    UsageResult,
    UsedBy,
)

MINUTES_KEPT_S = 35 * DAY_S
_WRITERS_KEPT_S = 400 * DAY_S
_COUNTS = tuple(field.name for field in fields(UsageCounts))
_KEY = ("span_s", *(field.name for field in fields(UsedBy)))


def add(connection: sa.Connection, batch: UsageBatch) -> int:
    """Return the number up to which the writer's entries are in now."""
    connection.execute(
        _insert(connection, usage_writers, writer=batch.writer, upto=0, touched_at=time.time())
    )
    own = usage_writers.c.writer == batch.writer
    upto = connection.execute(sa.select(usage_writers.c.upto).where(own).with_for_update()).scalar_one()
    if upto != batch.first:
        return upto
    # In one order, so that two transactions do not wait for each other.
    for span_s, used in ((MINUTE_S, batch.used), (DAY_S, _by_day(batch.used))):
        for by in sorted(used, key=lambda by: tuple(asdict(by).values())):
            connection.execute(_adding(connection, span_s, by, used[by]))
    connection.execute(sa.update(usage_writers).where(own).values(upto=batch.after, touched_at=time.time()))
    _sweep(connection)
    return batch.after


def upto(connection: sa.Connection, writer: str) -> int:
    found = connection.execute(
        sa.select(usage_writers.c.upto).where(usage_writers.c.writer == writer)
    ).scalar()
    return found or 0


def results(connection: sa.Connection, query: UsageQuery) -> list[UsageResult]:
    span_s = DAY_S if query.width_s % DAY_S == 0 else MINUTE_S
    # As text: PostgreSQL takes two parameters of the same value for different expressions.
    start = (usage.c.start - usage.c.start % sa.literal_column(str(int(query.width_s)))).label("bucket")
    dimensions = [usage.c[name] for name in query.group_by]
    counted = (usage.c.span_s == span_s) & (usage.c.start >= query.begin) & (usage.c.start < query.end)
    for name, values in (query.only or {}).items():
        counted &= usage.c[name].in_(list(values))
    sums = [sa.func.sum(usage.c[name]).label(name) for name in _COUNTS]
    wanted = sa.select(start, *dimensions, *sums).where(counted)
    wanted = wanted.group_by(start, *dimensions).order_by(start, *dimensions)
    return [_result(row, query) for row in connection.execute(wanted).mappings()]


def _result(row: Mapping[Any, Any], query: UsageQuery) -> UsageResult:
    counts = {name: float(row[name]) if name == "sequence_s" else int(row[name]) for name in _COUNTS}
    by = {name: bool(row[name]) if name == "batch" else str(row[name]) for name in query.group_by}
    return UsageResult(int(row["bucket"]), by, UsageCounts(**counts))  # pyright: ignore[reportArgumentType]


def _by_day(used: Mapping[UsedBy, UsageCounts]) -> dict[UsedBy, UsageCounts]:
    found: dict[UsedBy, UsageCounts] = {}
    for by, counts in used.items():
        day = replace(by, start=by.start - by.start % DAY_S)
        found[day] = found.get(day, UsageCounts()) + counts
    return found


def _adding(connection: sa.Connection, span_s: int, by: UsedBy, counts: UsageCounts) -> Any:
    new = _insert_of(connection)(usage).values(span_s=span_s, **asdict(by), **asdict(counts))
    more = {name: usage.c[name] + new.excluded[name] for name in _COUNTS}
    return new.on_conflict_do_update(index_elements=list(_KEY), set_=more)


def _insert(connection: sa.Connection, table: sa.Table, **values: Any) -> Any:
    return _insert_of(connection)(table).values(**values).on_conflict_do_nothing()


def _insert_of(connection: sa.Connection) -> Any:
    return postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert


def _sweep(connection: sa.Connection) -> None:
    """Delete minutes that their days have outlived, and writers that ended long ago."""
    now = time.time()
    old = (usage.c.span_s == MINUTE_S) & (usage.c.start < now - MINUTES_KEPT_S)
    connection.execute(sa.delete(usage).where(old))
    connection.execute(sa.delete(usage_writers).where(usage_writers.c.touched_at < now - _WRITERS_KEPT_S))

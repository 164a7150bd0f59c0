"""A database and its transactions, with the errors of its drivers as the store's. Every method blocks."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy import exc

from cluster.store.migrate import create, migrate
from cluster.store.sql_engine import READS, make_engine, memory_engine
from cluster.store.store_port import LeaseLost
from core.config.store_url import sqlite_path
from core.errors import Bug, StoreUnavailable
from core.whole_files import is_full

T = TypeVar("T")
_FULL = ("53100", "database or disk is full")
_CONFLICTS = ("40001", "40P01")
"""PostgreSQL's codes of transactions that may be run again."""
_TRIES = 3
RESERVED_BYTES = 32 << 20
"""What records leave of SQLite's disk: with less, neither a deletion nor a checkpoint of its journal may succeed."""


class SqlDatabase:
    def __init__(self, read_url: Callable[[], str] | None, timeout_s: float) -> None:
        """Open it and bring its schema up to date. Raises StoreUnavailable, ConfigError and OSError."""
        try:
            self._engine = memory_engine() if read_url is None else make_engine(read_url, timeout_s)
            path = None if read_url is None else sqlite_path(read_url())
            self._folder = None if path is None else path.parent
        except OSError as error:
            raise error if is_full(error) else StoreUnavailable(str(error)) from None
        try:
            self.transact(create if read_url is None else migrate)
        except BaseException:
            self._engine.dispose()
            raise

    def transact(self, work: Callable[[sa.Connection], T], *, reads: bool = False, grows: bool = False) -> T:
        """Return what `work` returns, in a transaction that is rolled back where it raises. `reads`: it writes nothing. `grows`:
        it adds records. Raises StoreUnavailable, OSError where the disk is full, and LeaseLost where a record's parent is
        deleted."""
        if grows and self._folder is not None:
            self._check_room(self._folder)
        for num_left in reversed(range(_TRIES)):
            try:
                with (
                    self._engine.connect().execution_options(**{READS: reads}) as connection,
                    connection.begin(),
                ):
                    return work(connection)
            except exc.DBAPIError as error:
                if not (num_left and _code(error) in _CONFLICTS):
                    raise _translated(error) from None
            except exc.TimeoutError:
                raise StoreUnavailable("all connections are in use") from None
        raise AssertionError

    def _check_room(self, folder: Path) -> None:
        """Raise OSError where SQLite's disk, and what is free within its file, have too little room."""
        if (left := RESERVED_BYTES - shutil.disk_usage(folder).free) <= 0:
            return
        with self._engine.connect() as connection:
            free, size = (
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("freelist_count", "page_size")
            )
        if free * size < left:
            raise OSError(errno.ENOSPC, "the database's disk is full")

    def close(self) -> None:
        self._engine.dispose()


def _code(error: exc.DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or str(error.orig)


def _translated(error: exc.DBAPIError) -> Exception:
    """Return the error without statement and values, which are clients'."""
    if _code(error) in _FULL:
        return OSError(errno.ENOSPC, "the database's disk is full")
    if isinstance(error, exc.IntegrityError):
        return LeaseLost("what the record belongs to was deleted")
    if isinstance(error, exc.DataError | exc.ProgrammingError):
        return Bug(f"the database refuses a statement: {type(error.orig).__name__}")
    first_line = str(error.orig).strip().partition("\n")[0]
    return StoreUnavailable(f"{type(error.orig).__name__}: {first_line}")

"""Connections to SQLite and to PostgreSQL, of which each waits for nothing longer than the store's timeout."""

import logging
import math
import os
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, pool

from core.config.store_url import sqlite_path

log = logging.getLogger(__name__)

NUM_CONNECTIONS = 4
_JOURNAL_BYTES = 8 << 20
"""What of SQLite's journal stays on the disk after a large write."""
READS = "baton_reads"
"""The option of a connection whose next transaction writes nothing."""
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.glusterfs", "lustre", "9p")


def memory_engine() -> sa.Engine:
    """Return a database that ends with the engine. One thread may use it."""
    return _sqlite_engine(partial(_connect_sqlite, ":memory:", "MEMORY", 0.0), pool.StaticPool)


def make_engine(read_url: Callable[[], str], timeout_s: float) -> sa.Engine:
    """`read_url` is called for each connection, so that a new password needs no restart."""
    path = sqlite_path(read_url())
    if path is None:
        return _postgres_engine(read_url, timeout_s)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(
        os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    )  # readable to its owner alone, as its journals then are
    journal = "WAL"
    if (kind := file_system_of(path.parent)) in _NETWORK:
        journal = "DELETE"
        log.warning(
            "serve.store: %s is on %s, on which SQLite is slow and as reliable as its locks: use PostgreSQL",
            path,
            kind,
        )
    return _sqlite_engine(partial(_connect_sqlite, str(path), journal, timeout_s), pool.QueuePool)


def file_system_of(folder: Path) -> str:
    """Return the type of the file system that a folder is on; empty where that is not known."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    folder = folder.resolve()
    holding = [(point, kind) for point, kind in mounts if folder.is_relative_to(point.replace("\\040", " "))]
    return max(holding, key=lambda each: len(each[0]), default=("", ""))[1]


def _sqlite_engine(connect: Callable[[], sqlite3.Connection], kind: type[pool.Pool]) -> sa.Engine:
    sized: dict[str, Any] = (
        {} if kind is pool.StaticPool else {"pool_size": NUM_CONNECTIONS, "max_overflow": 0}
    )
    engine = sa.create_engine("sqlite://", creator=connect, poolclass=kind, hide_parameters=True, **sized)

    def begin(connection: sa.Connection) -> None:
        # A transaction that first reads and then writes would fail where another one has written in between.
        reads = connection.get_execution_options().get(READS)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    event.listen(engine, "begin", begin)
    return engine


def _connect_sqlite(path: str, journal: str, timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    # A deletion must need little room itself: freed pages are neither moved nor overwritten, but used again.
    sized = f"journal_mode={journal}", f"journal_size_limit={_JOURNAL_BYTES}"
    for pragma in (*sized, "secure_delete=FAST", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _postgres_engine(read_url: Callable[[], str], timeout_s: float) -> sa.Engine:
    import psycopg  # noqa: PLC0415  # SQLite needs none

    milliseconds = max(1, int(1000 * timeout_s))

    def connect() -> Any:
        return psycopg.connect(
            read_url(),
            connect_timeout=max(2, math.ceil(timeout_s)),
            options=f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds}",
            tcp_user_timeout=milliseconds,
            application_name="baton",
            prepare_threshold=None,  # poolers that give each transaction another connection keep no statements
        )

    return sa.create_engine(
        "postgresql+psycopg://",
        creator=connect,
        pool_size=NUM_CONNECTIONS,
        max_overflow=0,
        pool_timeout=timeout_s,
        pool_pre_ping=True,
        hide_parameters=True,
    )

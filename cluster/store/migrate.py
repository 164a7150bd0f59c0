"""Brings a database's schema up to date. Processes that start at once do it one after the other."""

from pathlib import Path

import sqlalchemy as sa

from cluster.store.sql_tables import HEAD, metadata
from core.errors import ConfigError

_LOCK = 0x6261746F6E
"""The number of PostgreSQL's lock for it."""
_OLDER = frozenset({"0001"})
"""The migrations before the latest."""


def migrate(connection: sa.Connection) -> None:
    """Run the missing migrations in the connection's transaction. Raises ConfigError for a later release's schema."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    found = _version(connection)
    if found == HEAD:
        return
    if found is not None and found not in _OLDER:
        raise ConfigError(
            f"serve.store: the database has schema {found}, and this release knows up to {HEAD}: run the later release, or "
            "name another database"
        )
    _upgrade(connection)


def create(connection: sa.Connection) -> None:
    """Make the latest schema in an empty database that ends with the process."""
    metadata.create_all(connection)


def _version(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def _upgrade(connection: sa.Connection) -> None:
    from alembic import command  # noqa: PLC0415  # a database that is up to date needs none of it
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")

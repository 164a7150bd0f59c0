"""The one table of the store, as the latest migration leaves it."""

import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

HEAD = "0001"
"""The latest migration."""

metadata = sa.MetaData()

_ID: TypeEngine[str] = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_INSTANT = sa.Double()
"""Seconds since 1970."""

records = sa.Table(
    "baton_records",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("parent", _ID, sa.ForeignKey("baton_records.id", ondelete="CASCADE")),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("created_at", _INSTANT, nullable=False),
    sa.Column("touched_at", _INSTANT, nullable=False),
    sa.Column("expires_at", _INSTANT),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("lease_until", _INSTANT, nullable=False),
    sa.Index("baton_records_of_owner", "kind", "owner", "touched_at"),
    sa.Index("baton_records_in_state", "kind", "state"),
    sa.Index("baton_records_of_parent", "parent", "position"),
    sa.Index("baton_records_expiring", "expires_at"),
)

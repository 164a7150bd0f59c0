"""The tables of the store, as the latest migration leaves them."""

import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

HEAD = "0002"
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

usage = sa.Table(
    "baton_usage",
    metadata,
    sa.Column("span_s", sa.Integer, primary_key=True),
    sa.Column("start", sa.BigInteger, primary_key=True),
    sa.Column("tenant", _ID, primary_key=True),
    sa.Column("key_id", _ID, primary_key=True),
    sa.Column("model", _ID, primary_key=True),
    sa.Column("slo_class", _ID, primary_key=True),
    sa.Column("batch", sa.Boolean, primary_key=True),
    sa.Column("num_requests", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("output_tokens", sa.BigInteger, nullable=False),
    sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
    sa.Column("images", sa.BigInteger, nullable=False),
    sa.Column("sequence_s", sa.Double, nullable=False),
)
usage_writers = sa.Table(
    "baton_usage_writers",
    metadata,
    sa.Column("writer", _ID, primary_key=True),
    sa.Column("upto", sa.BigInteger, nullable=False),
    sa.Column("touched_at", _INSTANT, nullable=False),
)

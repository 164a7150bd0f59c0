"""The ledger of usage, and how far each of its writers has come."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    key = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "baton_usage",
        sa.Column("span_s", sa.Integer, primary_key=True),
        sa.Column("start", sa.BigInteger, primary_key=True),
        sa.Column("tenant", key, primary_key=True),
        sa.Column("key_id", key, primary_key=True),
        sa.Column("model", key, primary_key=True),
        sa.Column("slo_class", key, primary_key=True),
        sa.Column("batch", sa.Boolean, primary_key=True),
        sa.Column("num_requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
        sa.Column("images", sa.BigInteger, nullable=False),
        sa.Column("sequence_s", sa.Double, nullable=False),
    )
    op.create_table(
        "baton_usage_writers",
        sa.Column("writer", key, primary_key=True),
        sa.Column("upto", sa.BigInteger, nullable=False),
        sa.Column("touched_at", sa.Double, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("baton_usage_writers")
    op.drop_table("baton_usage")

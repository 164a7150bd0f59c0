"""The table of records."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None


def upgrade() -> None:
    key = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "baton_records",
        sa.Column("id", key, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("parent", key, sa.ForeignKey("baton_records.id", ondelete="CASCADE")),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("touched_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("lease_until", sa.Double, nullable=False),
    )
    for name, columns in (
        ("of_owner", ["kind", "owner", "touched_at"]),
        ("in_state", ["kind", "state"]),
        ("of_parent", ["parent", "position"]),
        ("expiring", ["expires_at"]),
    ):
        op.create_index(f"baton_records_{name}", "baton_records", columns)


def downgrade() -> None:
    op.drop_table("baton_records")

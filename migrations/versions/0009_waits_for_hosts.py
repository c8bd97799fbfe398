"""Add to the queue since when a study waits for hosts, and of which worker's cluster

Revision ID: 0009
Revises: 0008
Created: 2026-11-26
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

INDEX = "ix_queue_entries_waits_since"


def upgrade() -> None:
    """Add the columns, empty: whether a study of an older version waits for hosts of its cluster is unknown."""
    op.add_column("queue_entries", sa.Column("waits_since", sa.DateTime(timezone=True), nullable=True))
    op.add_column("queue_entries", sa.Column("asked_by", sa.Text(), nullable=True))
    op.create_index(INDEX, "queue_entries", ["waits_since"])
    op.add_column("workers", sa.Column("cluster", sa.Text(), server_default="", nullable=False))


def downgrade() -> None:
    op.drop_column("workers", "cluster")
    op.drop_index(INDEX, "queue_entries")
    op.drop_column("queue_entries", "asked_by")
    op.drop_column("queue_entries", "waits_since")

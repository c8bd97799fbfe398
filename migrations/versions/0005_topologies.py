"""Add the measured links between ranks, once for each hardware profile

Revision ID: 0005
Revises: 0004
Created: 2026-11-22
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "topologies",
        sa.Column("hardware_fingerprint", sa.Text(), nullable=False),
        sa.Column("host_of_rank", sa.Text(), nullable=False),
        sa.Column("num_ranks", sa.BigInteger(), nullable=False),
        sa.Column("num_hosts", sa.BigInteger(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("hardware_fingerprint", "host_of_rank", name="pk_topologies"),
    )


def downgrade() -> None:
    op.drop_table("topologies")

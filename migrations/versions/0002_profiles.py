"""Add the kernels, gaps and collectives with the most time, of each profiled trial

Revision ID: 0002
Revises: 0001
Created: 2026-11-21
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLES = ("kernel_stats", "gap_stats", "collective_stats")


def upgrade() -> None:
    _create("kernel_stats", _text("name"), _text("category"), _int("count"), _int("total_ns"), _int("max_ns"))
    _create("gap_stats", _text("category"), _text("kernel_after"), _int("count"), _int("total_ns"))
    _create(
        "collective_stats",
        _text("name"),
        _int("group_size"),
        _int("message_bytes"),
        _int("count"),
        _int("total_ns"),
        _int("exposed_ns"),
        sa.Column("bus_bytes_per_s", sa.Double(), nullable=True),
    )


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)


def _text(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), nullable=False)


def _int(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def _create(table: str, *columns: sa.Column[Any]) -> None:
    op.create_table(
        table,
        _text("trial_id"),
        _int("number"),
        *columns,
        _text("record"),
        sa.PrimaryKeyConstraint("trial_id", "number", name=f"pk_{table}"),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.trial_id"], name=f"fk_{table}_trial_id", ondelete="CASCADE"),
    )

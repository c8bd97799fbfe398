"""Remove the unused tables of windows and guard checks, which are read from the trial's result

Revision ID: 0011
Revises: 0010
Created: 2026-11-26
"""

from collections.abc import Iterator

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

WINDOW_NUMBERS = (
    *("number", "round", "position", "num_steps", "num_samples", "num_units", "duration_ns"),
    *("step_p20_ns", "step_p50_ns", "step_p80_ns", "queue_depth_start", "queue_depth_end"),
)


def upgrade() -> None:
    op.drop_table("windows")
    op.drop_table("guard_checks")


def downgrade() -> None:
    """Create the tables again, empty: the previous version wrote them, but read the results."""
    op.create_table(
        "windows",
        sa.Column("trial_id", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in WINDOW_NUMBERS),
        sa.Column("foreign_cpu_share", sa.Double(), nullable=False),
        sa.Column("void", sa.Text(), nullable=True),
        *_of_a_trial("windows"),
    )
    op.create_table(
        "guard_checks",
        sa.Column("trial_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("name", "kind", "record")),
        sa.Column("passed", sa.Boolean(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=True) for name in ("observed", "tolerance")),
        *_of_a_trial("guard_checks"),
    )


def _of_a_trial(table: str) -> Iterator[sa.Constraint]:
    yield sa.PrimaryKeyConstraint("trial_id", "number", name=f"pk_{table}")
    yield sa.ForeignKeyConstraint(
        ["trial_id"], ["trials.trial_id"], name=f"fk_{table}_trial_id", ondelete="CASCADE"
    )

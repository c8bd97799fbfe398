"""Add columns for what lists and overviews show of a study's answer

Revision ID: 0004
Revises: 0003
Created: 2026-11-22
"""

import json
from collections import Counter
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TEXTS, NUMBERS = ("bottleneck_before", "bottleneck_after"), ("tuning_s",)
AT_ONCE = 200
"""Number of answers read at once: all together may be large."""


def upgrade() -> None:
    for name in TEXTS:
        op.add_column("recommendations", sa.Column(name, sa.Text(), nullable=True))
    for name in NUMBERS:
        op.add_column("recommendations", sa.Column(name, sa.Double(), nullable=True))
    op.create_table(
        "strategy_outcomes",
        sa.Column("study_id", sa.Text(), nullable=False),
        sa.Column("strategy", sa.Text(), nullable=False),
        sa.Column("num_tried", sa.BigInteger(), nullable=False),
        sa.Column("gain", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("study_id", "strategy", name="pk_strategy_outcomes"),
        sa.ForeignKeyConstraint(
            ["study_id"], ["studies.study_id"], name="fk_strategy_outcomes_study_id", ondelete="CASCADE"
        ),
    )
    _fill(op.get_bind())


def downgrade() -> None:
    op.drop_table("strategy_outcomes")
    for name in (*TEXTS, *NUMBERS):
        op.drop_column("recommendations", name)


def _fill(connection: sa.Connection) -> None:
    """Fill the columns from the recommendations already stored."""
    recommendations, decisions, outcomes = (
        sa.table(name, *map(sa.column, columns))
        for name, columns in {
            "recommendations": ("study_id", "record", *TEXTS, *NUMBERS),
            "decisions": ("study_id", "record"),
            "strategy_outcomes": ("study_id", "strategy", "num_tried", "gain"),
        }.items()
    )
    ids = list(connection.scalars(sa.select(recommendations.c.study_id)))
    for begin in range(0, len(ids), AT_ONCE):
        part = ids[begin : begin + AT_ONCE]
        texts = connection.execute(
            sa.select(recommendations.c.study_id, recommendations.c.record).where(recommendations.c.study_id.in_(part))
        ).all()
        told: dict[str, list[dict[str, Any]]] = {}
        for study_id, text in connection.execute(
            sa.select(decisions.c.study_id, decisions.c.record).where(decisions.c.study_id.in_(part))
        ):
            told.setdefault(study_id, []).append(json.loads(text))
        for study_id, text in texts:
            record = json.loads(text)
            values = {name: record.get(name) for name in TEXTS}
            values["tuning_s"] = record.get("cost", {}).get("tuning_s")
            connection.execute(recommendations.update().where(recommendations.c.study_id == study_id).values(values))
            rows = _outcomes(study_id, record, told.get(study_id, []))
            if rows:
                connection.execute(outcomes.insert(), rows)


def _outcomes(study_id: str, record: dict[str, Any], decisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tried: Counter[str] = Counter()
    for decision in decisions:
        if decision["verdict"] == "not_tried" or decision["stage"] == "confirm":
            continue
        tried.update({move["strategy"] for move in decision.get("moves", [])})
    gains = {part["strategy"]: part["gain"] for part in record.get("parts", [])}
    return [
        {
            "study_id": study_id,
            "strategy": strategy,
            "num_tried": tried[strategy],
            "gain": gains.get(strategy),
        }
        for strategy in sorted({*tried, *gains})
    ]

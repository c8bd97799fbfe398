"""Remove gains that are not proven from answers, and mark answers without a search

Revision ID: 0006
Revises: 0005
Created: 2026-11-24
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

AT_ONCE = 200
"""Number of answers read at once: all together may be large."""
RECOMMENDATIONS = sa.table("recommendations", *map(sa.column, ("study_id", "verdict", "gain", "record")))
OUTCOMES = sa.table("strategy_outcomes", *map(sa.column, ("study_id", "gain")))
DECISIONS = sa.table("decisions", *map(sa.column, ("study_id", "record")))


def upgrade() -> None:
    """Remove a rejected finalist's gain from answers and unconfirmed gains of strategies; mark answers without a
    search.
    """
    connection = op.get_bind()
    unconfirmed = sa.select(RECOMMENDATIONS.c.study_id).where(RECOMMENDATIONS.c.verdict == "unconfirmed")
    connection.execute(OUTCOMES.update().where(OUTCOMES.c.study_id.in_(unconfirmed)).values(gain=None))
    ids = list(
        connection.scalars(
            sa.select(RECOMMENDATIONS.c.study_id).where(RECOMMENDATIONS.c.verdict != "faster")
        )
    )
    for begin in range(0, len(ids), AT_ONCE):
        chosen = RECOMMENDATIONS.c.study_id.in_(ids[begin : begin + AT_ONCE])
        for study_id, text in connection.execute(
            sa.select(RECOMMENDATIONS.c.study_id, RECOMMENDATIONS.c.record).where(chosen)
        ).all():
            record = json.loads(text)
            gain = record.get("gain")
            if gain is not None and gain["interval"]["low"] <= 1:
                record |= {"gain": None, "unproven_gain": gain}
            elif gain is None and _searched_nothing(connection, study_id, record):
                record["verdict"] = "not_searched"
            else:
                continue
            _store(connection, study_id, record)


def downgrade() -> None:
    connection = op.get_bind()
    for study_id, text in connection.execute(
        sa.select(RECOMMENDATIONS.c.study_id, RECOMMENDATIONS.c.record).where(
            RECOMMENDATIONS.c.verdict != "faster"
        )
    ).all():
        record = json.loads(text)
        unproven = record.pop("unproven_gain", None)
        record["gain"] = record.get("gain") or unproven
        if record["verdict"] == "not_searched":
            record["verdict"] = "no_significant_gain"
        _store(connection, study_id, record)


def _searched_nothing(connection: sa.Connection, study_id: str, record: dict[str, Any]) -> bool:
    """Return whether the study ended before any candidate was tried, although some promised a gain."""
    ended = record.get("certificate", {}).get("ended")
    if record["verdict"] != "no_significant_gain" or ended not in ("budget spent", "interrupted"):
        return False
    told = connection.scalars(sa.select(DECISIONS.c.record).where(DECISIONS.c.study_id == study_id))
    return not any(
        decision.get("trial_ids") and decision["stage"] not in ("baseline", "confirm")
        for decision in map(json.loads, told)
    )


def _store(connection: sa.Connection, study_id: str, record: dict[str, Any]) -> None:
    gain = record["gain"]
    connection.execute(
        RECOMMENDATIONS.update()
        .where(RECOMMENDATIONS.c.study_id == study_id)
        .values(
            verdict=record["verdict"],
            gain=None if gain is None else gain["ratio"],
            record=json.dumps(record, separators=(",", ":")),
        )
    )

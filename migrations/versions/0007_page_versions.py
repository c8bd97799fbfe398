"""Add summaries of their measurements to trials, and a count of changes to studies

Revision ID: 0007
Revises: 0006
Created: 2026-11-24
"""

import json
import math
import statistics
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

AT_ONCE = 200
"""Number of results read at once: all together may be large."""
TRIM = 0.2
STUDIES = sa.table("studies", sa.column("study_id"))
TRIALS = sa.table(
    "trials",
    *map(
        sa.column,
        ("trial_id", "study_id", "sequence", "state", "result", "step_time_ns", "units_per_s", "num_windows", "gain"),
    ),
)


def upgrade() -> None:
    op.add_column("studies", sa.Column("revision", sa.BigInteger(), server_default="0", nullable=False))
    op.create_index("ix_studies_owner_id_state_revision", "studies", ["owner_id", "state", "revision"])
    op.add_column("trials", sa.Column("step_time_ns", sa.Double(), nullable=True))
    op.add_column("trials", sa.Column("units_per_s", sa.Double(), nullable=True))
    op.add_column("trials", sa.Column("num_windows", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("trials", sa.Column("gain", sa.Double(), nullable=True))
    connection = op.get_bind()
    for study_id in list(connection.scalars(sa.select(STUDIES.c.study_id))):
        _summarise(connection, study_id)


def downgrade() -> None:
    for column in ("step_time_ns", "units_per_s", "num_windows", "gain"):
        op.drop_column("trials", column)
    op.drop_index("ix_studies_owner_id_state_revision", "studies")
    op.drop_column("studies", "revision")


def _summarise(connection: sa.Connection, study_id: str) -> None:
    """Fill the columns of a study's trials; each gain is over the earlier runs of today's settings."""
    references: list[dict[str, Any]] = []
    for group in _groups(connection, study_id):
        references += [result for result in group if result["purpose"] == "baseline" and _is_measured(result)]
        for result in group:
            windows = _clean(result)
            duration_ns, num_steps = (sum(w[name] for w in windows) for name in ("duration_ns", "num_steps"))
            values = {
                "step_time_ns": duration_ns / num_steps if duration_ns and num_steps else None,
                "units_per_s": sum(w["num_units"] for w in windows) * 1e9 / duration_ns if duration_ns else None,
                "num_windows": len(windows),
                "gain": _gain(result, references, group),
            }
            connection.execute(TRIALS.update().where(TRIALS.c.trial_id == result["trial_id"]).values(values))


def _groups(connection: sa.Connection, study_id: str) -> Iterable[list[dict[str, Any]]]:
    """Return the results of a study, grouped by trials that took turns."""
    query = sa.select(TRIALS.c.trial_id).where(TRIALS.c.study_id == study_id, TRIALS.c.result.is_not(None))
    ids = list(connection.scalars(query.order_by(TRIALS.c.sequence)))
    group: list[dict[str, Any]] = []
    for begin in range(0, len(ids), AT_ONCE):
        part = sa.select(TRIALS.c.result).where(TRIALS.c.trial_id.in_(ids[begin : begin + AT_ONCE]))
        for text in connection.scalars(part.order_by(TRIALS.c.sequence)):
            result = json.loads(text)
            if group and group[0]["group"] != result["group"]:
                yield group
                group = []
            group.append(result)
    if group:
        yield group


def _clean(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [window for window in result.get("windows", ()) if window.get("void") is None]


def _is_measured(result: dict[str, Any]) -> bool:
    guard = result.get("guard")
    return result.get("failure") is None and bool(_clean(result)) and (guard is None or guard["passed"])


def _gain(result: dict[str, Any], references: list[dict[str, Any]], group: list[dict[str, Any]]) -> float | None:
    """Return the speed over today's settings: by rounds over a run of them that took turns with it, else over their
    mean.
    """
    if not references or not _is_measured(result):
        return None
    today = references[0]["candidate"]
    for other in group:
        if other["candidate"] == today != result["candidate"] and _is_measured(other):
            theirs = {window["round"]: window for window in _clean(other)}
            ratios = [
                _log_rate(w, result) - _log_rate(theirs[w["round"]], other)
                for w in _clean(result)
                if w["round"] in theirs
            ]
            if ratios:
                return math.exp(_trimmed_mean(ratios))
    level = statistics.fmean(_mean_log_rate(one) for one in references)
    return math.exp(_mean_log_rate(result) - level)


def _mean_log_rate(result: dict[str, Any]) -> float:
    return _trimmed_mean([_log_rate(window, result) for window in _clean(result)])


def _log_rate(window: dict[str, Any], result: dict[str, Any]) -> float:
    restart_ns, steps = result.get("epoch_restart_ns"), result.get("steps_per_epoch")
    step_ns = window["duration_ns"] / window["num_steps"] + (restart_ns / steps if restart_ns and steps else 0.0)
    return math.log(window["num_units"] / window["num_steps"] / step_ns)


def _trimmed_mean(values: list[float]) -> float:
    cut = int(TRIM * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])

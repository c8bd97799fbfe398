"""What there is to run on, and how much waits for it."""

from __future__ import annotations

from sqlalchemy import Engine, func, select

from service.connections import reading
from service.models import StudyRow, WorkerRow


def num_studies_by_state(engine: Engine) -> dict[str, int]:
    with reading(engine) as session:
        counts = select(StudyRow.state, func.count()).group_by(StudyRow.state)
        return {row[0]: row[1] for row in session.execute(counts)}


def num_workers_by_state(engine: Engine) -> dict[str, int]:
    with reading(engine) as session:
        counts = select(WorkerRow.state, func.count()).group_by(WorkerRow.state)
        return {row[0]: row[1] for row in session.execute(counts)}

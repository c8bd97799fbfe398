"""Hardware of workers and studies, and the number of studies in each state."""

from __future__ import annotations

from sqlalchemy import Engine, func, select

from steptune.service.connections import reading
from steptune.service.messages import HardwareSummary
from steptune.service.models import HardwareProfileRow, StudyRow
from steptune.service.queries.stored import stored


def num_studies_by_state(engine: Engine) -> dict[str, int]:
    with reading(engine) as session:
        counts = select(StudyRow.state, func.count()).group_by(StudyRow.state)
        return {row[0]: row[1] for row in session.execute(counts)}


def list_hardware(engine: Engine, *, limit: int, after: str | None) -> list[HardwareSummary]:
    """Return hardware profiles in the order of their fingerprints: up to `limit` + 1, so that the caller sees if there
    are more.
    """
    query = select(HardwareProfileRow).order_by(HardwareProfileRow.fingerprint).limit(limit + 1)
    if after is not None:
        query = query.where(HardwareProfileRow.fingerprint > after)
    with reading(engine) as session:
        return [_hardware(row) for row in session.scalars(query)]


def find_hardware(engine: Engine, fingerprint: str) -> HardwareSummary | None:
    with reading(engine) as session:
        row = session.get(HardwareProfileRow, fingerprint)
        return None if row is None else _hardware(row)


def _hardware(row: HardwareProfileRow) -> HardwareSummary:
    return HardwareSummary(
        fingerprint=row.fingerprint, device_kind=row.device_kind, label=row.label, profile=stored(row.record)
    )

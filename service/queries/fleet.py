"""All studies of an overview, from columns only: ten thousand of them are read in a fraction of a second."""

from __future__ import annotations

from sqlalchemy import Engine, bindparam, select

from steptune.dashboards.fleet import FleetPart, FleetStudy
from steptune.service.connections import querying
from steptune.service.models import HardwareProfileRow, QueueEntryRow, RecommendationRow, StrategyOutcomeRow, StudyRow
from steptune.service.queries.packed import packed_rows

_STUDIES = (
    select(
        HardwareProfileRow.label,
        StudyRow.state,
        RecommendationRow.verdict,
        RecommendationRow.gain,
        RecommendationRow.bottleneck_before,
        RecommendationRow.bottleneck_after,
        RecommendationRow.tuning_s,
        QueueEntryRow.device_seconds,
    )
    .select_from(StudyRow)
    .outerjoin(RecommendationRow, RecommendationRow.study_id == StudyRow.study_id)
    .outerjoin(QueueEntryRow, QueueEntryRow.study_id == StudyRow.study_id)
    .outerjoin(HardwareProfileRow, HardwareProfileRow.fingerprint == StudyRow.hardware_fingerprint)
)
_PARTS = select(
    StrategyOutcomeRow.strategy,
    RecommendationRow.bottleneck_before,
    StrategyOutcomeRow.num_tried,
    StrategyOutcomeRow.gain,
).join(RecommendationRow, RecommendationRow.study_id == StrategyOutcomeRow.study_id)
_OWN_STUDIES = _STUDIES.where(StudyRow.owner_id == bindparam("owner_id"))
_OWN_PARTS = _PARTS.join(StudyRow, StudyRow.study_id == StrategyOutcomeRow.study_id).where(
    StudyRow.owner_id == bindparam("owner_id")
)


def fleet_studies(engine: Engine, owner_id: str | None) -> list[FleetStudy]:
    """Those of a user, or all."""
    statement, given = (_STUDIES, {}) if owner_id is None else (_OWN_STUDIES, {"owner_id": owner_id})
    with querying(engine) as connection:
        return [FleetStudy(*row) for row in packed_rows(connection, statement, given)]


def fleet_parts(engine: Engine, owner_id: str | None) -> list[FleetPart]:
    """What came of each strategy in them."""
    statement, given = (_PARTS, {}) if owner_id is None else (_OWN_PARTS, {"owner_id": owner_id})
    with querying(engine) as connection:
        return [FleetPart(*row) for row in packed_rows(connection, statement, given)]

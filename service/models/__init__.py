"""The tables. Every change here needs a revision in migrations/versions/."""

from service.models.access import (
    ApiTokenRow,
    AuditRow,
    BrowserSessionRow,
    IdempotencyKeyRow,
    UserRow,
    WorkloadSourceRow,
)
from service.models.base import Base
from service.models.queue import QueueEntryRow, ResourceSlotRow, WorkerRow
from service.models.studies import (
    ArtifactRow,
    BreakdownRow,
    CollectiveStatsRow,
    DecisionRow,
    EventRow,
    FindingRow,
    GapStatsRow,
    GuardCheckRow,
    HardwareProfileRow,
    KernelStatsRow,
    RecommendationRow,
    StudyRow,
    TrialAttemptRow,
    TrialRow,
    WindowRow,
    WorkloadRow,
)

__all__ = [
    "ApiTokenRow",
    "ArtifactRow",
    "AuditRow",
    "Base",
    "BreakdownRow",
    "BrowserSessionRow",
    "CollectiveStatsRow",
    "DecisionRow",
    "EventRow",
    "FindingRow",
    "GapStatsRow",
    "GuardCheckRow",
    "HardwareProfileRow",
    "IdempotencyKeyRow",
    "KernelStatsRow",
    "QueueEntryRow",
    "RecommendationRow",
    "ResourceSlotRow",
    "StudyRow",
    "TrialAttemptRow",
    "TrialRow",
    "UserRow",
    "WindowRow",
    "WorkerRow",
    "WorkloadRow",
    "WorkloadSourceRow",
]

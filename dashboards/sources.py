"""Where pages read from. A `tuner.protocols.StudyStore` is one; so is anything else with these methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tuner.records import Decision, Recommendation, Study, Trial


class TrialSource(Protocol):
    """What pages read of a study."""

    def get_study(self, study_id: str) -> Study: ...

    def trials(self, study_id: str) -> Sequence[Trial]: ...

    def decisions(self, study_id: str) -> Sequence[Decision]: ...

    def recommendation(self, study_id: str) -> Recommendation | None: ...

"""Sources from which HTML pages read studies: `steptune.tuner.protocols.StudyStore`, or any object with the same
methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from steptune.tuner.records import Decision, Recommendation, Study, Trial


class TrialSource(Protocol):
    """Source from which HTML pages read a study and its trials."""

    def get_study(self, study_id: str) -> Study: ...

    def trials(self, study_id: str) -> Sequence[Trial]: ...

    def decisions(self, study_id: str) -> Sequence[Decision]: ...

    def recommendation(self, study_id: str) -> Recommendation | None: ...


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Snapshot of one study at one moment, so that all parts of a page agree."""

    study: Study
    all_trials: Sequence[Trial]
    all_decisions: Sequence[Decision]
    answer: Recommendation | None

    def get_study(self, study_id: str) -> Study:
        return self.study

    def trials(self, study_id: str) -> Sequence[Trial]:
        return self.all_trials

    def decisions(self, study_id: str) -> Sequence[Decision]:
        return self.all_decisions

    def recommendation(self, study_id: str) -> Recommendation | None:
        return self.answer


def snapshot(source: TrialSource, study_id: str) -> Snapshot:
    """Read a study once, for all parts of a page.

    Raises:
        StudyNotFoundError: There is no such study.
    """
    study = source.get_study(study_id)
    return Snapshot(
        study=study,
        all_trials=source.trials(study.study_id),
        all_decisions=source.decisions(study.study_id),
        answer=source.recommendation(study.study_id),
    )

"""What pages of trials read: rows, and the files that are kept beside them."""

from __future__ import annotations

import gzip

import msgspec

from steptune.service.artifacts import ArtifactStore
from steptune.service.artifacts.store import ArtifactGone
from steptune.service.messages import ArtifactInfo
from steptune.service.queries import outcomes
from steptune.service.store import SqlStudyStore
from steptune.tuner.records import Decision, Recommendation, Study, Trial
from steptune.tuner.trace_records import TraceAnalysis

MAX_ANALYSIS_BYTES = 64 << 20
"""A trial writes it, and what a trial runs is not to be trusted."""
_MAX_KINDS = 1000
"""A trace for every rank among them."""


class KeptTrials:
    """A `steptune.dashboards.trial_page.TrialPageSource`."""

    def __init__(self, store: SqlStudyStore, artifacts: ArtifactStore) -> None:
        self._store = store
        self._artifacts = artifacts

    def get_study(self, study_id: str) -> Study:
        return self._store.get_study(study_id)

    def trials(self, study_id: str) -> list[Trial]:
        return self._store.trials(study_id)

    def decisions(self, study_id: str) -> list[Decision]:
        return self._store.decisions(study_id)

    def recommendation(self, study_id: str) -> Recommendation | None:
        return self._store.recommendation(study_id)

    def get_trial(self, trial_id: str) -> Trial:
        return self._store.trial(trial_id)

    def trial_files(self, trial_id: str) -> dict[str, int]:
        found = outcomes.list_artifacts(self._store.engine, trial_id=trial_id, limit=_MAX_KINDS, after=None)
        return {artifact.kind: artifact.size_bytes for artifact in found}

    def trial_analysis(self, trial_id: str) -> TraceAnalysis | None:
        """None also where the file is gone or cannot be read: the page then shows what the result says."""
        kept = outcomes.find_artifact(self._store.engine, trial_id, "analysis")
        return None if kept is None else self._analysis(kept)

    def _analysis(self, kept: ArtifactInfo) -> TraceAnalysis | None:
        try:
            with self._artifacts.open(kept.digest) as file, gzip.open(file) as unpacked:
                return msgspec.json.decode(unpacked.read(MAX_ANALYSIS_BYTES), type=TraceAnalysis)
        except (ArtifactGone, OSError, EOFError, msgspec.MsgspecError, AssertionError):
            return None

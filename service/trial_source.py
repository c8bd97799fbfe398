"""What pages of trials read: rows, and the files that are kept beside them."""

from __future__ import annotations

import gzip
import itertools
import zlib
from typing import BinaryIO, cast

import msgspec
from msgspec.structs import replace

from steptune.dashboards.trace_info import main_rank
from steptune.service.artifacts import ArtifactStore
from steptune.service.artifacts.store import ArtifactGone
from steptune.service.messages import ArtifactInfo
from steptune.service.queries import outcomes
from steptune.service.store import SqlStudyStore
from steptune.tuner.records import Decision, Recommendation, Study, Trial
from steptune.tuner.trace_records import RankAnalysis, TraceAnalysis
from steptune.tuner.trials.analysis_files import read_analysis

MAX_OLD_BYTES = 8 << 20
"""Of an analysis that was kept as one line, unchecked."""
_OF_OLD = b'{"ranks":[{'
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
        """In pieces. Of ranks but the one in front only the lanes of devices are shown, so no others are read."""
        try:
            with self._artifacts.open(kept.digest) as file, gzip.open(file) as unpacked:
                return _shown(cast(BinaryIO, unpacked))
        except (ArtifactGone, OSError, EOFError, zlib.error, ValueError):
            return None


def _shown(file: BinaryIO) -> TraceAnalysis:
    """What the page of a trial shows of a file.

    Raises:
        ValueError: It cannot be read.
    """
    if file.read(len(_OF_OLD)) == _OF_OLD:
        return msgspec.json.decode(_OF_OLD + file.read(MAX_OLD_BYTES), type=TraceAnalysis)
    file.seek(0)
    *ranks, rest = (_device_lanes_only(part) for part in read_analysis(file))
    analysis = replace(cast(TraceAnalysis, rest), ranks=tuple(cast(list[RankAnalysis], ranks)))
    if not ranks:
        raise ValueError("it is of no rank")
    front = analysis.ranks.index(main_rank(analysis))
    file.seek(0)
    whole = next(itertools.islice(read_analysis(file), front, None))
    return replace(analysis, ranks=(*analysis.ranks[:front], whole, *analysis.ranks[front + 1 :]))


def _device_lanes_only(part: RankAnalysis | TraceAnalysis) -> RankAnalysis | TraceAnalysis:
    if isinstance(part, TraceAnalysis):
        return part
    return replace(part, lanes=tuple(lane for lane in part.lanes if lane.kind == "device"))

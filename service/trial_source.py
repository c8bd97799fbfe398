"""What pages of trials read: rows, and the files that are kept beside them."""

from __future__ import annotations

import gzip
import itertools
import zlib
from typing import BinaryIO, cast

import msgspec
from msgspec.structs import replace
from sqlalchemy import bindparam, select

from steptune.dashboards.trace_info import main_rank
from steptune.service import rows
from steptune.service.artifacts import ArtifactStore
from steptune.service.artifacts.store import ArtifactGone
from steptune.service.connections import querying
from steptune.service.kept import Kept
from steptune.service.messages import ArtifactInfo
from steptune.service.models import DecisionRow, TrialRow
from steptune.service.queries import outcomes
from steptune.service.store import SqlStudyStore
from steptune.tuner.records import Decision, Recommendation, Study, Trial
from steptune.tuner.store_rules import decode
from steptune.tuner.trace_records import RankAnalysis, TraceAnalysis
from steptune.tuner.trials.analysis_files import read_analysis

MAX_OLD_BYTES = 8 << 20
"""Of an analysis that was kept as one line, unchecked."""
MAX_CHARS = 8 << 20
"""Of the texts of trials and of those of decisions; what is made of one takes several times its size."""
_TRIALS = (
    select(TrialRow.record, TrialRow.state, TrialRow.result)
    .where(TrialRow.study_id == bindparam("study_id"))
    .order_by(TrialRow.sequence)
)
_DECISIONS = (
    select(DecisionRow.record).where(DecisionRow.study_id == bindparam("study_id")).order_by(DecisionRow.sequence)
)
_OF_OLD = b'{"ranks":[{'
_MAX_KINDS = 1000
"""A trace for every rank among them."""


class KeptRecords:
    """Trials and decisions that a process has read, by their text in the database: most of what a page shows stood on
    its last version as well, and taking texts apart is slow. Who gets a record must not change it.
    """

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._trials: Kept[Trial] = Kept(max_chars)
        self._decisions: Kept[Decision] = Kept(max_chars)

    def trial(self, record: str, state: str, result: str | None) -> Trial:
        size = len(record) + len(result or "")
        return self._trials.get_or_make((record, state, result), lambda: rows.trial_of(record, state, result), size)

    def decision(self, record: str) -> Decision:
        return self._decisions.get_or_make(record, lambda: decode(record, Decision), len(record))


class KeptTrials:
    """A `steptune.dashboards.trial_page.TrialPageSource`."""

    def __init__(self, store: SqlStudyStore, artifacts: ArtifactStore, records: KeptRecords | None = None) -> None:
        self._store = store
        self._artifacts = artifacts
        self._records = records or KeptRecords()

    def get_study(self, study_id: str) -> Study:
        return self._store.get_study(study_id)

    def trials(self, study_id: str) -> list[Trial]:
        with querying(self._store.engine) as connection:
            found = connection.execute(_TRIALS, {"study_id": study_id})
            return [self._records.trial(*row) for row in found]

    def decisions(self, study_id: str) -> list[Decision]:
        with querying(self._store.engine) as connection:
            found = connection.scalars(_DECISIONS, {"study_id": study_id})
            return [self._records.decision(record) for record in found]

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

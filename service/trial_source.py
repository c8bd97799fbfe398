"""Sources of the data on trial pages: rows, and the files stored with them."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

import msgspec
from markupsafe import Markup
from msgspec.structs import replace
from sqlalchemy import Select, bindparam, select

from steptune.dashboards.trial_page import SupportsHtml, render_profile
from steptune.service import rows
from steptune.service.artifacts import ArtifactStore
from steptune.service.artifacts.store import ArtifactGoneError
from steptune.service.connections import querying
from steptune.service.kept import Kept
from steptune.service.messages import ArtifactInfo
from steptune.service.models import DecisionRow, RecommendationRow, StudyRow, TrialRow
from steptune.service.page_copies import Fragment
from steptune.service.queries import outcomes
from steptune.service.store import SqlStudyStore
from steptune.tuner.profiling.lanes import MAX_LANES
from steptune.tuner.profiling.rank_comparison import main_rank
from steptune.tuner.profiling.tiles import LaneTables, shown_lanes
from steptune.tuner.records import Decision, Recommendation, Study, Trial, TrialResult
from steptune.tuner.store_rules import AnyRecord, decode, no_such_trial
from steptune.tuner.trace_records import Lane, RankAnalysis, TraceAnalysis
from steptune.tuner.trial_figures import TrialFigures, TrialView
from steptune.tuner.trials.analysis_files import read_analysis, read_lanes

MAX_OLD_BYTES = 8 << 20
"""Maximum bytes that are read of an analysis in the old format, which is a single line and was not checked when it was
stored.
"""
MAX_CHARS = 8 << 20
"""Maximum total characters of the cached texts of trials, and, separately, of all other cached texts. The records
parsed from the texts take several times as much memory.
"""
_STUDY = select(StudyRow.record).where(StudyRow.study_id == bindparam("study_id"))
_ANSWER = select(RecommendationRow.record).where(RecommendationRow.study_id == bindparam("study_id"))
_TRIALS = (
    select(TrialRow.record, TrialRow.state, TrialRow.result)
    .where(TrialRow.study_id == bindparam("study_id"))
    .order_by(TrialRow.sequence)
)
_FIGURES = tuple(getattr(TrialRow, name) for name in TrialFigures._fields)
_TRIAL = select(TrialRow.record, TrialRow.state, TrialRow.result, *_FIGURES).where(
    TrialRow.trial_id == bindparam("trial_id")
)
_DECISIONS = (
    select(DecisionRow.record).where(DecisionRow.study_id == bindparam("study_id")).order_by(DecisionRow.sequence)
)
MAX_PROFILE_BYTES = 32 << 20
"""Maximum bytes of the cached profiles of trial pages, plain and compressed: enough for some tens of trials."""
NO_PROFILE_BYTES = 1000
KeptProfiles = Kept[tuple[TrialResult, Fragment | None]]
"""Cached profiles by trial and file, each with the trial result that it belongs to."""
UNREADABLE = (ArtifactGoneError, OSError, EOFError, zlib.error, ValueError)
MAX_LANE_BYTES = 64 << 20
"""Maximum bytes of cached timeline lanes, stored as columns: enough for some millions of intervals."""
CELL_BYTES = 56
KeptLanes = Kept[LaneTables]
"""Cached timeline lanes by trial and file."""
_OF_OLD = b'{"ranks":[{'
_MAX_KINDS = 1000
"""Maximum number of files listed for a trial, which may have one trace for every rank."""


class KeptRecords:
    """Cache of parsed database records; the key is a record's text. Parsing is slow, and successive versions of an HTML
    page have most records in common. Callers must not change a record.
    """

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._trials: Kept[Trial] = Kept(max_chars)
        self._others: Kept[Any] = Kept(max_chars)

    def trial(self, record: str, state: str, result: str | None) -> Trial:
        size = len(record) + len(result or "")
        return self._trials.get_or_make((record, state, result), lambda: rows.trial_of(record, state, result), size)

    def other(self, record: str, kind: type[AnyRecord]) -> AnyRecord:
        found: AnyRecord = self._others.get_or_make((kind, record), lambda: decode(record, kind), len(record))
        return found


class KeptTrials:
    """Stored trials as a `steptune.dashboards.trial_page.TrialPageSource`."""

    def __init__(
        self,
        store: SqlStudyStore,
        artifacts: ArtifactStore,
        records: KeptRecords | None = None,
        profiles: KeptProfiles | None = None,
    ) -> None:
        """Use a store, its artifacts, and the caches of the process.

        Args:
            records: Cache of the records that the process has read.
            profiles: Cache of the profiles that the process has shown; without it, profiles are plain text of a page.
        """
        self._store = store
        self._artifacts = artifacts
        self._records = records or KeptRecords()
        self._profiles = profiles

    def get_study(self, study_id: str) -> Study:
        record = self._only(_STUDY, study_id)
        return self._store.get_study(study_id) if record is None else self._records.other(record, Study)

    def trials(self, study_id: str) -> list[Trial]:
        with querying(self._store.engine) as connection:
            found = connection.execute(_TRIALS, {"study_id": study_id})
            return [self._records.trial(*row) for row in found]

    def decisions(self, study_id: str) -> list[Decision]:
        with querying(self._store.engine) as connection:
            found = connection.scalars(_DECISIONS, {"study_id": study_id})
            return [self._records.other(record, Decision) for record in found]

    def recommendation(self, study_id: str) -> Recommendation | None:
        record = self._only(_ANSWER, study_id)
        return None if record is None else self._records.other(record, Recommendation)

    def _only(self, query: Select[str], study_id: str) -> str | None:
        with querying(self._store.engine) as connection:
            found: str | None = connection.scalar(query, {"study_id": study_id})
            return found

    def get_trial(self, trial_id: str) -> TrialView:
        """Return a trial with its stored summary, for its page and for REST.

        Raises:
            StudyNotFoundError: There is no such trial.
        """
        with querying(self._store.engine) as connection:
            found = connection.execute(_TRIAL, {"trial_id": trial_id}).one_or_none()
        if found is None:
            raise no_such_trial(trial_id)
        record, state, result, *figures = found
        return TrialView(self._records.trial(record, state, result), TrialFigures(*figures))

    def trial_files(self, trial_id: str) -> dict[str, int]:
        found = outcomes.list_artifacts(self._store.engine, trial_id=trial_id, limit=_MAX_KINDS, after=None)
        return {artifact.kind: artifact.size_bytes for artifact in found}

    def trial_profile(self, trial: Trial) -> SupportsHtml | None:
        """Return the profile from the result, even if the file is gone or cannot be read."""
        if trial.result is None:
            return None
        kept = self._kept(trial.trial_id, "analysis")
        if self._profiles is None:
            return self._profile(trial.result, kept, self.trial_lanes(trial.trial_id))
        lanes = self._kept(trial.trial_id, "lanes")
        key = trial.trial_id, kept and kept.digest, lanes and lanes.digest
        known = self._profiles.get(key)
        if known is None or known[0] != trial.result:
            path = f"/api/v1/trials/{trial.trial_id}" if self._is_here(lanes or kept) else ""
            profile = self._profile(trial.result, kept, path)
            known = trial.result, None if profile is None else Fragment.of(profile)
            size = 0 if known[1] is None else len(known[1].plain) + len(known[1].packed)
            self._profiles.put(key, known, NO_PROFILE_BYTES + size)
        return known[1]

    def trial_analysis(self, trial_id: str) -> TraceAnalysis | None:
        """Return the analysis stored with a trial; None where there is none, or it cannot be read."""
        kept = self._kept(trial_id, "analysis")
        return None if kept is None else self._analysis(kept)

    def trial_lanes(self, trial_id: str) -> tuple[Lane, ...]:
        """Return the timeline lanes of a trial; if there are none, return the merged lanes that older versions stored
        in its analysis.
        """
        kept = self._kept(trial_id, "lanes")
        if kept is None:
            of_old = self._kept(trial_id, "analysis")
            analysis = None if of_old is None else self._analysis(of_old)
            return () if analysis is None else shown_lanes(analysis)[0]
        with contextlib.suppress(*UNREADABLE), self._artifacts.open(kept.digest) as file, gzip.open(file) as unpacked:
            return tuple(itertools.islice(read_lanes(cast(BinaryIO, unpacked)), MAX_LANES))
        return ()

    def lane_tables(self, trial_id: str, tables: KeptLanes) -> LaneTables:
        """Return the timeline lanes of a trial as tables from which the tiles for any zoom level are made."""
        kept = self._kept(trial_id, "lanes") or self._kept(trial_id, "analysis")
        key = trial_id, kept and kept.digest
        found = tables.get(key)
        if found is None:
            found = LaneTables(self.trial_lanes(trial_id))
            tables.put(key, found, NO_PROFILE_BYTES + found.num_cells * CELL_BYTES)
        return found

    def _kept(self, trial_id: str, kind: str) -> ArtifactInfo | None:
        return outcomes.find_artifact(self._store.engine, trial_id, kind)

    def _is_here(self, kept: ArtifactInfo | None) -> bool:
        """Say whether the file of an artifact is in the data directory of this process."""
        if kept is None:
            return False
        with contextlib.suppress(*UNREADABLE), self._artifacts.open(kept.digest):
            return True
        return False

    def _profile(self, result: TrialResult, kept: ArtifactInfo | None, lanes: Sequence[Lane] | str) -> Markup | None:
        return render_profile(result, None if kept is None else self._analysis(kept), lanes)

    def _analysis(self, kept: ArtifactInfo) -> TraceAnalysis | None:
        """Read a stored analysis in chunks. For all ranks except the one shown, read only the lanes of devices."""
        try:
            with self._artifacts.open(kept.digest) as file, gzip.open(file) as unpacked:
                return _shown(cast(BinaryIO, unpacked))
        except UNREADABLE:
            return None


def _shown(file: BinaryIO) -> TraceAnalysis:
    """Read the part of a file that the page of a trial shows.

    Raises:
        ValueError: The file cannot be read.
    """
    if file.read(len(_OF_OLD)) == _OF_OLD:
        return msgspec.json.decode(_OF_OLD + file.read(MAX_OLD_BYTES), type=TraceAnalysis)
    file.seek(0)
    parts = enumerate(read_analysis(file))
    *ranks, rest = (_device_lanes_only(part) if number else part for number, part in parts)
    analysis = replace(cast(TraceAnalysis, rest), ranks=tuple(cast(list[RankAnalysis], ranks)))
    if not ranks:
        raise ValueError("the analysis contains no rank")
    front = analysis.ranks.index(main_rank(analysis))
    if front == 0:
        return analysis
    file.seek(0)
    whole = next(itertools.islice(read_analysis(file), front, None))
    return replace(analysis, ranks=(*analysis.ranks[:front], whole, *analysis.ranks[front + 1 :]))


def _device_lanes_only(part: RankAnalysis | TraceAnalysis) -> RankAnalysis | TraceAnalysis:
    if isinstance(part, TraceAnalysis):
        return part
    return replace(part, lanes=tuple(lane for lane in part.lanes if lane.kind == "device"))

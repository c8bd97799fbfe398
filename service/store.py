"""The `StudyStore` in a database. All queries of the store are here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, cast

from msgspec import json
from msgspec.structs import replace
from sqlalchemy import ColumnElement, CursorResult, Engine, Integer, Table, delete, func, or_, select, true, update
from sqlalchemy import cast as cast_to
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from steptune.service import advisory_locks, rows
from steptune.service.connections import reading, writing
from steptune.service.fencing import Lease, hold
from steptune.service.models import (
    ArtifactRow,
    Base,
    DecisionRow,
    EventRow,
    HardwareProfileRow,
    QueueEntryRow,
    RecommendationRow,
    StrategyOutcomeRow,
    StudyRow,
    TopologyRow,
    TrialAttemptRow,
    TrialRow,
)
from steptune.tuner import store_rules
from steptune.tuner.records import (
    Artifact,
    Decision,
    Event,
    HardwareProfile,
    Purpose,
    Recommendation,
    Study,
    StudyState,
    Topology,
    Trial,
    TrialResult,
    TrialState,
    Verdict,
)
from steptune.tuner.store_rules import BUDGET_CHANGED, decode, encode
from steptune.tuner.trial_figures import figures_of


class SqlStudyStore:
    """Studies in SQLite or PostgreSQL; see `steptune.tuner.protocols.StudyStore` for what each method does.

    Threads and processes may write at the same time.

    Args:
        engine: Engine of a database whose schema has been checked; closed with the store.
        lease: Lease of the worker that writes: once it is over, writes are refused with LeaseLostError. Without one,
            all writes are allowed: those of the command line, which asks the queue first.
    """

    def __init__(self, engine: Engine, *, lease: Lease | None = None) -> None:
        self._engine = engine
        self._lease = lease

    @property
    def engine(self) -> Engine:
        return self._engine

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    # --- studies ---------------------------------------------------------------------------------

    def create_study(self, study: Study) -> None:
        with writing(self._engine) as session:
            if session.get(StudyRow, study.study_id) is not None:
                raise store_rules.study_repeated(study.study_id)
            write_study(session, study)

    def update_study(self, study: Study) -> None:
        with self._writing(study.study_id) as session:
            stored = decode(_study_row(session, study.study_id).record, Study)
            write_study(
                session,
                replace(
                    stored,
                    facts=study.facts,
                    environment=study.environment,
                    state=study.state,
                    message=study.message,
                ),
            )

    def set_budget(self, study_id: str, budget_s: float) -> Study:
        """Change the budget of a study, in seconds from its beginning; an event records the change.

        Raises:
            StudyNotFoundError: There is no such study.
        """
        with self._writing(study_id) as session:
            stored = decode(_study_row(session, study_id).record, Study)
            study = replace(stored, settings=replace(stored.settings, budget_s=budget_s))
            write_study(session, study)
            write_event(session, study_id, BUDGET_CHANGED, {"budget_s": budget_s})
        return study

    def get_study(self, study_id: str) -> Study:
        with reading(self._engine) as session:
            row = session.get(StudyRow, study_id) or session.get_one(StudyRow, _full_id(session, study_id))
            return decode(row.record, Study)

    def list_studies(self, limit: int = 50) -> list[Study]:
        query = select(StudyRow.record).order_by(*_NEWEST_FIRST).limit(limit)
        with reading(self._engine) as session:
            return [decode(record, Study) for record in session.scalars(query)]

    def set_state(self, study_id: str, state: StudyState, message: str = "") -> None:
        with self._writing(study_id) as session:
            row = _study_row(session, study_id)
            if write_state(session, row, state, message):
                self._write_state_event(session, study_id, state, message)

    # --- trials ----------------------------------------------------------------------------------

    def begin_trials(self, trials: Sequence[Trial]) -> None:
        with self._writing(*{trial.study_id for trial in trials}) as session:
            for trial in trials:
                store_rules.check_begins(trial)
                _study_row(session, trial.study_id)
                taken = select(TrialRow.trial_id).where(
                    or_(
                        TrialRow.trial_id == trial.trial_id,
                        (TrialRow.study_id == trial.study_id) & (TrialRow.sequence == trial.sequence),
                    )
                )
                if session.scalars(taken).first() is not None:
                    raise store_rules.trial_repeated(trial)
                session.add(rows.trial_row(trial))
                session.flush()  # the attempt refers to it
                session.add(rows.attempt_row(trial, self._lease))

    def complete_trials(self, results: Sequence[TrialResult]) -> None:
        held = () if self._lease is None else (self._lease.study_id,)
        with self._writing(*held, num_lost=0) as session:
            for result in results:
                _complete(session, result, self._lease)
            _summarise(session, results)

    def lose_running_trials(self, study_id: str) -> int:
        with self._writing(study_id) as session:
            _study_row(session, study_id)
            return lose_trials(session, study_id)

    def trials(self, study_id: str) -> list[Trial]:
        query = select(TrialRow).where(TrialRow.study_id == study_id).order_by(TrialRow.sequence)
        with reading(self._engine) as session:
            return [rows.trial_of(row.record, row.state, row.result) for row in session.scalars(query)]

    def trial(self, trial_id: str) -> Trial:
        """Return one trial of any study.

        Raises:
            StoreError: No trial has this id.
        """
        with reading(self._engine) as session:
            row = session.get(TrialRow, trial_id)
            if row is None:
                raise store_rules.no_such_trial(trial_id)
            return rows.trial_of(row.record, row.state, row.result)

    # --- what the search decided -----------------------------------------------------------------

    def replace_decisions(self, study_id: str, decisions: Sequence[Decision]) -> None:
        ordered = store_rules.in_order(decisions)
        with self._writing(study_id) as session:
            _study_row(session, study_id)
            _replace_decisions(session, study_id, ordered)

    def decisions(self, study_id: str) -> list[Decision]:
        query = select(DecisionRow.record).where(DecisionRow.study_id == study_id).order_by(DecisionRow.sequence)
        with reading(self._engine) as session:
            return [decode(record, Decision) for record in session.scalars(query)]

    def save_recommendation(
        self,
        recommendation: Recommendation,
        *,
        decisions: Sequence[Decision] | None = None,
        state: StudyState | None = None,
    ) -> None:
        study_id = recommendation.study_id
        ordered = None if decisions is None else store_rules.in_order(decisions)
        with self._writing(study_id) as session:
            row = _study_row(session, study_id)
            if ordered is not None:
                _replace_decisions(session, study_id, ordered)
            _upsert(session, rows.recommendation_row(recommendation))
            _write_strategies(session, recommendation)
            if state is not None and write_state(session, row, state, ""):
                write_event(session, study_id, *store_rules.recommended(recommendation))
                self._write_state_event(session, study_id, state, "")

    def recommendation(self, study_id: str) -> Recommendation | None:
        with reading(self._engine) as session:
            row = session.get(RecommendationRow, study_id)
            return None if row is None else decode(row.record, Recommendation)

    def past_recommendations(self, study_id: str, device_kind: str) -> list[tuple[Study, Recommendation]]:
        query = (
            select(StudyRow.record, RecommendationRow.record)
            .join(StudyRow, StudyRow.study_id == RecommendationRow.study_id)
            .where(
                _of_same_owner(study_id),
                RecommendationRow.device_kind == device_kind,
                RecommendationRow.verdict == Verdict.FASTER.value,
            )
            .order_by(*_NEWEST_FIRST)
            .limit(store_rules.NUM_PAST_STUDIES)
        )
        with reading(self._engine) as session:
            return [(decode(study, Study), decode(answer, Recommendation)) for study, answer in session.execute(query)]

    def past_decisions(self, study_id: str, hardware: HardwareProfile) -> list[Decision]:
        newest = (
            select(StudyRow.study_id)
            .join(HardwareProfileRow, HardwareProfileRow.fingerprint == StudyRow.hardware_fingerprint)
            .where(
                _of_same_owner(study_id),
                StudyRow.state == StudyState.COMPLETED.value,
                HardwareProfileRow.device_kind == hardware.device_kind,
            )
            .order_by(*_NEWEST_FIRST)
            .limit(store_rules.NUM_PAST_STUDIES)
            .subquery()
        )
        query = (
            select(DecisionRow.record)
            .join(newest, newest.c.study_id == DecisionRow.study_id)
            .join(StudyRow, StudyRow.study_id == DecisionRow.study_id)
            .where(DecisionRow.predicted_bound.is_not(None), DecisionRow.measured_gain.is_not(None))
            .order_by(*_NEWEST_FIRST, DecisionRow.sequence)
            .limit(store_rules.NUM_PAST_DECISIONS)
        )
        with reading(self._engine) as session:
            return [decode(record, Decision) for record in session.scalars(query)]

    # --- links between ranks ---------------------------------------------------------------------

    def save_topology(self, topology: Topology) -> None:
        with self._writing() as session:
            _upsert(session, rows.topology_row(topology))

    def topology(self, hardware: HardwareProfile, num_ranks: int, num_hosts: int) -> Topology | None:
        query = (
            select(TopologyRow.record)
            .where(
                TopologyRow.hardware_fingerprint == hardware.fingerprint,
                TopologyRow.num_ranks == num_ranks,
                TopologyRow.num_hosts == num_hosts,
            )
            .order_by(TopologyRow.measured_at.desc(), TopologyRow.host_of_rank)
            .limit(1)
        )
        with reading(self._engine) as session:
            record = session.scalar(query)
            return None if record is None else decode(record, Topology)

    # --- events and artifacts --------------------------------------------------------------------

    def add_event(self, study_id: str, kind: str, data: dict[str, Any], *, again: bool = False) -> None:
        """Add an event, as the protocol specifies.

        Args:
            again: The event was sent before and may be stored: it is if the newest event of its kind has the same data.
        """
        with self._writing(study_id, pages_change=False, version=QueueEntryRow.version) as session:
            if not again or _newest_data(session, study_id, kind) != json.decode(json.encode(data)):
                write_event(session, study_id, kind, data)

    def events(self, study_id: str, after: int = 0) -> list[Event]:
        query = (
            select(EventRow).where(EventRow.study_id == study_id, EventRow.event_id > after).order_by(EventRow.event_id)
        )
        with reading(self._engine) as session:
            return [rows.event_of(row) for row in session.scalars(query)]

    def add_artifact(self, study_id: str, trial_id: str | None, kind: str, digest: str, size_bytes: int) -> None:
        with self._writing(study_id) as session:
            _study_row(session, study_id)
            if trial_id is not None:
                trial = session.get(TrialRow, trial_id)
                if trial is None or trial.study_id != study_id:
                    raise store_rules.unknown_trial(trial_id)
            same = {"study_id": study_id, "trial_id": trial_id, "kind": kind, "digest": digest}
            if session.scalars(select(ArtifactRow.artifact_id).filter_by(**same)).first() is not None:
                return
            session.add(
                ArtifactRow(
                    study_id=study_id,
                    trial_id=trial_id,
                    kind=kind,
                    digest=digest,
                    size_bytes=size_bytes,
                    created_at=datetime.now(UTC),
                )
            )

    def artifacts(self, study_id: str) -> list[Artifact]:
        query = select(ArtifactRow).where(ArtifactRow.study_id == study_id).order_by(ArtifactRow.artifact_id)
        with reading(self._engine) as session:
            return [rows.artifact_of(row) for row in session.scalars(query)]

    def _write_state_event(self, session: Session, study_id: str, state: StudyState, message: str) -> None:
        if self._lease is not None:
            write_event(session, study_id, "state", {"state": state.value, "message": message})

    @contextmanager
    def _writing(self, *study_ids: str, pages_change: bool = True, **changes: Any) -> Iterator[Session]:
        """Check the lease, and open one writing transaction on these studies.

        Args:
            pages_change: Whether the writes change pages of the studies.
            changes: Changes to the queue entry, if there is a lease.

        Raises:
            LeaseLostError: The lease is over.
        """
        with writing(self._engine) as session:
            if self._lease is not None:
                for study_id in study_ids:
                    hold(session, self._lease, study_id, **changes)
            if pages_change:
                count_change(session, StudyRow.study_id.in_(study_ids))
            yield session


NUMBERS_MODULO = 1 << 31
"""Modulus of event numbers in the keys of locks, which have 31 bits for a number."""
MAX_PAUSE_MS = 30_000
_DRAWS_A_NUMBER = select(
    func.set_config("idle_in_transaction_session_timeout", str(MAX_PAUSE_MS), True),
    func.pg_advisory_xact_lock_shared(
        advisory_locks.EVENT_NUMBERS,
        cast_to(select(func.coalesce(func.max(EventRow.event_id), 0)).scalar_subquery() % NUMBERS_MODULO, Integer),
    ),
)
"""Statement to execute before an event's number is allocated. Readers do not see events with later numbers until the
transaction ends; if its process stops or its host is lost, the server ends the transaction.
"""
_INSERTS: dict[str, Callable[[Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
_NEWEST_FIRST = (StudyRow.created_at.desc(), StudyRow.study_id.desc())


def _of_same_owner(study_id: str) -> ColumnElement[bool]:
    """Return the SQL condition that a study has the same owner as the given study; studies of the command line have no
    owner.
    """
    owner = select(StudyRow.owner_id).where(StudyRow.study_id == study_id).scalar_subquery()
    return StudyRow.owner_id.is_not_distinct_from(owner)


def _study_row(session: Session, study_id: str) -> StudyRow:
    """Return the row of a study for writing, locked until the transaction ends (SQLite locks everything)."""
    row = session.get(StudyRow, study_id, with_for_update=True)
    if row is None:
        raise store_rules.unknown_study(study_id)
    return row


def _complete(session: Session, result: TrialResult, lease: Lease | None) -> None:
    """Write a result unless its trial already has one; the statement itself checks that."""
    state = store_rules.state_after(result)
    completion = (
        update(TrialRow)
        .where(TrialRow.trial_id == result.trial_id, TrialRow.state == TrialState.RUNNING.value)
        .where(TrialRow.study_id == lease.study_id if lease is not None else true())
        .values(
            state=state.value,
            failure_kind=None if result.failure is None else result.failure.kind.value,
            result=encode(result),
        )
    )
    if cast(CursorResult[Any], session.execute(completion)).rowcount != 1:
        found = session.scalar(select(TrialRow.state).where(TrialRow.trial_id == result.trial_id))
        raise store_rules.completion_refused(result.trial_id, TrialState(found) if found else None)
    if result.repeated:
        first = session.scalars(select(TrialAttemptRow).where(TrialAttemptRow.trial_id == result.trial_id)).one()
        session.add_all(rows.repeated_rows(result, first))
        session.flush()
    _end_attempts(session, [result.trial_id], state)
    session.add_all(rows.result_rows(result))


def _replace_decisions(session: Session, study_id: str, decisions: Sequence[Decision]) -> None:
    session.execute(delete(DecisionRow).where(DecisionRow.study_id == study_id))
    session.add_all(rows.decision_row(study_id, decision) for decision in decisions)
    session.flush()


def _summarise(session: Session, results: Sequence[TrialResult]) -> None:
    """Write the summaries of trials that completed together to their rows, and advance the revisions of their
    studies.
    """
    completed = TrialRow.trial_id.in_([result.trial_id for result in results])
    for study_id in session.scalars(select(TrialRow.study_id).where(completed).distinct()).all():
        query = select(TrialRow.result).where(TrialRow.study_id == study_id, TrialRow.result.is_not(None))
        starts = query.where(TrialRow.purpose == Purpose.BASELINE.value).order_by(TrialRow.sequence)
        measured = [start for text in session.scalars(starts) if (start := decode(text or "", TrialResult)).ok]
        today = [r for r in results if measured and r.ok and r.candidate == measured[0].candidate]
        references = [*measured, *(r for r in today if r.purpose is not Purpose.BASELINE)]
        count_change(session, StudyRow.study_id == study_id)
        for result in results:
            figures = figures_of(result, references)._asdict()
            of_study = TrialRow.study_id == study_id
            session.execute(update(TrialRow).where(TrialRow.trial_id == result.trial_id, of_study).values(figures))


def count_change(session: Session, changed: ColumnElement[bool]) -> None:
    """Advance the revision of these studies, so that cached pages count as outdated."""
    session.execute(
        update(StudyRow)
        .where(changed)
        .values(revision=StudyRow.revision + 1)
        .execution_options(synchronize_session=False)
    )


def _write_strategies(session: Session, recommendation: Recommendation) -> None:
    """Write the outcome of each strategy, from the stored decisions."""
    study_id = recommendation.study_id
    told = session.scalars(select(DecisionRow.record).where(DecisionRow.study_id == study_id))
    decisions = [decode(record, Decision) for record in told]
    session.execute(delete(StrategyOutcomeRow).where(StrategyOutcomeRow.study_id == study_id))
    session.add_all(rows.strategy_rows(recommendation, decisions))


def lose_trials(session: Session, study_id: str) -> int:
    """Mark all running trials of a study as lost; return how many."""
    loss = (
        update(TrialRow)
        .where(TrialRow.study_id == study_id, TrialRow.state == TrialState.RUNNING.value)
        .values(state=TrialState.LOST.value)
        .returning(TrialRow.trial_id)
    )
    lost = session.scalars(loss).all()
    _end_attempts(session, lost, TrialState.LOST)
    return len(lost)


def write_event(session: Session, study_id: str, kind: str, data: dict[str, Any]) -> None:
    """Append an event. Because the study is locked, its events become visible in the order of their numbers. Across
    studies, the order is certain up to the number that `steptune.service.queries.events.horizon` returns.
    """
    owner_id = _study_row(session, study_id).owner_id
    if session.get_bind().dialect.name == "postgresql":
        session.execute(_DRAWS_A_NUMBER)
    at = datetime.now(UTC)
    event = Event(sequence=0, study_id=study_id, at=at.isoformat(), kind=kind, data=data)
    session.add(rows.event_row(event, at, owner_id))
    session.flush()


def _newest_data(session: Session, study_id: str, kind: str) -> dict[str, Any] | None:
    """Return the data of the last event of a kind."""
    of_kind = select(EventRow).where(EventRow.study_id == study_id, EventRow.kind == kind)
    row = session.scalars(of_kind.order_by(EventRow.event_id.desc()).limit(1)).one_or_none()
    return None if row is None else rows.event_of(row).data


def write_study(session: Session, study: Study) -> None:
    """Insert or replace a study, and the workload and the hardware that it refers to."""
    if study.facts is not None:
        _upsert(session, rows.workload_row(study.facts))
    if study.environment is not None:
        _upsert(session, rows.hardware_row(study.environment.hardware))
    _upsert(session, rows.study_row(study))


def write_state(session: Session, row: StudyRow, state: StudyState, message: str) -> bool:
    """Change the state and message of a study in its own row only; return whether either differed before."""
    stored = decode(row.record, Study)
    row.state, row.record = state.value, encode(replace(stored, state=state, message=message))
    session.flush()
    return (stored.state, stored.message) != (state, message)


def insert_missing(session: Session, row: Base) -> None:
    """Insert a row unless one with its key exists."""
    table, values = _table_and_values(row)
    insert = _INSERTS[session.get_bind().dialect.name](table).values(values)
    session.execute(insert.on_conflict_do_nothing())


def _upsert(session: Session, row: Base) -> None:
    """Insert a row, or, if its key exists, replace the columns that the row sets. Another process may insert the same
    key meanwhile.
    """
    table, values = _table_and_values(row)
    insert = _INSERTS[session.get_bind().dialect.name](table).values(values)
    others = {name: insert.excluded[name] for name in values if not table.columns[name].primary_key}
    session.execute(insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=others))


def _table_and_values(row: Base) -> tuple[Table, dict[str, Any]]:
    """Return the table of a row and the columns that the row sets."""
    table = cast(Table, row.__table__)
    return table, {c.name: getattr(row, c.name) for c in table.columns if c.name in row.__dict__}


def _full_id(session: Session, text: str) -> str:
    """Return the id of the only study whose id begins or ends with `text`.

    Raises:
        StudyNotFoundError: No study matches, or more than one.
    """
    begins_or_ends = or_(
        StudyRow.study_id.startswith(text, autoescape=True), StudyRow.study_id.endswith(text, autoescape=True)
    )
    likely = session.scalars(select(StudyRow.study_id).where(begins_or_ends))
    matches = [study_id for study_id in likely if store_rules.fits(study_id, text)]  # LIKE may ignore case
    newest = session.scalars(select(StudyRow.study_id).order_by(*_NEWEST_FIRST).limit(store_rules.NUM_IDS_SHOWN))
    return store_rules.only_match(text, matches, newest.all())


def _end_attempts(session: Session, trial_ids: Sequence[str], outcome: TrialState) -> None:
    session.execute(
        update(TrialAttemptRow)
        .where(TrialAttemptRow.trial_id.in_(trial_ids), TrialAttemptRow.ended_at.is_(None))
        .values(outcome=outcome.value, ended_at=datetime.now(UTC))
    )

"""Which files and rows are removed, and which never are."""

import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from builders import sample_decision, sample_recommendation, sample_study, sample_trial
from msgspec.structs import replace
from sqlalchemy import Engine, delete, select

from steptune.service.artifacts import ArtifactStore
from steptune.service.artifacts.collection import Collected, collect_garbage
from steptune.service.artifacts.files import LocalFiles
from steptune.service.artifacts.retention import apply_quotas, release_traces, user_artifact_bytes
from steptune.service.connections import create_engine_for, reading, writing
from steptune.service.database import migrate
from steptune.service.housekeeping import keep_house
from steptune.service.models import (
    ArtifactRow,
    AuditRow,
    BrowserSessionRow,
    IdempotencyKeyRow,
    QueueEntryRow,
    StudyRow,
    UserRow,
    WorkloadSourceRow,
)
from steptune.service.progress import EVENT
from steptune.service.settings import Settings
from steptune.service.store import SqlStudyStore
from steptune.tuner.records import BASELINE, Candidate, StudyState

NOW = datetime.now(UTC)
OTHER = Candidate(choices={"cpu_threads": {"intra_op": 1}})
RECOMMENDED = sample_recommendation().candidate


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request, tmp_path) -> Iterator[Engine]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/steptune.db"
        migrate(url)
    else:
        url = request.getfixturevalue("postgres_url")
    engine = create_engine_for(url)
    yield engine
    engine.dispose()


@pytest.fixture
def store(engine) -> SqlStudyStore:
    return SqlStudyStore(engine)


@pytest.fixture
def artifacts(tmp_path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def user(engine) -> str:
    with writing(engine) as session:
        session.add(UserRow(user_id="ada", name="ada", scopes="submit", created_at=NOW))
    return "ada"


def age(artifacts: ArtifactStore, digest: str, seconds: float) -> None:
    with artifacts.local_copy(digest) as path:
        then = time.time() - seconds
        os.utime(path, (then, then))


def kept(artifacts: ArtifactStore) -> set[str]:
    return {file.name for file in artifacts.list()}


def add_study(store: SqlStudyStore, study_id: str, *, state: StudyState = StudyState.COMPLETED, owner=None) -> str:
    """A study with a recommendation."""
    if any(study.study_id == study_id for study in store.list_studies()):
        return study_id
    store.create_study(sample_study(study_id=study_id, state=state))
    store.save_recommendation(sample_recommendation(study_id=study_id))
    with writing(store._engine) as session:
        session.get_one(StudyRow, study_id).owner_id = owner
    return study_id


def add_trace(store: SqlStudyStore, study_id: str, candidate: Candidate, size: int, *, kind: str = "trace") -> str:
    """The digest of a trace of a new trial."""
    number = len(store.trials(study_id))
    trial = sample_trial(trial_id=f"{study_id}-{number}", study_id=study_id, sequence=number, candidate=candidate)
    store.begin_trials([trial])
    digest = f"{abs(hash((study_id, number))):064x}"[-64:]
    store.add_artifact(study_id, trial.trial_id, kind, digest, size)
    return digest


def digests(engine: Engine) -> set[str]:
    with reading(engine) as session:
        return set(session.scalars(select(ArtifactRow.digest)))


class TestCollection:
    def test_only_old_files_without_a_row_go(self, engine, store, artifacts, user):
        """A row of a trial or of an upload keeps a file; its youth keeps one whose row is still to be written."""
        store.create_study(sample_study())
        trace, upload, young, garbage = (artifacts.put([name]).digest for name in (b"t", b"u", b"y", b"garbage"))
        store.add_artifact(sample_study().study_id, None, "trace", trace, 1)
        with writing(engine) as session:
            session.add(
                WorkloadSourceRow(
                    source_id="s", owner_id=user, kind="file", name="a.py", entry="a.py:A", digest=upload,
                    size_bytes=1, created_at=NOW,
                )
            )  # fmt: skip
        for digest in (trace, upload, garbage):
            age(artifacts, digest, 100)
        assert collect_garbage(engine, artifacts, grace_s=50, dry_run=True).num_files == 1
        assert kept(artifacts) == {trace, upload, young, garbage}
        assert collect_garbage(engine, artifacts, grace_s=50) == Collected(num_files=1, size_bytes=len(b"garbage"))
        assert kept(artifacts) == {trace, upload, young}

    def test_files_go_with_the_study(self, engine, store, artifacts):
        """Deleting the study is enough."""
        store.create_study(sample_study())
        digest = artifacts.put([b"trace"]).digest
        store.add_artifact(sample_study().study_id, None, "trace", digest, 5)
        age(artifacts, digest, 100)
        assert collect_garbage(engine, artifacts, grace_s=50).num_files == 0
        with writing(engine) as session:
            session.execute(delete(StudyRow))
        assert collect_garbage(engine, artifacts, grace_s=50).num_files == 1

    def test_age_is_measured_by_the_clock_of_the_files(self, engine, tmp_path):
        """Whose host may be behind this one."""

        class Behind(LocalFiles):
            def find(self, name):
                found = super().find(name)
                return None if found is None else replace(found, modified_s=found.modified_s - 1000)

        artifacts = ArtifactStore(Behind(tmp_path / "artifacts"))
        digest = artifacts.put([b"garbage"]).digest
        assert collect_garbage(engine, artifacts, grace_s=50).num_files == 0
        age(artifacts, digest, 100)
        assert collect_garbage(engine, artifacts, grace_s=50).num_files == 1
        assert list(artifacts._files.list()) == []

    def test_a_file_that_is_put_again_is_young_again(self, engine, artifacts):
        """Another trial makes the same trace after its first study was deleted."""
        digest = artifacts.put([b"trace"]).digest
        age(artifacts, digest, 100)
        artifacts.put([b"trace"])
        assert collect_garbage(engine, artifacts, grace_s=50).num_files == 0

    def test_no_file_is_collected_between_its_put_and_its_row(self, engine, store, artifacts):
        """Even where the grace period is nothing and the same content was garbage a moment ago."""
        store.create_study(sample_study())
        stop = threading.Event()
        errors: list[BaseException] = []

        def put(writer: int) -> None:
            try:
                for number in range(15):
                    with artifacts.putting([b"%d" % (number % 4)]) as file:
                        study_id = f"{writer}-{number}"
                        store.create_study(sample_study(study_id=study_id))
                        store.add_artifact(study_id, None, "trace", file.digest, file.size_bytes)
                    assert file.digest in kept(artifacts)
                    with writing(engine) as session:
                        session.execute(delete(StudyRow).where(StudyRow.study_id == study_id))
            except BaseException as error:
                errors.append(error)

        def collect() -> None:
            try:
                while not stop.is_set():
                    collect_garbage(engine, artifacts, grace_s=-1)
            except BaseException as error:
                errors.append(error)

        collector = threading.Thread(target=collect)
        writers = [threading.Thread(target=put, args=(writer,)) for writer in range(3)]
        for thread in (collector, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        collector.join()
        assert errors == []
        collect_garbage(engine, artifacts, grace_s=-1)
        assert kept(artifacts) == set()


class TestRetention:
    def test_traces_of_baseline_incumbents_finalists_and_the_recommendation_stay(self, engine, store):
        """Those of other trials go when the study has ended, and not before; timelines always stay."""
        incumbent = Candidate(choices={"cpu_threads": {"intra_op": 2}})
        for study_id, state in (("ended", StudyState.COMPLETED), ("running", StudyState.RUNNING)):
            add_study(store, study_id, state=state)
            store.replace_decisions(
                study_id,
                [
                    sample_decision(1, candidate=incumbent, verdict="accepted"),
                    sample_decision(2, candidate=OTHER, verdict="no_gain"),
                ],
            )
        wanted = {add_trace(store, "ended", candidate, 1) for candidate in (BASELINE, incumbent, RECOMMENDED)}
        wanted |= {add_trace(store, "running", OTHER, 1), add_trace(store, "ended", OTHER, 1, kind="timeline")}
        add_trace(store, "ended", OTHER, 1)
        assert release_traces(engine) == 1
        assert digests(engine) == wanted

    def test_those_of_further_ranks_go_like_rank_0_s(self, engine, store):
        wanted = {add_trace(store, add_study(store, "ended"), BASELINE, 1, kind="trace.1")}
        add_trace(store, "ended", OTHER, 1, kind="trace.1")
        assert release_traces(engine) == 1
        assert digests(engine) == wanted

    def test_a_failed_study_without_a_recommendation_keeps_the_baseline_s(self, engine, store):
        """It shows what went wrong."""
        store.create_study(sample_study(study_id="failed", state=StudyState.FAILED))
        wanted = add_trace(store, "failed", BASELINE, 1)
        add_trace(store, "failed", OTHER, 1)
        release_traces(engine)
        assert digests(engine) == {wanted}

    def test_the_oldest_traces_of_ended_studies_go_first_and_the_recommendation_s_never(self, engine, store):
        """Until what is left fits into the instance's quota."""
        old = [
            add_trace(store, add_study(store, "old"), candidate, 100) for candidate in (BASELINE, RECOMMENDED, OTHER)
        ]
        running = add_trace(store, add_study(store, "running", state=StudyState.RUNNING), BASELINE, 100)
        new = [add_trace(store, add_study(store, "new"), candidate, 100) for candidate in (BASELINE, RECOMMENDED)]
        settings = Settings(max_artifact_bytes=450)
        assert apply_quotas(engine, settings) == 2
        assert digests(engine) == {old[1], running, *new}
        assert apply_quotas(engine, settings) == 0
        apply_quotas(engine, Settings(max_artifact_bytes=0))
        assert digests(engine) == {old[1], running, new[1]}

    def test_a_study_s_quota_concerns_that_study_alone(self, engine, store):
        large = [add_trace(store, add_study(store, "large"), OTHER, 100) for _ in range(1)]
        large += [add_trace(store, "large", OTHER, 100) for _ in range(2)]
        small = add_trace(store, add_study(store, "small"), OTHER, 100)
        assert apply_quotas(engine, Settings(max_study_artifact_bytes=200)) == 1
        assert digests(engine) == {small, *large[1:]}

    def test_content_that_trials_of_a_study_share_counts_once(self, engine, store):
        """And within a study's quota it is free with the study's last row, whoever else has it."""
        for study_id, candidates in (("mine", (OTHER, OTHER, BASELINE)), ("other", (OTHER,))):
            add_study(store, study_id)
            for number, candidate in enumerate(candidates):
                trial = sample_trial(
                    trial_id=f"{study_id}-{number}", study_id=study_id, sequence=number, candidate=candidate
                )
                store.begin_trials([trial])
                digest = "cd" * 32 if candidate is OTHER else "ef" * 32
                store.add_artifact(study_id, trial.trial_id, "trace", digest, 100)
        assert apply_quotas(engine, Settings(max_study_artifact_bytes=200)) == 0
        assert apply_quotas(engine, Settings(max_study_artifact_bytes=100)) == 2
        assert [artifact.digest for artifact in store.artifacts("mine")] == ["ef" * 32]
        assert len(store.artifacts("other")) == 1

    def test_what_a_user_s_quota_removed_is_not_asked_for_again(self, engine, store, user):
        """All together take no more than they may after it."""
        mine = [add_trace(store, add_study(store, f"mine-{n}", owner=user), OTHER, 100) for n in range(2)]
        other = [add_trace(store, add_study(store, f"other-{n}"), OTHER, 100) for n in range(2)]
        assert apply_quotas(engine, Settings(max_user_artifact_bytes=100, max_artifact_bytes=300)) == 1
        assert digests(engine) == {mine[1], *other}

    def test_a_user_s_own_quota_wins_over_the_settings(self, engine, store, user):
        """Studies of others are not touched; uploads count, and stay."""
        with writing(engine) as session:
            session.get_one(UserRow, user).max_artifact_bytes = 120
            session.add(
                WorkloadSourceRow(
                    source_id="s", owner_id=user, kind="file", name="a.py", entry="a.py:A", digest="ab" * 32,
                    size_bytes=50, created_at=NOW,
                )
            )  # fmt: skip
        mine = [add_trace(store, add_study(store, f"mine-{n}", owner=user), OTHER, 50) for n in range(3)]
        other = add_trace(store, add_study(store, "other"), OTHER, 500)
        with reading(engine) as session:
            assert user_artifact_bytes(session, user) == 200
        assert apply_quotas(engine, Settings(max_user_artifact_bytes=10_000)) == 2
        assert digests(engine) == {mine[2], other}

    def test_content_that_several_rows_share_frees_nothing_until_the_last_goes(self, engine, store):
        """Counting it twice would give up traces in vain, or too few."""
        for name in ("first", "second"):
            add_study(store, name)
            trial = sample_trial(trial_id=name, study_id=name, candidate=OTHER)
            store.begin_trials([trial])
            store.add_artifact(name, name, "trace", "cd" * 32, 100)
        last = add_trace(store, add_study(store, "third"), OTHER, 100)
        assert apply_quotas(engine, Settings(max_artifact_bytes=200)) == 0
        assert apply_quotas(engine, Settings(max_artifact_bytes=100)) == 2
        assert digests(engine) == {last}


def test_what_is_expired_is_forgotten(engine, artifacts, user, monkeypatch):
    """Keys after a day, sessions when they end, audit entries after the days of the settings; by the database's clock,
    whatever that of this host says.
    """
    monkeypatch.setattr("steptune.service.housekeeping.database_now", lambda session: NOW + timedelta(days=30))
    with writing(engine) as session:
        for name, hours in (("old", 25), ("new", 23)):
            at = NOW + timedelta(days=30) - timedelta(hours=hours)
            session.add(IdempotencyKeyRow(user_id=user, key=name, request_sha256="", created_at=at))
            session.add(
                BrowserSessionRow(
                    session_sha256=name, user_id=user, scopes="read", created_at=at,
                    expires_at=at + timedelta(hours=24),
                )
            )  # fmt: skip
            session.add(AuditRow(at=at, action=name, target="", outcome="", request_id="", detail=""))
    report = keep_house(engine, artifacts, Settings(audit_days=1))
    assert (report.num_idempotency_keys, report.num_sessions, report.num_audit_entries) == (1, 1, 1)
    with reading(engine) as session:
        assert session.scalars(select(IdempotencyKeyRow.key)).all() == ["new"]
        assert session.scalars(select(BrowserSessionRow.session_sha256)).all() == ["new"]
        assert session.scalars(select(AuditRow.action)).all() == ["new"]


def test_what_went_on_in_a_study_is_forgotten_a_day_after_its_end(engine, store, artifacts, monkeypatch):
    """News of its state are kept, as is everything of studies that go on."""
    monkeypatch.setattr("steptune.service.housekeeping.database_now", lambda session: NOW)
    for name, ended_at in (("old", NOW - timedelta(hours=25)), ("new", NOW - timedelta(hours=23)), ("running", None)):
        add_study(store, name, state=StudyState.COMPLETED if ended_at else StudyState.RUNNING)
        with writing(engine) as session:
            session.add(QueueEntryRow(study_id=name, queued_at=NOW, ended_at=ended_at))
        for kind in ("state", EVENT):
            store.add_event(name, kind, {})
    assert keep_house(engine, artifacts, Settings(_env_file=None)).num_progress_events == 1
    kinds = {name: [event.kind for event in store.events(name)] for name in ("old", "new", "running")}
    assert EVENT not in kinds["old"]
    assert "state" in kinds["old"]
    assert EVENT in kinds["new"]
    assert EVENT in kinds["running"]


def test_what_was_asked_of_a_worker_that_died_is_done(engine, store, artifacts):
    add_study(store, "study", state=StudyState.RUNNING)
    with writing(engine) as session:
        session.add(
            QueueEntryRow(study_id="study", queued_at=NOW, lease_until=NOW - timedelta(hours=1), requested="cancel")
        )
    keep_house(engine, artifacts, Settings(_env_file=None))
    assert store.get_study("study").state is StudyState.CANCELLED

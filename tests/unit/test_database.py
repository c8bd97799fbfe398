"""The database: its schema, its rows, and what it says when it cannot be used."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from builders import (
    CANDIDATE,
    STUDY_ID,
    TRIAL_ID,
    failed_result,
    sample_breakdown,
    sample_decision,
    sample_environment,
    sample_facts,
    sample_finding,
    sample_recommendation,
    sample_result,
    sample_study,
    sample_trial,
)
from msgspec.structs import replace
from sqlalchemy import Engine, delete, event, func, inspect, select, update

from steptune.dashboards.trial_headline import get_trial_headline
from steptune.service import database
from steptune.service.connections import create_engine_for, reading, writing
from steptune.service.database import check_schema, known_revisions, migrate, open_store
from steptune.service.models import (
    Base,
    BreakdownRow,
    CollectiveStatsRow,
    DecisionRow,
    FindingRow,
    GapStatsRow,
    HardwareProfileRow,
    KernelStatsRow,
    RecommendationRow,
    StudyRow,
    TrialAttemptRow,
    TrialRow,
    WorkloadRow,
)
from steptune.service.queries.trials import list_attempts, trial_detail
from steptune.service.rows import hardware_row
from steptune.service.store import SqlStudyStore
from steptune.service.trial_source import KeptTrials
from steptune.tuner.errors import (
    MissingDependencyError,
    SchemaOutdatedError,
    SchemaTooNewError,
    StorageFullError,
    StoreError,
)
from steptune.tuner.records import Artifact, Attempt, Event, SampleUnit, TrialState
from steptune.tuner.store_rules import decode, encode


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "steptune.db"


@pytest.fixture
def url(path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def engine(url) -> Iterator[Engine]:
    """Engine of a migrated database."""
    engine = create_engine_for(url)
    migrate(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def store(engine) -> SqlStudyStore:
    """With one study and one running trial."""
    store = SqlStudyStore(engine)
    store.create_study(sample_study())
    store.begin_trials([sample_trial()])
    return store


@pytest.fixture
def newer_migrations(tmp_path) -> Path:
    """Migrations of a later version: the same revisions and one more."""
    directory = tmp_path / "newer" / "migrations"
    shutil.copytree(database.MIGRATIONS, directory, ignore=shutil.ignore_patterns("__pycache__"))
    latest = max(path.name[:4] for path in (directory / "versions").glob("0*.py"))
    (directory / "versions" / "9999_later.py").write_text(
        "import sqlalchemy as sa\n"
        "from alembic import op\n"
        f"revision, down_revision = '9999', '{latest}'\n"
        "def upgrade():\n"
        "    op.add_column('studies', sa.Column('later', sa.Text()))\n",
        encoding="utf-8",
    )
    return directory


class TestSchema:
    def test_the_migrated_schema_is_that_of_the_models(self, engine):
        """Alembic finds nothing to change: no column, type, index, key or constraint."""
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []

    def test_the_known_revisions_are_those_that_alembic_finds(self):
        found = ScriptDirectory(str(database.MIGRATIONS)).walk_revisions()
        assert known_revisions() == tuple(script.revision for script in found)

    def test_a_new_file_gets_its_directory_and_its_tables(self, tmp_path):
        """Nothing needs to be set up before the first study; odd names are names."""
        path = tmp_path / "made of" / "100%" / "steptune.db"
        store = open_store(f"sqlite:///{path}")
        store.create_study(sample_study())
        store.close()
        store = open_store(f"sqlite:///{path}")
        assert store.list_studies() == [sample_study()]
        store.close()

    def test_migrating_twice_changes_nothing(self, url, store):
        """`steptune db upgrade` may be run at any time."""
        migrate(url)
        assert store.list_studies() == [sample_study()]

    def test_an_outdated_database_is_refused_with_the_command(self, monkeypatch, newer_migrations, url, store):
        """It is not changed behind the user's back; after the command it opens, with what it held."""
        monkeypatch.setattr(database, "MIGRATIONS", newer_migrations)
        with pytest.raises(SchemaOutdatedError, match=r"steptune\.db has an older schema.*run `steptune db upgrade`"):
            open_store(url)
        migrate(url)
        opened = open_store(url)
        assert opened.list_studies() == [sample_study()]
        opened.close()

    def test_a_newer_database_is_refused(self, monkeypatch, newer_migrations, url, engine):
        """The message says which revision it is at and what to install; migrating refuses likewise."""
        with monkeypatch.context() as later:
            later.setattr(database, "MIGRATIONS", newer_migrations)
            migrate(engine)
        for use in (open_store, migrate):
            with pytest.raises(SchemaTooNewError, match=r"revision '9999', which Steptune .* does not know.*install"):
                use(url)

    def test_a_database_without_tables_is_outdated(self, url):
        """Checking changes nothing, not even an empty file."""
        engine = create_engine_for(url)
        with pytest.raises(SchemaOutdatedError, match="has no tables yet: run `steptune db upgrade`"):
            check_schema(engine)
        assert inspect(engine).get_table_names() == []
        engine.dispose()

    def test_the_database_of_something_else_is_refused(self, path, url):
        """No tables are mixed into it."""
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.close()
        for use in (open_store, migrate):
            with pytest.raises(StoreError, match=r"the database of another program \(tables recipes\)"):
                use(url)


class TestTrouble:
    def test_a_file_that_is_no_database(self, path, url):
        """It is named, and left alone."""
        path.write_text("a text\n" * 100, encoding="utf-8")
        with pytest.raises(StoreError, match=r"steptune\.db is not a SQLite database"):
            open_store(url)
        assert path.read_text(encoding="utf-8").startswith("a text")

    def test_a_file_that_may_not_be_written_can_be_read(self, path, store):
        """Writing says what to check. (Opened read-only, since permissions do not bind root.)"""
        opened = open_store(f"sqlite:///file:{path}?mode=ro&uri=true")
        assert opened.list_studies() == [sample_study()]
        with pytest.raises(StoreError, match="cannot be written: check the permissions"):
            opened.create_study(sample_study(study_id="another"))
        opened.close()

    def test_a_directory_that_cannot_be_made(self, tmp_path):
        """A file stands where the directory should be."""
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match=r"x\.db cannot be used: .*Not a directory"):
            open_store(f"sqlite:///{tmp_path}/file/below/x.db")

    def test_a_full_database(self, path, engine, store):
        """The message names the file and the way out; what was there stays."""
        with engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        on_each_connection(engine, f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(
            StorageFullError,
            match=rf"{path} or the disk that holds it is full: free some space; all earlier records are kept",
        ):
            store.add_event(STUDY_ID, "large", {"text": "x" * 100_000})
        assert store.events(STUDY_ID) == []
        assert store.list_studies() == [sample_study()]

    def test_a_full_disk_before_the_first_study(self, url):
        """Migrating is a transaction: an unfinished schema is never left behind."""
        engine = create_engine_for(url)
        on_each_connection(engine, "PRAGMA max_page_count = 4")
        with pytest.raises(StorageFullError):
            migrate(engine)
        assert inspect(engine).get_table_names() == []
        engine.dispose()

    def test_a_database_that_another_process_is_writing(self, url, engine, store):
        """After its patience it says that the database is locked."""
        impatient = create_engine_for(url)
        on_each_connection(impatient, "PRAGMA busy_timeout = 0")
        with writing(engine) as session:
            session.connection()
            with pytest.raises(StoreError, match="is locked: another process"):
                SqlStudyStore(impatient).add_event(STUDY_ID, "state", {})
        impatient.dispose()

    def test_a_stored_record_that_cannot_be_read(self, engine, store):
        """Neither guessed nor skipped: the message says which kind of record, and why."""
        with writing(engine) as session:
            session.execute(update(StudyRow).values(record='{"study_id": 1}'))
        with pytest.raises(StoreError, match=r"a stored Study cannot be read .*Expected `str`, got `int`"):
            store.get_study(STUDY_ID)

    @pytest.mark.parametrize(
        ("url", "error", "message"),
        [
            ("steptune.db", StoreError, "'steptune.db' is not a database URL; write it like sqlite:///"),
            ("mysql://me:secret@host/db", StoreError, "is neither SQLite nor PostgreSQL"),
            ("postgresql+absent://me:secret/with@host/db", StoreError, "is not a database URL"),
        ],
    )
    def test_an_url_that_cannot_be_used(self, url, error, message):
        """It is quoted without its password."""
        with pytest.raises(error, match=message) as caught:
            create_engine_for(url)
        assert "secret" not in str(caught.value)

    def test_a_driver_that_is_not_installed(self, monkeypatch):
        """The message names the package."""
        monkeypatch.setitem(sys.modules, "psycopg", None)
        with pytest.raises(MissingDependencyError, match="needs the package psycopg"):
            create_engine_for("postgresql+psycopg://host/db")


class TestRows:
    def test_a_result_fills_the_tables_that_are_searched(self, engine, store):
        store.complete_trials([sample_result()])
        with reading(engine) as session:
            findings = session.scalars(select(FindingRow).order_by(FindingRow.number)).all()
            assert [(row.rule, row.severity, row.bound) for row in findings] == [
                ("data_wait", "high", 0.1),
                ("launch_gap", "note", 0.05),
            ]

    def test_a_record_that_lacks_a_column_of_its_row_is_refused(self):
        """Also one that may be NULL: nothing is left out by a change of a name."""
        with pytest.raises(AttributeError, match="fingerprint"):
            hardware_row(sample_finding())

    def test_the_profile_s_kernels_gaps_and_collectives_are_rows(self, engine, store):
        store.complete_trials([sample_result()])
        with reading(engine) as session:
            (kernel,) = session.scalars(select(KernelStatsRow)).all()
            (gap,) = session.scalars(select(GapStatsRow)).all()
            (collective,) = session.scalars(select(CollectiveStatsRow)).all()
            assert (kernel.name, kernel.category, kernel.count, kernel.total_ns) == ("gemm", "compute_matmul", 3, 30)
            assert (gap.category, gap.kernel_after, gap.total_ns) == ("host", "gemm", 7)
            assert (collective.name, collective.exposed_ns, collective.bus_bytes_per_s) == ("allreduce", 4, 1e9)

    def test_breakdown_rows_sum_to_the_step(self, engine, store):
        """Sums are by rank and device, as measured and (where known) rescaled."""
        store.complete_trials([sample_result()])
        sums = select(BreakdownRow.rank, func.sum(BreakdownRow.ns), func.sum(BreakdownRow.rescaled_ns))
        with reading(engine) as session:
            found = session.execute(sums.group_by(BreakdownRow.rank).order_by(BreakdownRow.rank)).all()
        assert [tuple(row) for row in found] == [
            (0, sample_breakdown().step_time_ns, sample_breakdown().unprofiled_step_time_ns),
            (1, sample_breakdown().step_time_ns, None),
        ]

    def test_a_result_is_recorded_as_a_whole_or_not_at_all(self, engine, store):
        """Where one row is refused (here: a category twice), the trial is still running."""
        with pytest.raises(StoreError, match="rejected a row"):
            store.complete_trials([sample_result(breakdowns=(sample_breakdown(), sample_breakdown()))])
        assert store.trials(STUDY_ID) == [sample_trial()]
        with reading(engine) as session:
            assert session.scalars(select(BreakdownRow)).all() == []

    def test_numbers_that_are_none_are_null(self, engine, store):
        """SQLite has no NaN; infinity is a number to compare with."""
        findings = (sample_finding(bound=float("nan")), sample_finding(bound=float("inf")))
        store.complete_trials([sample_result(findings=findings)])
        with reading(engine) as session:
            assert session.scalars(select(FindingRow.bound).order_by(FindingRow.number)).all() == [None, float("inf")]

    def test_an_attempt_says_how_it_ended(self, engine, store):
        """Running trials have one that has not."""
        store.begin_trials([sample_trial(trial_id="lost", sequence=4), sample_trial(trial_id="failed", sequence=5)])
        store.complete_trials([failed_result(trial_id="failed")])
        store.lose_running_trials(STUDY_ID)
        store.begin_trials([sample_trial(trial_id="running", sequence=6)])
        with reading(engine) as session:
            rows = {row.trial_id: row for row in session.scalars(select(TrialAttemptRow))}
            assert {name: row.outcome for name, row in rows.items()} == {
                TRIAL_ID: "lost",
                "lost": "lost",
                "failed": "failed",
                "running": "running",
            }
            assert {name for name, row in rows.items() if row.ended_at is None} == {"running"}
            assert rows["failed"].number == sample_trial().attempts
            assert rows["failed"].started_at.isoformat() == sample_trial().started_at

    def test_every_run_of_a_repeated_trial_is_an_attempt(self, engine, store):
        """With how it ended, one after the other; what the result is about is the last one."""
        store.begin_trials([sample_trial(trial_id="again", sequence=8)])
        killed = replace(failed_result().failure, traceback="")
        first = Attempt(failure=killed, began_at=sample_trial().started_at, duration_ns=2 * 10**9)
        result = sample_result(trial_id="again", repeated=(first, replace(first, duration_ns=10**9)))
        store.complete_trials([result])
        number = sample_trial().attempts
        with reading(engine) as session:
            wanted = select(TrialAttemptRow).where(TrialAttemptRow.trial_id == "again")
            rows = list(session.scalars(wanted.order_by(TrialAttemptRow.number)))
            assert [(row.number, row.outcome) for row in rows] == [
                (number, "failed"),
                (number + 1, "failed"),
                (number + 2, "completed"),
            ]
            assert all(row.ended_at is not None for row in rows)
        assert store.trial("again").attempts == number + 2
        assert len(list_attempts(engine, "again")) == 3
        view = KeptTrials(store, None).get_trial("again")
        detail = trial_detail(view, list_attempts(engine, "again"))
        assert [attempt.failure.signal for attempt in detail.repeated] == [11, 11]

    def test_page_and_rest_read_one_view_of_a_trial(self, engine, store):
        """Neither computes the summary anew."""
        store.complete_trials([sample_result()])
        trial_id = sample_result().trial_id
        with writing(engine) as session:
            session.execute(update(TrialRow).where(TrialRow.trial_id == trial_id).values(units_per_s=4320.0))
        view = KeptTrials(store, None).get_trial(trial_id)
        assert trial_detail(view, []).units_per_s == 4320.0
        assert get_trial_headline(view, SampleUnit.SAMPLE).title == "4,320 samples/s"

    def test_what_is_searched_is_a_column(self, engine, store):
        """Keys, kinds and figures of trials, decisions and recommendations."""
        store.complete_trials([failed_result()])
        store.replace_decisions(STUDY_ID, [sample_decision(1)])
        store.save_recommendation(sample_recommendation())
        with reading(engine) as session:
            trial = session.scalars(select(TrialRow)).one()
            assert (trial.state, trial.candidate_key, trial.purpose, trial.failure_kind) == (
                TrialState.FAILED,
                CANDIDATE.key,
                "explore",
                "crash",
            )
            decision = session.scalars(select(DecisionRow)).one()
            assert (decision.candidate_key, decision.verdict, decision.measured_gain) == (
                CANDIDATE.key,
                "accepted",
                0.0625,
            )
            answer = session.scalars(select(RecommendationRow)).one()
            assert (answer.gain, answer.verdict, answer.device_kind) == (1.5, "faster", "cuda")

    def test_a_workload_is_kept_once_as_last_inspected(self, engine, store):
        """One workload and one hardware profile for the same code on the same machine, however many studies."""
        facts = sample_facts(sample_loss=1.0)
        store.create_study(sample_study(study_id="again", facts=facts))
        store.create_study(sample_study(study_id="edited", facts=sample_facts(signature="another")))
        with reading(engine) as session:
            workloads = {row.signature: row for row in session.scalars(select(WorkloadRow))}
            assert set(workloads) == {facts.signature, "another"}
            assert decode(workloads[facts.signature].record, type(facts)) == facts
            (profile,) = session.scalars(select(HardwareProfileRow))
            assert profile.fingerprint == sample_environment().hardware.fingerprint

    def test_what_belongs_to_a_study_goes_with_it(self, engine, store):
        """Workloads and hardware profiles are shared, so they stay."""
        store.complete_trials([sample_result()])
        store.replace_decisions(STUDY_ID, [sample_decision()])
        store.save_recommendation(sample_recommendation())
        store.add_event(STUDY_ID, "state", {})
        store.add_artifact(STUDY_ID, TRIAL_ID, "trace", "ab" * 32, 1)
        with writing(engine) as session:
            session.execute(delete(StudyRow))
        with reading(engine) as session:
            left = {
                table.name
                for table in Base.metadata.sorted_tables
                if session.scalar(select(func.count()).select_from(table))
            }
        assert left == {"workloads", "hardware_profiles"}


@pytest.mark.parametrize(
    "record",
    [
        sample_study(),
        sample_trial(result=failed_result()),
        sample_result(),
        sample_decision(),
        sample_recommendation(),
        Event(sequence=1, study_id=STUDY_ID, at="2026-11-21T10:00:00+00:00", kind="state", data={"a": [1, None, "é"]}),
        Artifact(study_id=STUDY_ID, trial_id=None, kind="trace", digest="ab", size_bytes=1, created_at="2026"),
    ],
    ids=lambda record: type(record).__name__,
)
def test_every_record_comes_back_from_its_text(record):
    """And the text is ASCII, whatever a traceback held."""
    text = encode(record)
    assert text.isascii()
    assert decode(text, type(record)) == record


def test_the_service_loads_no_torch():
    """The processes that keep the database are small: torch would triple them."""
    code = "import sys, steptune.service.database, steptune.service.artifacts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def on_each_connection(engine: Engine, statement: str) -> None:
    """Runs a statement on each connection from now on."""
    event.listen(engine, "connect", lambda connection, record: connection.execute(statement))
    engine.dispose()

"""Every released schema becomes this one on both engines, and what it held is still there.

What a released revision holds is under `released/`; `released/dump.py` made it with the code of that revision.
"""

import json
from collections.abc import Iterator
from datetime import datetime

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from builders import STUDY_ID, TRIAL_ID
from msgspec.structs import replace
from old_schemas import REVISIONS, Rows, fill, reflected
from page_builders import large_story
from sqlalchemy import Engine, delete, inspect, select, update

from steptune.service.artifacts import ArtifactStore
from steptune.service.connections import create_engine_for, reading, writing
from steptune.service.database import alembic_config, migrate
from steptune.service.models import Base, RecommendationRow, TrialRow
from steptune.service.store import SqlStudyStore
from steptune.service.studies import write_report
from steptune.service.trial_source import KeptTrials
from steptune.tuner.records import StudyState, TrialState, Verdict

DROPPED = ("windows", "guard_checks")
"""Tables that were written and never read; what they held is in the results of trials as well."""


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request, tmp_path) -> Iterator[Engine]:
    """Engine of a database without tables."""
    sqlite = request.param == "sqlite"
    engine = create_engine_for(
        f"sqlite:///{tmp_path}/steptune.db" if sqlite else request.getfixturevalue("empty_postgres_url")
    )
    yield engine
    engine.dispose()


def held(engine: Engine, rows: Rows) -> Rows:
    """Current contents of the columns that were there before."""
    tables = Base.metadata.tables
    found = {}
    with reading(engine) as session:
        for name, before in rows.items():
            table = tables[name]
            columns = [table.columns[column] for column in before[0]]
            query = select(*columns).order_by(*table.primary_key)
            found[name] = [
                {k: v.isoformat() if isinstance(v, datetime) else v for k, v in row._mapping.items()}
                for row in session.execute(query)
            ]
    return found


def test_an_empty_database_gets_the_schema_of_the_models(engine):
    """Alembic finds nothing to change: no column, type, index, key or constraint."""
    migrate(engine)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


@pytest.mark.parametrize("revision", REVISIONS)
class TestReleased:
    def test_the_schema_becomes_that_of_the_models(self, engine, revision):
        """The schema is as if made by this version; foreign keys still delete what belongs to a study."""
        fill(engine, revision)
        migrate(engine)
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
            for name, table in Base.metadata.tables.items():
                found = inspect(connection).get_foreign_keys(name)
                rules = {(*key["constrained_columns"], key["options"].get("ondelete")) for key in found}
                assert rules == {(key.parent.name, key.ondelete) for key in table.foreign_keys}, name

    def test_every_row_is_still_there(self, engine, revision):
        """Column by column: an upgrade that copies a table would have deleted what refers to it on SQLite."""
        before = fill(engine, revision)
        migrate(engine)
        before = {name: rows for name, rows in before.items() if name not in DROPPED}
        assert held(engine, before) == before

    def test_its_answer_has_a_report(self, engine, revision, tmp_path):
        fill(engine, revision)
        migrate(engine)
        source = KeptTrials(SqlStudyStore(engine), ArtifactStore(tmp_path))
        report = write_report(STUDY_ID, source, tmp_path / "report.html")
        assert "The plan cannot be shown here: data_loading has no parameter timeout" in report.read_text()

    def test_its_studies_can_be_read_and_gone_on_with(self, engine, revision):
        """Records of that version are understood; new ones are numbered after the old."""
        before = fill(engine, revision)
        migrate(engine)
        store = SqlStudyStore(engine)
        assert {study.study_id for study in store.list_studies()} == {STUDY_ID, "second"}
        done = {trial.trial_id: trial for trial in store.trials(STUDY_ID)}
        assert (done[TRIAL_ID].state, done["failed"].state) == (TrialState.COMPLETED, TrialState.FAILED)
        assert done[TRIAL_ID].result is not None
        assert len(store.decisions(STUDY_ID)) == 2
        assert store.recommendation(STUDY_ID) is not None
        assert [artifact.kind for artifact in store.artifacts(STUDY_ID)] == ["trace", "export"]
        assert store.lose_running_trials("second") == 1
        store.set_state("second", StudyState.RUNNING)
        store.add_event("second", "state", {})
        assert store.events("second")[-1].sequence > max(row["event_id"] for row in before["events"])


def test_every_released_revision_has_what_it_held():
    """When the newest revision is released, `released/dump.py` makes its file."""
    scripts = ScriptDirectory.from_config(alembic_config())
    head = scripts.get_current_head()
    assert [*REVISIONS, head] == sorted({*(script.revision for script in scripts.walk_revisions()), head})


class TestAnswersWithoutAGain:
    """Until 0005 an answer without a gain had that of the finalist that was rejected."""

    @pytest.fixture
    def migrated(self, engine):
        def become(*, drop_trials: bool = False, **changes):
            fill(engine, "0005")
            tables = reflected(engine).tables
            table, decisions = tables["recommendations"], tables["decisions"]
            with writing(engine) as session:
                record = json.loads(session.scalar(select(table.c.record)))
                record |= {"verdict": "no_significant_gain", **changes}
                gain = record["gain"] and record["gain"]["ratio"]
                session.execute(update(table).values(verdict=record["verdict"], gain=gain, record=json.dumps(record)))
                if drop_trials:
                    session.execute(delete(decisions))
            migrate(engine)
            with reading(engine) as session:
                columns = session.execute(select(RecommendationRow.verdict, RecommendationRow.gain)).one()
            return columns, SqlStudyStore(engine).recommendation(STUDY_ID)

        return become

    def test_the_gain_of_a_rejected_finalist_is_not_the_answers(self, migrated):
        interval = {"low": 0.9, "high": 52.0, "level": 0.95}
        rejected = {"ratio": 6.88, "interval": interval, "prediction": interval, "num_blocks": 2, "num_finalists": 1}
        columns, answer = migrated(gain=rejected)
        assert columns == ("no_significant_gain", None)
        assert (answer.gain, answer.unproven_gain.ratio) == (None, 6.88)

    def test_a_study_that_tried_nothing_did_not_search(self, migrated):
        columns, answer = migrated(drop_trials=True, gain=None, certificate=certificate("budget spent"))
        assert columns == ("not_searched", None)
        assert answer.verdict is Verdict.NOT_SEARCHED

    def test_one_that_tried_something_and_one_with_nothing_to_try_did(self, migrated):
        columns, _ = migrated(drop_trials=True, gain=None, certificate=certificate("no bound above noise"))
        assert columns == ("no_significant_gain", None)


def certificate(ended: str) -> dict[str, object]:
    return {"remaining_bound": 0.1, "status": "estimated", "noise": 0.02, "ended": ended}


def test_stored_trials_get_the_figures_that_are_worked_out_for_new_ones(engine):
    """Also those whose gain comes from taking turns with today's settings, and those without one. The migration sums
    windows, where a mean of new trials leaves out the extremes: within the noise of a run that is the same.
    """
    migrate(engine)
    store = SqlStudyStore(engine)
    study, trials, _, _ = large_story(30)
    store.create_study(study)
    trials = [replace(t, group=f"group{number // 2}") for number, t in enumerate(trials)]
    for first, second in zip(trials[::2], trials[1::2], strict=True):
        store.begin_trials([replace(t, state=TrialState.RUNNING, result=None) for t in (first, second)])
        store.complete_trials([replace(t.result, group=t.group) for t in (first, second)])
    figures = select(
        TrialRow.sequence, TrialRow.step_time_ns, TrialRow.units_per_s, TrialRow.num_windows, TrialRow.gain
    )
    with reading(engine) as session:
        expected = session.execute(figures.order_by(TrialRow.sequence)).all()
    with writing(engine) as session:
        command.downgrade(alembic_config(session.connection()), "0006")
    migrate(engine)
    with reading(engine) as session:
        found = session.execute(figures.order_by(TrialRow.sequence)).all()
    assert len({row.gain is None for row in expected}) == 2
    for one, other in zip(found, expected, strict=True):
        assert [value is None for value in one] == [value is None for value in other]
        assert [v for v in one[1:3] if v is not None] == pytest.approx(
            [v for v in other[1:3] if v is not None], rel=0.01
        )
        exact = [[v for v in (row.sequence, row.num_windows, row.gain) if v is not None] for row in (one, other)]
        assert exact[0] == pytest.approx(exact[1], rel=1e-9)

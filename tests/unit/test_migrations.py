"""Every released schema becomes this one on both engines, and what it held is still there.

What a released revision holds is under `released/`; `released/dump.py` made it with the code of that revision.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from builders import STUDY_ID, TRIAL_ID
from sqlalchemy import DateTime, Engine, MetaData, func, inspect, select

from service.connections import create_engine_for, reading, writing
from service.database import _alembic_config, migrate
from service.models import Base
from service.store import SqlStudyStore
from tuner.records import StudyState, TrialState

RELEASED = Path(__file__).parents[1] / "released"
REVISIONS = sorted(path.stem for path in RELEASED.glob("*.json"))
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request, tmp_path) -> Iterator[Engine]:
    """Of a database without tables."""
    sqlite = request.param == "sqlite"
    engine = create_engine_for(
        f"sqlite:///{tmp_path}/steptune.db" if sqlite else request.getfixturevalue("empty_postgres_url")
    )
    yield engine
    engine.dispose()


def upgrade_to(engine: Engine, revision: str) -> None:
    with writing(engine) as session:
        config = _alembic_config()
        config.attributes["connection"] = session.connection()
        command.upgrade(config, revision)


def reflected(engine: Engine) -> MetaData:
    metadata = MetaData()
    metadata.reflect(engine)
    return metadata


def fill(engine: Engine, revision: str) -> Rows:
    """Brings an empty database to a released revision, with the rows that it held."""
    upgrade_to(engine, revision)
    rows: Rows = json.loads((RELEASED / f"{revision}.json").read_text())
    tables = reflected(engine).tables
    with writing(engine) as session:
        for name, table_rows in rows.items():
            times = {column.name for column in tables[name].columns if isinstance(column.type, DateTime)}
            for row in table_rows:
                parsed = {k: datetime.fromisoformat(v) if k in times and v else v for k, v in row.items()}
                session.execute(tables[name].insert().values(parsed))
        if engine.dialect.name == "postgresql":  # its counters did not see the rows that came with a number
            for name, column in (("events", "event_id"), ("artifacts", "artifact_id")):
                highest = max(row[column] for row in rows[name])
                session.execute(select(func.setval(func.pg_get_serial_sequence(name, column), highest)))
    return rows


def held(engine: Engine, rows: Rows) -> Rows:
    """What the columns hold now that were there before."""
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
        """As if it had been made by this version; foreign keys still delete what belongs to a study."""
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
        assert held(engine, before) == before

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
    scripts = ScriptDirectory.from_config(_alembic_config())
    head = scripts.get_current_head()
    assert [*REVISIONS, head] == sorted({*(script.revision for script in scripts.walk_revisions()), head})

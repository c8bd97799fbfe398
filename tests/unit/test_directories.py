"""Which directories of studies are removed from a worker's machine, and which never are."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from builders import sample_study
from sqlalchemy import Engine

from steptune.service.connections import create_engine_for, writing
from steptune.service.directories import mark, remove_directories
from steptune.service.models import QueueEntryRow
from steptune.service.store import SqlStudyStore
from steptune.tuner.records import StudyState

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def engine(database_url) -> Iterator[Engine]:
    engine = create_engine_for(database_url)
    yield engine
    engine.dispose()


def add_directory(folder: Path, study_id: str) -> Path:
    directory = folder / "studies" / study_id
    (directory / "logs").mkdir(parents=True)
    (directory / "logs" / "trial.log").write_text("said")
    return directory


def add_study(engine: Engine, study_id: str, state: StudyState, **entry) -> None:
    SqlStudyStore(engine).create_study(sample_study(study_id=study_id, state=state))
    if entry:
        with writing(engine) as session:
            session.add(QueueEntryRow(study_id=study_id, queued_at=NOW, **entry))


def test_directories_of_ended_and_deleted_studies_go(engine: Engine, tmp_path: Path) -> None:
    """However they ended, once the grace period is over; a link in them leads nowhere."""
    for state in (StudyState.COMPLETED, StudyState.FAILED, StudyState.CANCELLED):
        add_study(engine, state.value, state, ended_at=NOW - 2 * HOUR)
    gone = [add_directory(tmp_path, name) for name in ("completed", "failed", "cancelled", "deleted")]
    (tmp_path / "mine").mkdir()
    (gone[0] / "link").symlink_to(tmp_path / "mine")
    for directory in gone:
        mark(engine, tmp_path, directory.name)
    assert remove_directories(engine, tmp_path, grace_s=3600) == 4
    assert list((tmp_path / "studies").iterdir()) == []
    assert (tmp_path / "mine").exists()
    assert remove_directories(engine, tmp_path, grace_s=3600) == 0


def test_directories_that_somebody_may_need_stay(engine: Engine, tmp_path: Path) -> None:
    """A worker that holds its study, one that goes on later, one that ended just now, and whatever a command made."""
    old = NOW - 2 * HOUR
    add_study(engine, "held", StudyState.COMPLETED, ended_at=old, lease_until=NOW + HOUR)
    add_study(engine, "running", StudyState.RUNNING, ended_at=old)
    add_study(engine, "paused", StudyState.PAUSED, ended_at=None, lease_until=None)
    add_study(engine, "recent", StudyState.COMPLETED, ended_at=NOW)
    add_study(engine, "command", StudyState.COMPLETED)
    for name in ("held", "running", "paused", "recent", "command"):
        add_directory(tmp_path, name)
        mark(engine, tmp_path, name)
    add_directory(tmp_path, "elsewhere")  # of a command, in another database
    other = create_engine_for(f"sqlite:///{tmp_path}/other.db")
    add_directory(tmp_path, "other")
    mark(other, tmp_path, "other")
    other.dispose()
    assert remove_directories(engine, tmp_path, grace_s=3600) == 0
    assert len(list((tmp_path / "studies").glob("*/logs/trial.log"))) == 7

"""What is kept of a study's files."""

import gzip
from pathlib import Path

import pytest
from builders import sample_result, sample_study, sample_trial
from msgspec.structs import replace
from sqlalchemy.engine import Engine

from service import studies
from service.artifacts import ArtifactStore
from service.connections import create_engine_for
from service.database import migrate
from service.store import SqlStudyStore
from service.studies import keep_profiles
from tuner.records import TrialState
from tuner.trials.study_files import StudyFiles


@pytest.fixture
def engine(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/steptune.db"
    migrate(url)
    engine: Engine = create_engine_for(url)
    yield engine
    engine.dispose()


def test_of_a_log_its_end_is_kept(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "LOG_BYTES", 4)
    store, artifacts = SqlStudyStore(engine), ArtifactStore(tmp_path / "artifacts")
    study = sample_study(directory=str(tmp_path / "study"))
    store.create_study(study)
    trial = replace(sample_trial(study_id=study.study_id), state=TrialState.RUNNING, result=None)
    store.begin_trials([trial])
    store.complete_trials([replace(sample_result(), trial_id=trial.trial_id)])
    files = StudyFiles(Path(study.directory))
    files.logs.mkdir(parents=True)
    (files.logs / f"{trial.trial_id}.log").write_text("beginning end")
    keep_profiles(study, store, None, artifacts, logs=True)
    (kept,) = store.artifacts(study.study_id)
    with artifacts.open(kept.digest) as file:
        assert gzip.decompress(file.read()) == b" end"

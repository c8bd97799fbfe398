"""Part of a study's files that is kept."""

import gzip
from pathlib import Path

import pytest
from builders import sample_decision, sample_result, sample_study, sample_trial
from msgspec.structs import replace
from sqlalchemy.engine import Engine

from steptune.service import studies
from steptune.service.artifacts import ArtifactStore
from steptune.service.connections import create_engine_for
from steptune.service.database import migrate
from steptune.service.store import SqlStudyStore
from steptune.service.studies import keep_profiles
from steptune.tuner.records import BASELINE, Candidate, Study, Trial, TrialState
from steptune.tuner.trials.study_files import StudyFiles


@pytest.fixture
def engine(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/steptune.db"
    migrate(url)
    engine: Engine = create_engine_for(url)
    yield engine
    engine.dispose()


def begun(store: SqlStudyStore, study: Study, candidate: Candidate) -> Trial:
    """One complete trial of a study."""
    store.create_study(study)
    trial = sample_trial(study_id=study.study_id, candidate=candidate)
    store.begin_trials([replace(trial, state=TrialState.RUNNING, result=None)])
    store.complete_trials([replace(sample_result(), trial_id=trial.trial_id)])
    return trial


def test_of_the_baseline_the_traces_of_all_ranks_are_kept(engine: Engine, tmp_path: Path) -> None:
    store, artifacts = SqlStudyStore(engine), ArtifactStore(tmp_path / "artifacts")
    study = sample_study(directory=str(tmp_path / "study"))
    study = replace(study, settings=replace(study.settings, num_ranks=3))
    trial = begun(store, study, BASELINE)
    store.replace_decisions(study.study_id, [replace(sample_decision(1), candidate=BASELINE, verdict="measured")])
    files = StudyFiles(Path(study.directory))
    for rank in range(3):
        files.trace(trial.trial_id, rank).parent.mkdir(parents=True, exist_ok=True)
        files.trace(trial.trial_id, rank).write_text(f"trace of {rank}")
    keep_profiles(study, store, None, artifacts)
    found = {}
    for artifact in store.artifacts(study.study_id):
        with artifacts.open(artifact.digest) as file:
            found[artifact.kind] = gzip.decompress(file.read())
    assert found == {"trace": b"trace of 0", "trace.1": b"trace of 1", "trace.2": b"trace of 2"}


def test_of_a_log_its_end_is_kept(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "LOG_BYTES", 4)
    store, artifacts = SqlStudyStore(engine), ArtifactStore(tmp_path / "artifacts")
    study = sample_study(directory=str(tmp_path / "study"))
    trial = begun(store, study, sample_trial().candidate)
    files = StudyFiles(Path(study.directory))
    files.logs.mkdir(parents=True)
    (files.logs / f"{trial.trial_id}.log").write_text("beginning end")
    keep_profiles(study, store, None, artifacts, logs=True)
    (kept,) = store.artifacts(study.study_id)
    with artifacts.open(kept.digest) as file:
        assert gzip.decompress(file.read()) == b" end"

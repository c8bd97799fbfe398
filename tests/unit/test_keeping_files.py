"""Files of trials that are kept as a study goes on: what goes wrong with them is not the study's end."""

import os

import pytest
from builders import sample_result, sample_study, sample_trial
from msgspec.structs import replace

from steptune.service.artifacts import ArtifactStore
from steptune.service.studies import keep_profiles
from steptune.service.worker.loop import _Watcher
from steptune.tuner.errors import LeaseLostError, StorageFullError, StoreUnavailableError
from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import Study
from steptune.tuner.search.view import StudyView
from steptune.tuner.trials.study_files import StudyFiles


@pytest.fixture
def study(tmp_path) -> Study:
    directory = tmp_path / "study"
    directory.mkdir()
    StudyFiles(directory).make_folders()
    return replace(sample_study(), directory=str(directory))


@pytest.fixture
def store(study) -> MemoryStudyStore:
    store = MemoryStudyStore()
    store.create_study(study)
    for number, trial_id in enumerate(("first", "second")):
        store.begin_trials([sample_trial(study_id=study.study_id, trial_id=trial_id, sequence=number)])
        store.complete_trials([replace(sample_result(), trial_id=trial_id)])
    return store


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_left_where_it_is(study, store, tmp_path, kind) -> None:
    logs = StudyFiles(tmp_path / "study").logs
    match kind:
        case "link":
            (logs / "first.log").symlink_to("/etc/hostname")
        case "pipe":
            os.mkfifo(logs / "first.log")
        case "folder":
            (logs / "first.log").mkdir()
    (logs / "second.log").write_text("printed")
    keep_profiles(study, store, None, ArtifactStore(tmp_path / "artifacts"), logs=True)
    assert [(kept.trial_id, kept.kind) for kept in store.artifacts(study.study_id)] == [("second", "log")]


@pytest.mark.parametrize(
    "error", [StorageFullError("full"), StoreUnavailableError("busy"), OSError(28, "No space left")]
)
def test_files_that_cannot_be_kept_do_not_stop_a_study(study, store, error) -> None:
    told: list[int] = []

    def keep(*_: object) -> None:
        told.append(len(told))
        raise error

    watcher = _Watcher(study, store, keep)
    for number in (1, 2, 2):
        watcher(StudyView(budget_s=1, num_trials=number))
    assert told == [0, 1], "tried again with the next trial"
    assert [event.data["num_trials"] for event in store.events(study.study_id)] == [1, 2]


def test_a_lost_lease_does(study, store) -> None:
    def keep(*_: object) -> None:
        raise LeaseLostError("over")

    with pytest.raises(LeaseLostError):
        _Watcher(study, store, keep)(StudyView(budget_s=1, num_trials=1))

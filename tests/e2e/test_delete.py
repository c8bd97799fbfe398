"""`steptune delete`: a study and all that was measured in it, after a question."""

from contextlib import closing
from pathlib import Path

import pytest
from builders import sample_study, sample_trial
from msgspec.structs import replace

from steptune.service.database import open_store
from steptune.service.deleting import run_by_this_command
from steptune.service.queue import StudyQueue
from steptune.tuner.errors import StudyNotFoundError
from steptune.tuner.records import StudyState


@pytest.fixture
def store(inside):
    """The store of the current folder, which `inside` has made a new one."""
    with closing(open_store("sqlite:///steptune.db")) as store:
        yield store


@pytest.fixture
def study(store):
    """A failed study of the command line, with a trial and a directory."""
    study = sample_study()
    directory = Path(".steptune/studies", study.study_id).resolve()
    study = replace(study, directory=str(directory), state=StudyState.FAILED)
    store.create_study(study)
    store.begin_trials([sample_trial(study_id=study.study_id)])
    directory.mkdir(parents=True)
    (directory / "log").touch()
    return study


def test_it_is_gone_with_its_trials_and_its_files(inside, store, study):
    said = inside("delete", study.study_id[-8:], "--yes").err
    assert f"study {study.study_id} is deleted" in said
    with pytest.raises(StudyNotFoundError):
        store.get_study(study.study_id)
    assert store.trials(study.study_id) == []
    assert not Path(study.directory).exists()


def test_without_a_terminal_it_asks_for_yes_and_leaves_all(inside, store, study):
    message = inside("delete", study.study_id, status=2).error
    assert "add --yes" in message
    assert "failed" in message
    assert store.trials(study.study_id)


def test_one_that_a_command_is_running_is_left(inside, store, study):
    with run_by_this_command(study):
        message = inside("delete", study.study_id, "--yes", status=2).error
    assert "running in another `steptune` command" in message
    assert store.get_study(study.study_id)


def test_one_that_waits_in_the_service_is_deleted_too(inside, store, study):
    queued = replace(study, study_id=study.study_id[::-1], directory=str(Path(study.directory).with_name("other")))
    StudyQueue(store.engine).submit(queued, owner_id=None, required_device_kind="cpu")
    inside("delete", queued.study_id, "--yes")
    with pytest.raises(StudyNotFoundError):
        store.get_study(queued.study_id)
    assert store.get_study(study.study_id)


def test_a_folder_elsewhere_is_not_touched(inside, store, study, tmp_path):
    elsewhere = tmp_path / "precious"
    elsewhere.mkdir()
    moved = replace(study, study_id=study.study_id[::-1], directory=str(elsewhere))
    store.create_study(moved)
    inside("delete", moved.study_id, "--yes")
    assert elsewhere.exists()

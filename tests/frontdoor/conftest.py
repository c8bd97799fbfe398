"""A folder for scripts, which is the working directory, and looks that tests share."""

import sys
from pathlib import Path

import pytest
from script_runs import VARIABLES, ScriptFolder, Trials, TrialsOf

from steptune.tuner.errors import PlatformError
from steptune.tuner.scripts.launch import ran_script
from steptune.tuner.scripts.look import Look


@pytest.fixture(scope="session")
def view(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where the system makes no copy-on-write view."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        try:
            with ran_script(["true"]):
                pass
        except PlatformError as error:
            pytest.skip(str(error))


@pytest.fixture
def folder(
    view: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> ScriptFolder:
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    for made in (work, temporary):
        made.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return ScriptFolder(work, capfd)


@pytest.fixture(scope="session")
def looks() -> dict[tuple[str, ...], Look]:
    """Looks by command. Tests of one script belong to the xdist group of its name, so that it is looked at once."""
    return {}


@pytest.fixture
def trials_of(looks: dict[tuple[str, ...], Look], folder: ScriptFolder, tmp_path: Path) -> TrialsOf:
    """Trials of a command whose script is put into the folder of the test."""

    def made(*command: str) -> Trials:
        folder.add(command[-1])
        trials = Trials(folder.path, tmp_path / "study", command, look=looks.get(command))
        looks.setdefault(command, trials.look)
        return trials

    return made


@pytest.fixture
def plain(trials_of: TrialsOf) -> Trials:
    return trials_of(sys.executable, "plain.py")

"""A folder for scripts, which is the working directory."""

from pathlib import Path

import pytest
from script_runs import VARIABLES, ScriptFolder

from steptune.tuner.errors import PlatformError
from steptune.tuner.scripts.launch import ran_script


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

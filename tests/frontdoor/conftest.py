"""A folder for scripts, which is the working directory."""

from pathlib import Path

import pytest
from script_runs import VARIABLES, ScriptFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> ScriptFolder:
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    for made in (work, temporary):
        made.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return ScriptFolder(work, capfd)

"""A folder for a test, and one study that many tests read."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import PATIENT, TUNED, Ended, Steptune

from steptune.service.cli.main import main

Inside = Callable[..., Ended]


@pytest.fixture
def steptune(tmp_path: Path) -> Steptune:
    return Steptune(tmp_path)


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Inside:
    """The command within this process, for what is refused or printed before anything is run."""
    for name in [name for name in os.environ if name.startswith("STEPTUNE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Typer puts its own there, and leaves it

    def run(*arguments: str, status: int = 0) -> Ended:
        monkeypatch.setattr(sys, "argv", ["steptune", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        assert (ended.value.code or 0) == status, f"status {ended.value.code}\n{captured.out}\n{captured.err}"
        return Ended(status, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def tuned_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests that ask for the tuned study belong to the xdist group `tuned_study`, so that it is made once."""
    return tmp_path_factory.mktemp("tuned")


@pytest.fixture(scope="session")
def tuning(tuned_folder: Path) -> Ended:
    """`tune` on a workload that waits for its data. The trials end the search: a slow machine has time for them all."""
    options = ("--budget", "3m", "--trials", "6", "--only", "data_loading", "--output", "results")
    return Steptune(tuned_folder)("tune", TUNED, *options, *PATIENT)


@pytest.fixture
def tuned_inside(tuned: Steptune, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Inside:
    """Give `inside` in the folder of the complete study: for commands that only read it."""
    monkeypatch.chdir(tuned.folder)
    return inside


@pytest.fixture
def tuned(tuned_folder: Path, tuning: Ended) -> Steptune:
    """The folder of a complete study. Tests do not change it."""
    assert tuning.status == 0
    return Steptune(tuned_folder)

"""Training scripts, run with the hooks armed and without, in a folder of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from steptune.service.script_profile import ScriptProfile, script_profile
from steptune.tuner.scripts.launch import ran_script
from steptune.tuner.scripts.record import ScriptRecord

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "frontdoor" / "scripts"
LIBRARIES = ROOT / ".venv-exports-accelerate" / "bin" / "python"
VARIABLES = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Run:
    """A script that was profiled, and what it printed meanwhile."""

    profile: ScriptProfile
    out: str
    err: str

    @property
    def first(self) -> ScriptRecord:
        return self.profile.records[0]


class ScriptFolder:
    """A folder with scripts, which must look the same after every run."""

    def __init__(self, path: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self._capture = capture

    def add(self, name: str) -> str:
        shutil.copyfile(SCRIPTS / name, self.path / name)
        return name

    def profiled(self, *command: str, full: bool = False, in_place: bool = False) -> Run:
        """Profile a command, without the printing."""
        self._capture.readouterr()
        with ran_script(command, full=full, in_place=in_place) as ended:
            profile = script_profile(command, ended)
        out, err = self._capture.readouterr()
        return Run(profile, out, err)

    def plain(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command without Steptune, in a copy of the folder."""
        copy = self.path.with_name(f"{self.path.name}-plain")
        shutil.copytree(self.path, copy, dirs_exist_ok=True)
        return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120, check=False)

    def files(self) -> dict[str, int]:
        """Size of every file, by its name."""
        return {
            str(path.relative_to(self.path)): path.stat().st_size for path in self.path.rglob("*") if path.is_file()
        }


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("loss ")]


def interpreter(library: str | None) -> str:
    """An interpreter that has a library; skips the test where there is none."""
    if library is None:
        return sys.executable
    if not LIBRARIES.exists():
        pytest.skip(f"{library} is not installed: make export-environments")
    return str(LIBRARIES)

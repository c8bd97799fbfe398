"""`tuner`, the earlier name of `steptune`: the same modules, and a warning."""

import subprocess
import sys
from pathlib import Path

import pytest

from steptune.tuner.installation import IMPORT_ROOT, PACKAGE

CHECKOUT = (PACKAGE / "tuner").resolve().parent


def run(program: str, folder: Path, *options: str) -> subprocess.CompletedProcess:
    """A program in an interpreter of its own, which sees `folder` first, as it does with `python -c`."""
    return subprocess.run([sys.executable, *options, "-c", program], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("place", ["elsewhere", "checkout"])
class TestOldName:
    """In a checkout the folder `tuner` itself answers to the name."""

    def folder(self, place: str, tmp_path: Path) -> Path:
        if place == "checkout" and IMPORT_ROOT.parent != CHECKOUT:
            pytest.skip("Steptune is installed, not checked out")
        return CHECKOUT if place == "checkout" else tmp_path

    def test_it_warns(self, place: str, tmp_path: Path) -> None:
        done = run("import tuner", self.folder(place, tmp_path), "-W", "error")
        assert done.returncode == 1
        assert "FutureWarning: the module `tuner` is now `steptune`: write `import steptune`" in done.stderr

    def test_the_public_names_are_those_of_steptune(self, place: str, tmp_path: Path) -> None:
        program = (
            "import steptune, tuner\n"
            "for name in steptune.__all__:\n"
            "    assert getattr(tuner, name) is getattr(steptune, name), name\n"
            "from tuner import Workload, apply\n"
            "assert not hasattr(tuner, 'aply')\n"
        )
        done = run(program, self.folder(place, tmp_path))
        assert done.returncode == 0, done.stderr

    def test_its_modules_are_the_same_objects(self, place: str, tmp_path: Path) -> None:
        """Otherwise an error raised as the one would not be caught as the other."""
        program = (
            "import tuner.errors\n"
            "from tuner.workloads.loading import load_workload\n"
            "import steptune.tuner.errors, steptune.tuner.workloads.loading as loading\n"
            "assert tuner.errors is steptune.tuner.errors\n"
            "assert load_workload is loading.load_workload\n"
            "assert tuner.errors.__spec__.name == 'steptune.tuner.errors', tuner.errors.__spec__\n"
        )
        done = run(program, self.folder(place, tmp_path))
        assert done.returncode == 0, done.stderr

    def test_a_module_that_never_was_is_refused(self, place: str, tmp_path: Path) -> None:
        done = run("import tuner.nothing", self.folder(place, tmp_path))
        assert "ModuleNotFoundError: No module named 'steptune.tuner.nothing'" in done.stderr


def test_a_module_of_ones_own_is_ones_own(tmp_path: Path) -> None:
    (tmp_path / "tuner.py").write_text("MINE = True\n")
    done = run("import tuner, steptune; steptune.Workload; assert tuner.MINE", tmp_path, "-W", "error")
    assert done.returncode == 0, done.stderr

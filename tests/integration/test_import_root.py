"""One import root: what is installed, and workloads beside modules that have the names of Steptune's parts."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from isolated import isolated_study
from report_builders import make_recommendation

from steptune.tuner.export import exporter_named
from steptune.tuner.hardware import describe_hardware
from steptune.tuner.installation import PACKAGE
from steptune.tuner.records import BASELINE, Candidate

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2])"
SOURCES = ("src", "tuner", "service", "dashboards", "migrations", "kernels", "pyproject.toml", "README.md", "LICENSE")

OWN_NAMES = ("tuner", "service", "dashboards", "migrations", "kernels")
WORKLOAD = '''
import torch
from torch.utils.data import TensorDataset

import dashboards
import kernels
import migrations.steps
import service
import tuner
from steptune import Workload


class Mine(Workload):
    """Uses what lies beside it in the parent, in the ranks and in loader workers."""

    global_batch = 4

    def model(self):
        return torch.nn.Linear(tuner.WIDTH, service.WIDTH)

    def dataset(self):
        return TensorDataset(torch.zeros(16, tuner.WIDTH))

    def collate(self, samples):
        assert migrations.steps.WIDTH == kernels.WIDTH == dashboards.WIDTH
        return torch.stack([sample for sample, in samples])

    def loss(self, model, batch):
        return model(batch).square().mean()
'''


def build(kind: str, folder: Path, out: Path) -> Path:
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=folder, check=True, capture_output=True)
    [built] = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a source distribution, which is built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("build")
    copy = folder / "copy"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy2(ROOT / name, copy)
    with tarfile.open(build("sdist", copy, folder / "sdist")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    return build("wheel", unpacked, folder / "wheel")


class TestWheel:
    def test_it_has_one_package_and_the_old_name(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            tops = Counter(name.partition("/")[0] for name in archive.namelist())
        assert {top for top in tops if not top.endswith(".dist-info")} == {"steptune", "tuner.py"}

    def test_nothing_of_the_checkout_is_missing(self, wheel: Path) -> None:
        """Templates, styles and revisions of the database, too."""
        wanted = {
            str(Path("steptune") / link.name / path.relative_to(link.resolve()))
            for link in PACKAGE.iterdir()
            if link.is_dir() and link.name != "__pycache__"
            for path in link.resolve().rglob("*")
            if path.is_file() and path.suffix in (".py", ".html", ".js", ".css", ".svg", ".mako", ".png", ".json")
        }
        with zipfile.ZipFile(wheel) as archive:
            assert wanted - set(archive.namelist()) == set()

    def test_what_is_installed_runs_where_the_names_are_taken(self, wheel: Path, tmp_path: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "installed")
        folder = own_modules(tmp_path / "project")
        command = [sys.executable, "-m", "steptune", "strategies", "--json"]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)


def own_modules(folder: Path) -> Path:
    """A project whose modules have the names of Steptune's folders, as files and as packages."""
    folder.mkdir()
    (folder / "train.py").write_text(WORKLOAD)
    for name in OWN_NAMES[:3]:
        (folder / f"{name}.py").write_text("WIDTH = 3\n")
    for name in OWN_NAMES[3:]:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("WIDTH = 3\n")
    (folder / "migrations" / "steps.py").write_text("WIDTH = 3\n")
    return folder


class TestNamesOfOnesOwn:
    @pytest.fixture
    def project(self, tmp_path: Path) -> Path:
        folder = own_modules(tmp_path / "project")
        for above in (folder, *folder.parents):  # trials may run as another user
            if above.stat().st_uid == os.getuid() and above != Path("/"):
                above.chmod(above.stat().st_mode | 0o055)
        return folder

    @pytest.mark.parametrize("level", ["none", "limits", "bubblewrap"])
    def test_a_study_of_a_workload_beside_them_has_an_answer(self, level: str, project: Path) -> None:
        workers = Candidate(choices={"data_loading": {"num_workers": 1}})
        with isolated_study(level, f"{project / 'train.py'}:Mine") as study:
            [result] = study.run(study.spec(workers, guard=False, profile=False))
        assert result.failure is None

    def test_the_workload_itself_may_have_such_a_name(self, project: Path) -> None:
        (project / "train.py").rename(project / "steps.py")
        source = (project / "steps.py").read_text()
        (project / "service.py").write_text(source.replace("import service\n", "").replace("service.WIDTH", "3"))
        with isolated_study("none", f"{project / 'service.py'}:Mine") as study:
            assert study.run_baseline().failure is None


def test_a_script_exported_under_the_old_name_trains(tmp_path: Path) -> None:
    recommendation = make_recommendation(
        BASELINE, workload="zoo:synthetic?batch=8", global_batch=8, hardware=describe_hardware("cpu")
    )
    text = exporter_named("python").export(recommendation)
    old = text.replace("steptune.tuner.workloads", "tuner.workloads").replace("import steptune\n", "import tuner\n")
    old = old.replace("steptune.apply(", "tuner.apply(")
    assert "import steptune" not in old
    script = tmp_path / "train_recommended.py"
    script.write_text(old)
    done = subprocess.run(
        [sys.executable, str(script), "--steps", "3", "--data", str(tmp_path / "data")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "step 3: loss" in done.stdout
    assert "FutureWarning" in done.stderr

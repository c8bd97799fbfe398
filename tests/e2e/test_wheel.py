"""The wheel: built from a source distribution, installed into an environment of its own, with torch and without."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import Counter
from pathlib import Path

import httpx
import pytest
from command import ROOT, Steptune
from old_schemas import REVISIONS, fill
from own_names import own_modules
from running import Running, written

from steptune.service.connections import create_engine_for
from steptune.tuner.installation import PACKAGE

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2])"
SOURCES = ("src", *(link.name for link in PACKAGE.iterdir() if link.is_symlink()))
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
NO_TORCH = ("torch", "functorch", "torchgen")
CAPTURE = ROOT / "tests" / "captures" / "h100_compiled.json.gz"
STUDY = "06f1x8study00000000000one1"
"""A study of a released database, which has a recommendation."""
SCRIPT = ROOT / "tests" / "frontdoor" / "scripts" / "plain.py"
pytestmark = pytest.mark.xdist_group("wheel")


def build(kind: str, folder: Path, out: Path) -> Path:
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=folder, check=True, capture_output=True)
    [built] = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, without Git."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        shutil.copytree(
            ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in FILES:
        shutil.copy2(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def unpacked(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", sources, folder / "sdist")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel") / "wheel")


def installed(folder: Path, *given: str | Path, without: tuple[str, ...] = ()) -> Path:
    """The folder of the commands of a new environment, with the packages of this one but some."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = folder / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        name = path.name.partition("-")[0].lower()
        if name not in ("steptune", "__editable__.steptune", *without) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    (own / "shared.pth").write_text(f"{packages}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, *map(str, given)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def without_torch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("without") / "venv", wheel, without=NO_TORCH)


@pytest.fixture(params=["wheel", "editable"])
def with_torch(request: pytest.FixtureRequest, wheel: Path, sources: Path, tmp_path: Path) -> Path:
    """From the wheel, and as `pip install --editable` leaves it."""
    if request.param == "wheel":
        return installed(tmp_path / "venv", wheel)
    return installed(tmp_path / "venv", "--no-build-isolation", "--editable", sources)


class TestContents:
    def test_it_has_one_package_and_the_old_name(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            tops = Counter(name.partition("/")[0] for name in archive.namelist())
        assert {top for top in tops if not top.endswith(".dist-info")} == {"steptune", "tuner.py"}

    def test_nothing_of_the_checkout_is_missing(self, wheel: Path) -> None:
        """Templates, styles, examples and revisions of the database, too."""
        wanted = {
            str(Path("steptune") / link.name / path.relative_to(link.resolve()))
            for link in PACKAGE.iterdir()
            if link.is_dir() and link.name != "__pycache__"
            for path in link.resolve().rglob("*")
            if path.is_file() and path.suffix in (".py", ".html", ".js", ".css", ".svg", ".mako", ".png", ".json")
        }
        assert {"steptune/examples/digits_vit.py", "steptune/migrations/script.py.mako"} < wanted
        with zipfile.ZipFile(wheel) as archive:
            assert wanted - set(archive.namelist()) == set()

    def test_sources_come_once(self, unpacked: Path) -> None:
        """The folders that a checkout's links lead to are in the package only."""
        assert {path.name for path in unpacked.iterdir()} & set(SOURCES) == {"src"}


class TestWithoutTorch:
    def test_what_is_installed_runs_where_the_names_are_taken(self, without_torch: Path, tmp_path: Path) -> None:
        steptune = Steptune(own_modules(tmp_path / "project"), without_torch)
        assert steptune("zoo", "--json").json

    def test_a_trace_is_analysed(self, without_torch: Path, tmp_path: Path) -> None:
        steptune = Steptune(tmp_path, without_torch)
        answer = steptune("analyze", CAPTURE, "--json").json
        assert answer == Steptune(tmp_path)("analyze", CAPTURE, "--json").json

    @pytest.fixture
    def stored(self, without_torch: Path, tmp_path: Path) -> Steptune:
        steptune = Steptune(tmp_path, without_torch)
        engine = create_engine_for(f"sqlite:///{tmp_path}/steptune.db")
        fill(engine, REVISIONS[-1])
        engine.dispose()
        steptune("db", "upgrade")
        return steptune

    def test_stored_studies_are_shown_exported_and_served(self, stored: Steptune, without_torch: Path) -> None:
        assert STUDY in {row["study"]["study_id"] for row in stored.studies()}
        assert "1.50×" in stored("show", STUDY).out
        assert "import steptune" in stored("export", STUDY, "--format", "python", "-o", "-").out
        stored("report", STUDY, "-o", "report.html")
        assert "<html" in (stored.folder / "report.html").read_text()
        service = Running(stored.folder, f"sqlite:///{stored.folder}/steptune.db", without_torch)
        with service.process("serve", "--port", "0", "--no-worker", "--insecure-no-auth", log="serve.log") as log:
            url = written(log, r"Steptune serves (http://\S+)/api/v1")
            page = httpx.get(f"{url}/studies/{STUDY}", timeout=60).text
            assert "1.50×" in page
            [style] = re.findall(r'href="([^"]+\.css[^"]*)"', page)
            assert httpx.get(f"{url}{style}", timeout=60).status_code == 200

    @pytest.mark.parametrize(
        "command",
        [
            ("tune", "zoo:synthetic"),
            ("tune", "--", "python", "train.py"),
            ("profile", "--", "python", "train.py"),
            ("verify", "--", "python", "train.py"),
            ("worker",),
            ("strategies",),
        ],
    )
    def test_what_runs_trials_names_the_way_out(
        self, without_torch: Path, tmp_path: Path, command: tuple[str, ...]
    ) -> None:
        message = Steptune(tmp_path, without_torch).refused(*command)
        assert "torch is not installed" in message
        assert "pip install 'steptune[torch]'" in message


class TestWithTorch:
    def test_a_script_is_armed(self, with_torch: Path, tmp_path: Path) -> None:
        """Every Python process that the command starts, here below a shell."""
        (tmp_path / "train.py").write_text(SCRIPT.read_text())
        command = ["sh", "-c", f"{with_torch}/python train.py"]
        answer = Steptune(tmp_path, with_torch)("profile", "--in-place", "--json", "--", *command).json
        assert [record["optimizers"][0]["kind"] for record in answer["records"]] == ["AdamW"]

    def test_an_example_is_tuned_by_the_name_of_its_module(self, with_torch: Path, tmp_path: Path) -> None:
        pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'steptune[examples]'")
        steptune = Steptune(tmp_path, with_torch)
        answer = steptune("profile", "steptune.examples.digits_vit:DigitsViT", "--json").json
        assert answer

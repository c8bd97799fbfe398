"""A version is the last tag of Git; without one, and without Git, there is a version, too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools_scm", reason="needs setuptools-scm, which `make install` brings")
ROOT = Path(__file__).parents[2]


def git(folder: Path, *arguments: str) -> bytes:
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    given = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    command = ["git", *given, *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, **own}, check=True, capture_output=True).stdout


def version_of(folder: Path) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "setuptools_scm"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("pyproject.toml", ".gitattributes", ".git_archival.txt"):
        shutil.copy(ROOT / name, folder)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def test_the_version_is_the_tag(checkout: Path) -> None:
    git(checkout, "tag", "v9.8.7")
    assert version_of(checkout) == "9.8.7"


def test_between_tags_it_is_a_development_version(checkout: Path) -> None:
    assert version_of(checkout).startswith("0.1.0.dev1+g")
    git(checkout, "tag", "v9.8.7")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "second")
    assert version_of(checkout).startswith("9.8.8.dev1+g")


@pytest.mark.parametrize("tag", ["2026-10-benchmarks", "data-2026"])
def test_a_tag_of_something_else_is_no_version(checkout: Path, tag: str) -> None:
    git(checkout, "tag", tag)
    assert version_of(checkout).startswith("0.1.0.dev1+g")
    git(checkout, "tag", "v9.8.7")
    assert version_of(checkout) == "9.8.7"


def test_a_source_archive_knows_the_last_version(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "tag", "v9.8.7")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "second")
    git(checkout, "tag", "data-2026")
    archive = tmp_path / "archive"
    archive.mkdir()
    subprocess.run(["tar", "-x"], cwd=archive, input=git(checkout, "archive", "HEAD"), check=True)
    assert version_of(archive).startswith("9.8.8.dev1+g")


def test_a_folder_without_git_has_a_version(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert version_of(tmp_path) == "0.1.0.dev0"

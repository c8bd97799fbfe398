"""The tutorial on a strategy of one's own, as it stands in the documentation: found, tried, and proven."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own_strategy.md"
MAX_LINES = 60
"""Limit for all files of the tutorial together."""


def files_of(page: str) -> dict[str, str]:
    """Files of the tutorial: each block follows its name."""
    return dict(re.findall(r"`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL))


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with the package as pip would install it."""
    files = files_of(PAGE.read_text())
    assert sum(len(text.splitlines()) for text in files.values()) <= MAX_LINES
    folder = tmp_path / "packages"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    information = folder / "gc_pause-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{key} = {value}" for key, value in project["entry-points"]["steptune.strategies"].items()]
    (information / "entry_points.txt").write_text("\n".join(["[steptune.strategies]", *lines]) + "\n")
    return folder


def steptune(folder: Path, packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(packages))),
        "STEPTUNE_DATABASE_URL": f"sqlite:///{folder / 'study.db'}",
        "STEPTUNE_DATA_DIRECTORY": str(folder / "data"),
    }
    return subprocess.run(
        [sys.executable, "-m", "steptune", *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_strategy_of_the_tutorial_runs_through_a_study(tmp_path: Path, packages: Path) -> None:
    listed = steptune(tmp_path, packages, "strategies")
    assert "gc_pause" in listed.stdout, listed.stderr
    workload = "zoo:synthetic?batch=4&load_ms=0&compute_ms=1&length=256"
    options = ("--budget", "5m", "--trials", "2", "--foreign-load", "1000", "--only", "gc_pause")
    ended = steptune(tmp_path, packages, "tune", workload, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        tried = connection.execute("SELECT record, result FROM trials WHERE result IS NOT NULL").fetchall()
    assert any('"gc_pause":{"paused":true}' in record.replace(" ", "") for record, _ in tried)


def test_a_name_that_exists_is_refused(tmp_path: Path, packages: Path) -> None:
    choice = packages / "gc_pause" / "choice.py"
    choice.write_text(choice.read_text().replace('"gc_pause"', '"compile"'))
    refused = steptune(tmp_path, packages, "strategies")
    assert refused.returncode != 0
    assert "gc_pause.strategy:GcPause" in refused.stderr + refused.stdout
    assert "'compile'" in refused.stderr + refused.stdout


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("import gc\n", "import gc\n\nimport nothing_of_this_name\n", "nothing_of_this_name"),
        ("def savings", "def saves", "savings"),
        ("    setting = GcPauseSetting\n", "", "with a `setting`"),
    ],
)
def test_one_that_cannot_be_loaded_is_named(tmp_path: Path, packages: Path, before: str, after: str, said: str) -> None:
    strategy = packages / "gc_pause" / "strategy.py"
    strategy.write_text(strategy.read_text().replace(before, after))
    refused = steptune(tmp_path, packages, "--help")
    assert refused.returncode == 2
    (line,) = refused.stderr.strip().splitlines()
    assert line.startswith("error: the entry point gc_pause = gc_pause.strategy:GcPause")
    assert said in line

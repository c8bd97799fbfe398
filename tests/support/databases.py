"""Migrated databases of both kinds. Migrating takes longer than most tests, so each gets a copy."""

import shutil
from pathlib import Path

import pytest

from steptune.service.database import migrate


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("template") / "steptune.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path) -> str:
    """A migrated database of its own, once of each kind."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_url")
    path = tmp_path / "steptune.db"
    shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
    return f"sqlite:///{path}"


@pytest.fixture
def sqlite_url(sqlite_template, tmp_path) -> str:
    path = tmp_path / "steptune.db"
    shutil.copyfile(sqlite_template, path)
    return f"sqlite:///{path}"

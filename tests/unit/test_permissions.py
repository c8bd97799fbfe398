"""Files that the service keeps belong to its user alone, and so do those that earlier versions left open."""

import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steptune.service.cli.main import application
from steptune.service.database import migrate
from steptune.service.permissions import keep_private, mend
from steptune.service.settings import Settings

OPEN = ("artifacts/ab/cdef", "uploads/one", "studies/one/data/initial.bin", "studies/one/logs/server0.log")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """An installation of before, where everybody could read everything."""
    settings = Settings(
        _env_file=None, database_url=f"sqlite:///{tmp_path}/steptune.db", data_directory=tmp_path / "data"
    )
    migrate(settings.database_url)
    for name in OPEN:
        path = settings.data_directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("submitted")
    for folder, folders, files in os.walk(tmp_path):
        for name in folders:
            Path(folder, name).chmod(0o755)
        for name in files:
            Path(folder, name).chmod(0o644)
    return settings


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_an_upgrade_closes_everything_that_was_open(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPTUNE_DATA_DIRECTORY", str(settings.data_directory))
    ended = CliRunner().invoke(application(), ["db", "upgrade", "--database", settings.database_url])
    assert ended.exit_code == 0, ended.output
    for path in [tmp_path / "steptune.db", *(settings.data_directory / name for name in OPEN)]:
        assert mode(path) == 0o600, path
    for name in ("artifacts", "artifacts/ab", "uploads", "studies/one", "studies/one/data"):
        assert mode(settings.data_directory / name) == 0o700, name
    assert mode(settings.data_directory) & 0o066 == 0


def test_what_is_closed_stays_as_it_is(settings: Settings) -> None:
    assert mend(settings) > 0
    assert mend(settings) == 0


def test_no_link_is_followed(settings: Settings, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o644)
    (settings.data_directory / "uploads" / "link").symlink_to(other)
    mend(settings)
    assert mode(other) == 0o644


def test_what_is_made_from_now_on_is_closed(settings: Settings, tmp_path: Path) -> None:
    keep_private(settings)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert (mode(tmp_path / "file"), mode(tmp_path / "folder")) == (0o600, 0o700)

"""A database or a folder that cannot be used: said with a way out, and what was recorded stays readable."""

import ctypes
import shutil
import sqlite3
import subprocess
from contextlib import closing

import pytest
from command import PATIENT, WORKLOADS, Steptune

pytestmark = pytest.mark.xdist_group("tuned_study")

FINE = f"{WORKLOADS / 'flawed.py'}:Fine"
SCRIPT = """
mount -t tmpfs -o "size=$SIZE" none small || exit 99
cp before/* small/ 2>/dev/null
"$@"
status=$?
cp small/*.db* after/ 2>/dev/null
exit $status
"""
SMALL_DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SCRIPT, "sh")
"""Runs a command with a small file system at `small/`, which begins as a copy of `before/`; databases are
copied to `after/`, because it vanishes with the command."""


@pytest.fixture
def small_disk(steptune):
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    for name in ("small", "before", "after"):
        (steptune.folder / name).mkdir()
    probe = subprocess.run(
        [*SMALL_DISK, "true"], cwd=steptune.folder, env={"SIZE": "64k", "PATH": "/usr/bin:/bin"}, capture_output=True
    )
    if probe.returncode:
        pytest.skip("needs user namespaces, to mount a small file system")
    return SMALL_DISK


@pytest.fixture
def used(steptune, tuned):
    """A folder with a database that has a study."""
    for path in tuned.folder.glob("steptune.db*"):
        shutil.copy(path, steptune.folder)
    return steptune


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(used, inside):
    database = used.folder / "steptune.db"
    with closing(sqlite3.connect(database)) as connection:
        [[revision]] = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    for command in (["list"], ["show"], ["resume", "last"], ["tune", FINE], ["db", "upgrade"]):
        message = inside(*command, status=2).error
        assert str(database) in message
        assert "'9999'" in message
        assert "newer version" in message
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", [revision])
        connection.commit()
    assert len(inside("list", "--json").json) == 1


def test_a_file_that_is_no_database_is_refused(steptune, inside):
    (steptune.folder / "steptune.db").write_text("these are my notes, not a database\n" * 100)
    assert "is not a SQLite database" in inside("list", status=2).error
    assert "notes" in (steptune.folder / "steptune.db").read_text()


def test_a_full_disk_under_the_database_loses_nothing(used, small_disk):
    """There is room for the copy and a little more, not for the trials of a study."""
    for path in used.folder.glob("steptune.db*"):
        shutil.move(path, used.folder / "before")
    size = sum(path.stat().st_size for path in (used.folder / "before").iterdir())
    message = used.refused(
        *("tune", FINE, "--budget", "3m", *PATIENT),
        wrapper=small_disk,
        variables={"SIZE": str(size + (96 << 10)), "STEPTUNE_DATABASE_URL": "sqlite:///small/steptune.db"},
    )
    assert "small/steptune.db or the disk that holds it is full" in message
    assert "free some space" in message
    kept = Steptune(used.folder / "after").studies()
    assert "completed" in [entry["study"]["state"] for entry in kept]
    assert kept[-1]["recommendation"]["verdict"] == "faster"


def test_a_full_disk_under_the_study_folder_is_named(used, small_disk):
    message = used.refused(
        *("tune", FINE, "--budget", "3m", *PATIENT),
        wrapper=small_disk,
        variables={"SIZE": "32k", "STEPTUNE_DATA_DIRECTORY": "small"},
    )
    assert "No space left on device" in message
    assert str(used.folder / "small" / "studies") in message
    assert "STEPTUNE_DATA_DIRECTORY" in message
    states = [entry["study"]["state"] for entry in used.studies()]
    assert states == ["failed", "completed"]


def test_a_full_disk_under_the_results_does_not_lose_the_study(used, small_disk):
    """The report is larger than the disk; the study is complete in the database."""
    message = used.refused("export", "--output", "small", wrapper=small_disk, variables={"SIZE": "64k"})
    assert "small cannot be written" in message
    assert "The study is in the database" in message
    assert "steptune export" in message
    assert len(used.studies()) == 1


def without_override():
    """Lets the permissions of files hold for root too."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; fails for a user who has neither anyway


@pytest.fixture
def read_only(steptune):
    folder = steptune.folder / "read_only"
    folder.mkdir()
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


def test_an_output_folder_that_cannot_be_written_is_refused_before_tuning(steptune, read_only):
    message = steptune.refused("tune", FINE, "--output", "read_only/results", before=without_override)
    assert "read_only/results cannot hold the results" in message
    assert "name another folder with --output" in message
    assert not (steptune.folder / "steptune.db").exists()


def test_an_export_to_a_folder_that_cannot_be_written_is_refused(used, read_only):
    message = used.refused("export", "--output", "read_only", before=without_override)
    assert "read_only cannot be written: Permission denied" in message
    assert "choose another folder" in message


def test_an_output_that_is_a_file_is_refused(steptune, inside):
    (steptune.folder / "results").write_text("")
    assert "is not a folder" in inside("tune", FINE, "--output", "results", status=2).error


def test_a_database_that_cannot_be_written_is_refused(steptune, read_only):
    message = steptune.refused("list", "--database", "sqlite:///read_only/new.db", before=without_override)
    assert "read_only/new.db cannot be opened" in message

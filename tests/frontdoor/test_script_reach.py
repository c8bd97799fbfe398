"""Nothing of the user's is changed, in the folder or outside of it, by a run or by the tidying after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from script_runs import ROOT, VARIABLES, ScriptFolder

from steptune.tuner.errors import PlatformError
from steptune.tuner.scripts import view

STEPTUNE = (sys.executable, "-m", "steptune", "profile")
ENVIRONMENT = {**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
IN_USER_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
NO_POWER = (
    ("setpriv", "--bounding-set=-sys_admin,-dac_override,-dac_read_search", "--inh-caps=-all")
    if os.geteuid() == 0
    else ()
)
"""Permissions bind root, too, and the view has a user namespace of its own."""


def run_in(folder: ScriptFolder, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    temporary = {"TMPDIR": str(folder.path.parent / "temporary")}
    return subprocess.run(
        command,
        cwd=folder.path,
        env={**ENVIRONMENT, **temporary, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_tidying_does_not_follow_the_links_of_a_script(folder: ScriptFolder) -> None:
    """A link in a folder that forbids its removal: its target keeps its permissions (CVE-2023-6597 of `tempfile`)."""
    outside = folder.path.parent / "outside"
    outside.mkdir()
    (outside / "key").touch(mode=0o640)
    outside.chmod(0o750)
    script = f"mkdir closed; ln -s {outside}/key closed/key; ln -s {outside} closed/folder; chmod 555 closed"

    done = run_in(folder, *NO_POWER, *STEPTUNE, "--", "sh", "-c", script)

    assert done.returncode == 3, done.stderr
    assert outside.stat().st_mode & 0o7777 == 0o750
    assert (outside / "key").stat().st_mode & 0o7777 == 0o640
    assert not list((folder.path.parent / "temporary").iterdir())


def test_links_out_of_the_folder_are_named_before_the_script_starts(folder: ScriptFolder) -> None:
    outside = folder.path.parent / "outside"
    (folder.path / "within").mkdir()
    outside.mkdir()
    (folder.path / "checkpoints").symlink_to(outside)
    (folder.path / "near").symlink_to(folder.path / "within")

    done = run_in(folder, *STEPTUNE, "--", "sh", "-c", "exit 4")

    assert done.returncode == 4
    assert "writes to real files through links that lead out of this folder: checkpoints" in done.stderr
    assert "near" not in done.stderr


def test_a_script_may_empty_the_temporary_directory(folder: ScriptFolder) -> None:
    temporary = folder.path.parent / "temporary"

    run = folder.profiled("sh", "-c", f"rm -rf {temporary}/*; echo done")

    assert run.out == "done\n"


def test_a_file_mounted_below_the_folder_cannot_be_written(folder: ScriptFolder) -> None:
    """An overlay is for folders."""
    real = folder.path.parent / "real"
    real.write_text("before\n")
    (folder.path / "file").touch()
    inside = "cat file; echo changed >file; echo status $?"
    command = f"mount --bind {real} file && {' '.join(STEPTUNE)} -- sh -c '{inside}'"

    done = run_in(folder, *IN_USER_NAMESPACE, "sh", "-c", command)

    assert done.stdout.startswith("before\nstatus 2\n"), done.stderr
    assert real.read_text() == "before\n"


def test_mounts_of_any_name_are_covered(folder: ScriptFolder) -> None:
    name = "dä ta\n\\040"
    (folder.path / name).mkdir()
    inside = 'cat "$NAME"/file; echo changed >"$NAME"/file'
    prepare = 'mount -t tmpfs none "$NAME" && echo before >"$NAME"/file'
    command = f'{prepare} && {" ".join(STEPTUNE)} -- sh -c "$INSIDE"; cat "$NAME"/file'

    done = run_in(folder, *IN_USER_NAMESPACE, "sh", "-c", command, NAME=name, INSIDE=inside)

    assert done.stdout.splitlines()[:1] + done.stdout.splitlines()[-1:] == ["before"] * 2
    assert "is not possible" not in done.stderr


def test_a_temporary_directory_that_a_link_leads_to_is_found_below_the_folder(
    folder: ScriptFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.path / "inside").mkdir()
    (tmp_path / "link").symlink_to(folder.path / "inside")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "link"))

    with pytest.raises(PlatformError, match="set TMPDIR"):
        folder.profiled("true")


def test_a_user_namespace_that_may_map_nobody_is_no_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ubuntu's `apparmor_restrict_unprivileged_userns` does so: the namespace is made, its map may not be written."""

    def no_root(name: str, *arguments: object) -> None:
        if arguments == (view.CLONE_NEWNS,):
            raise PermissionError(1, "Operation not permitted")

    def no_map(path: Path, *_: object, **__: object) -> int:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(view, "_call", no_root)
    monkeypatch.setattr(Path, "write_text", no_map)

    with pytest.raises(view.ViewError, match="does not allow mount namespaces"):
        view._unshare()


def test_a_command_that_is_told_to_end_leaves_nothing_in_the_temporary_directory(folder: ScriptFolder) -> None:
    temporary = folder.path.parent / "temporary"
    process = subprocess.Popen(
        [*STEPTUNE, "--", "sh", "-c", "echo begun; exec sleep 100"],
        cwd=folder.path,
        env={**ENVIRONMENT, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    assert list(temporary.iterdir())

    process.send_signal(signal.SIGTERM)

    process.wait(60)
    process.stdout.close()
    assert not list(temporary.iterdir())

"""Parts of isolation that can be looked at without running anybody's code."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marked import wait_until

from steptune.service.isolation import (
    LEVELS,
    Available,
    Resources,
    SandboxRequest,
    Unavailable,
    choose,
    devices,
    level_named,
    users,
)
from steptune.service.isolation.bubblewrap import Bubblewrap
from steptune.service.isolation.environment import ALLOWED, clean_environment
from steptune.service.isolation.fellows import FOLDER, fellows
from steptune.service.isolation.users import closed_to_others, give
from steptune.service.isolation.visible import MAX_PARTS, visible_parts
from steptune.service.running import own_files
from steptune.service.settings import Settings
from steptune.service.studies import compressed
from steptune.tuner.emulation import DEVICES_VARIABLE, HOSTS_VARIABLE, NETWORKS_VARIABLE
from steptune.tuner.errors import ChoiceError, IsolationUnavailableError, StoreError
from steptune.tuner.records import FailureKind, Phase, new_id
from steptune.tuner.trials import memory_use, scratch
from steptune.tuner.trials import watch as quota_watch
from steptune.tuner.trials.as_user import DisturbedError, run_as
from steptune.tuner.trials.memory_use import memory_of
from steptune.tuner.trials.scratch import LOCK, empty_temporary
from steptune.tuner.trials.untrusted import open_below
from steptune.tuner.trials.watch import Quota, Watch


class TestEnvironment:
    def test_what_says_how_to_compute_passes(self) -> None:
        given = {"PATH": "/bin", "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "1", "TORCHDYNAMO_VERBOSE": "1"}
        assert given.items() <= clean_environment(given).items()

    @pytest.mark.parametrize("name", [HOSTS_VARIABLE, NETWORKS_VARIABLE, DEVICES_VARIABLE])
    def test_what_is_emulated_passes(self, name: str) -> None:
        assert clean_environment({name: "2"})[name] == "2"

    @given(
        name=st.one_of(
            st.from_regex(r"[A-Z]{1,8}_(TOKEN|SECRET|API_KEY|PASSWORD|CREDENTIALS)(_FILE)?", fullmatch=True),
            st.from_regex(r"(STEPTUNE|AWS|AZURE|GOOGLE|GITHUB|HF|WANDB|SSH|PG)_[A-Z]{1,10}", fullmatch=True),
            st.sampled_from(["NCCL_AUTH_TOKEN", "TORCH_SECRET", "CUDA_API_KEY", "DATABASE_URL", "HOME", "XDG_HOME"]),
        )
    )
    def test_nothing_else_does(self, name: str) -> None:
        assert "value" not in clean_environment({name: "value"}).values()

    def test_no_allowed_name_sounds_like_a_secret(self) -> None:
        assert set(clean_environment(dict.fromkeys(ALLOWED, "1"))) >= ALLOWED


class TestVisible:
    @pytest.fixture
    def project(self, tmp_path: Path) -> Path:
        for name in ("train.py", ".env", "steptune.db", "steptune.db-wal", "data/.hidden", "data/x", "out/.steptune/s"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return tmp_path

    def test_the_service_s_own_files_and_dot_files_are_not_shown(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(project)
        hidden = own_files(Settings(database_url="sqlite:///steptune.db", data_directory=Path("out/studies")))
        (project / "out" / "studies").mkdir()
        (project / "out" / "figures").mkdir()
        shown = visible_parts(project, hidden)
        assert shown == [project / name for name in ("data", "out/figures", "train.py")]

    def test_a_folder_without_any_is_shown_as_one(self, project: Path) -> None:
        (project / "plain").mkdir()
        assert visible_parts(project / "plain", ()) == [project / "plain"]

    def test_of_a_home_directory_only_python_files(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(project))
        assert visible_parts(project, ()) == [project / "train.py"]

    def test_hundreds_of_pieces_are_refused_with_the_way_out(self, project: Path) -> None:
        for number in range(MAX_PARTS + 1):
            (project / f"image{number}").touch()
        with pytest.raises(IsolationUnavailableError, match="move the workload to a folder of its own"):
            visible_parts(project, ())


class TestDevices:
    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Three GPUs whose nodes are numbered against the order of the bus; one of them is not in this container."""
        nodes, driver = tmp_path / "dev", tmp_path / "driver"
        for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "kfd"):
            (nodes / name).parent.mkdir(parents=True, exist_ok=True)
            (nodes / name).touch()
        for address, minor in (("0000:1b", 3), ("0000:43", 2), ("0000:52", 0)):
            (driver / address).mkdir(parents=True)
            (driver / address / "information").write_text(f"Model: \t Some\nDevice Minor: \t {minor}\n")
        monkeypatch.setattr(devices, "NODES", nodes)
        monkeypatch.setattr(devices, "DRIVER", driver)

    @pytest.mark.parametrize(("gpus", "shown"), [((0,), {"nvidia3"}), ((1,), {"nvidia0"}), ((), set()), ((7,), set())])
    def test_only_the_claimed_gpus_are_shown_with_what_their_driver_needs(self, gpus, shown) -> None:
        control = {"nvidiactl", "nvidia-uvm", "nvidia-cap1", "kfd"}
        assert {path.name for path in devices.device_nodes(gpus)} == control | shown

    def test_all_are_shown_where_none_were_claimed_by_number(self) -> None:
        assert devices.visible_gpus(None) is devices.visible_gpus("MIG-1") is None
        assert devices.visible_gpus("") == ()
        assert {"nvidia0", "nvidia3"} <= {path.name for path in devices.device_nodes(None)}

    def test_they_are_counted_from_zero_in_the_order_that_was_asked_for(self) -> None:
        assert devices.device_variables(devices.visible_gpus("5,3"))["CUDA_VISIBLE_DEVICES"] == "1,0"

    def test_the_sandbox_binds_them(self, tmp_path: Path) -> None:
        (tmp_path / "study").mkdir()
        request = SandboxRequest(
            study_directory=tmp_path / "study",
            workload="zoo:synthetic",
            python=sys.executable,
            resources=Resources.of_this_machine(tmp_path),
            gpus=(1,),
        )
        command = Bubblewrap()._command(request, {}, [])
        bound = {Path(path).name for option, path in pairwise(command) if option == "--dev-bind"}
        assert "nvidia0" in bound
        assert "nvidia3" not in bound


class TestChoosing:
    def test_an_unknown_level_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ChoiceError, match="bubblewrap, limits, none, strongest"):
            choose("jail")

    def test_a_level_that_does_not_work_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        result = Bubblewrap().probe()
        assert isinstance(result, Unavailable)
        assert "apt-get install bubblewrap" in result.reason

    def test_a_named_level_is_never_replaced_by_a_weaker_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        level = level_named("bubblewrap")
        monkeypatch.setattr(type(level), "probe", lambda self, python: Unavailable("no bwrap here"))
        monkeypatch.setattr(type(level_named("limits")), "probe", lambda self, python: Available())
        with pytest.raises(IsolationUnavailableError, match=r"no bwrap here\. `steptune doctor` lists"):
            choose("bubblewrap")
        assert choose("strongest").name == "limits"

    def test_the_strongest_is_never_none_which_must_be_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for level in LEVELS[:2]:
            monkeypatch.setattr(type(level), "probe", lambda self, python: Unavailable(f"no {self.name} here"))
        with pytest.raises(IsolationUnavailableError, match=r"no bubblewrap here.*no limits here.*--isolation none"):
            choose("strongest")
        assert choose("none").name == "none"

    def test_for_several_users_a_level_must_separate_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Trials that are the worker's own user could read its passwords."""
        monkeypatch.setattr("steptune.service.isolation.limits.can_change_user", lambda: False)
        with pytest.raises(IsolationUnavailableError, match="SETUID, SETGID, CHOWN and KILL, or use bubblewrap"):
            choose("limits", separating=True)
        monkeypatch.setattr(type(level_named("bubblewrap")), "probe", lambda self, python: Unavailable("no bwrap here"))
        with pytest.raises(
            IsolationUnavailableError, match=r"no bwrap here; limits: trials would run as the user of this process"
        ):
            choose("strongest", separating=True)
        monkeypatch.setattr(type(level_named("limits")), "probe", lambda self, python: Available())
        assert choose("strongest").name == "limits"
        assert choose("none", separating=True).name == "none"


class TestUntrustedFiles:
    """Files that user code leaves in a study's directory, and the service reads."""

    def test_an_ordinary_file_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "b").write_text("text")
        with open_below(tmp_path, tmp_path / "a" / "b") as file:
            assert file.read() == b"text"

    @pytest.mark.parametrize("kind", ["link", "link above", "pipe", "folder"])
    def test_whatever_else_is_there_is_refused_at_once(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret" / "b").write_text("text")
        study = tmp_path / "study"
        (study / "a").mkdir(parents=True)
        match kind:
            case "link":
                (study / "a" / "b").symlink_to(tmp_path / "secret" / "b")
            case "link above":
                (study / "a").rmdir()
                (study / "a").symlink_to(tmp_path / "secret")
            case "pipe":
                os.mkfifo(study / "a" / "b")
            case "folder":
                (study / "a" / "b").mkdir()
        with pytest.raises(OSError, match=r"a|b"):
            open_below(study, study / "a" / "b")
        with (
            pytest.raises(StoreError, match="user code has replaced it"),
            compressed(study, study / "a/b"),
        ):
            pass
        assert sorted(tmp_path.rglob("*.gz")) == []

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    def test_giving_a_directory_away_follows_no_link(self, tmp_path: Path) -> None:
        (tmp_path / "other").touch()
        study = tmp_path / "study"
        (study / "a").mkdir(parents=True)
        (study / "a" / "link").symlink_to(tmp_path / "other")
        os.link(tmp_path / "other", study / "hard")
        give(study, 61184)
        assert (study / "a").stat().st_uid == 61184
        assert (study / "a" / "link").lstat().st_uid == 61184
        assert (tmp_path / "other").stat().st_uid == 0

    def test_what_is_closed_to_others_is_named(self, tmp_path: Path) -> None:
        inner = tmp_path / "closed" / "open"
        inner.mkdir(parents=True)
        (tmp_path / "closed").chmod(0o700)
        inner.chmod(0o755)
        tmp_path.chmod(0o755)
        first = next((p for p in reversed(tmp_path.parents) if not p.stat().st_mode & 1), tmp_path / "closed")
        assert closed_to_others(inner) == first


class TestTemporary:
    def test_what_a_trial_left_is_removed_but_nothing_behind_a_link(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "kept" / "headers").mkdir(parents=True)
        temporary = tmp_path / "temporary"
        (temporary / "a" / "b").mkdir(parents=True)
        (temporary / "a" / "b" / "file").touch()
        (temporary / "a" / "b").chmod(0o000)
        (temporary / "link").symlink_to(tmp_path / "kept")
        (temporary / LOCK).touch()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path / "kept" / "headers")
        empty_temporary(shared_memory=True)
        assert sorted(path.name for path in temporary.rglob("*")) == [LOCK, "link"]
        assert (tmp_path / "kept" / "headers").is_dir()


class TestWatch:
    def quota(self, **changes: int) -> Quota:
        return Quota(
            **{"disk_bytes": 1 << 20, "num_files": 100, "memory_bytes": 1 << 60, "memory_reserve_bytes": 0, **changes}
        )

    def test_a_quiet_study_exceeds_nothing(self, tmp_path: Path) -> None:
        assert Watch(tmp_path, self.quota()).exceeded(Phase.BUILD) is None

    def test_files_together_count_with_temporary_ones(self, tmp_path: Path) -> None:
        for name in ("study", "temporary"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_bytes(b"x" * (768 << 10))
        watch = Watch(tmp_path / "study", self.quota())
        watch.add(tmp_path / "temporary")
        failure = watch.exceeded(Phase.MEASURE)
        assert failure is not None
        assert (failure.kind, failure.phase) == (FailureKind.WORKLOAD_ERROR, Phase.MEASURE)
        assert "STEPTUNE_STUDY_DISK_BYTES" in failure.message

    def test_files_that_exceed_are_told_once_or_where_they_are_to_be_counted_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_bytes(b"x" * (2 << 20))
        monkeypatch.setattr(quota_watch, "INTERVAL_S", 0.0)
        watch = Watch(tmp_path, self.quota())
        assert watch.exceeded(Phase.MEASURE) is not None
        assert watch.exceeded(Phase.MEASURE) is None
        watch.count_again()
        assert watch.exceeded(Phase.MEASURE) is not None

    def test_many_empty_files_count_too(self, tmp_path: Path) -> None:
        for number in range(101):
            (tmp_path / str(number)).touch()
        assert Watch(tmp_path, self.quota()).exceeded(Phase.BUILD) is not None

    def test_links_are_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "study").mkdir()
        (tmp_path / "study" / "all").symlink_to("/usr")
        assert Watch(tmp_path / "study", self.quota()).exceeded(Phase.BUILD) is None

    def test_little_memory_on_the_machine_ends_trials(self, tmp_path: Path) -> None:
        reserve = psutil.virtual_memory().total + 1
        failure = Watch(tmp_path, self.quota(memory_reserve_bytes=reserve)).exceeded(Phase.BUILD)
        assert failure is not None
        assert failure.kind is FailureKind.OUT_OF_MEMORY


HOARD = "import sys, time; hoard = bytearray(b'x' * int(sys.argv[1])); print(flush=True); time.sleep(600)"


@contextlib.contextmanager
def hoarder(uid: int, num_bytes: int) -> Iterator[int]:
    """A process of a user that holds so much memory."""
    command = [*users.become(uid), "/usr/bin/env", "python3", "-Ic", HOARD, str(num_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


class TestMemoryTaken:
    def quota(self) -> Quota:
        return Quota(disk_bytes=1 << 40, num_files=1 << 20, memory_bytes=1 << 28, memory_reserve_bytes=0)

    def test_what_descends_from_a_server_counts_together_and_nothing_else(self, tmp_path: Path) -> None:
        script = 'for i in 1 2; do "$0" -Ic "$1" "$2" & done; wait'
        command = ["/bin/sh", "-c", script, sys.executable, HOARD, str(150 << 20)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as shell:
            try:
                assert shell.stdout is not None
                for _ in range(2):
                    shell.stdout.readline()
                failure = Watch(tmp_path, self.quota(), servers=lambda: [shell.pid]).exceeded(Phase.MEASURE)
                assert Watch(tmp_path, self.quota()).exceeded(Phase.MEASURE) is None
            finally:
                os.killpg(shell.pid, signal.SIGKILL)
        assert failure is not None
        assert failure.kind is FailureKind.OUT_OF_MEMORY
        assert "0.25 GiB" in failure.message

    def test_memory_that_forks_share_counts_once(self, tmp_path: Path) -> None:
        script = "import os, sys; hoard = b'x' * (150 << 20); [os.fork() for _ in range(3)]; os.write(1, b'1'); " + (
            "import time; time.sleep(600)"
        )
        command = [sys.executable, "-Ic", script]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
            try:
                assert process.stdout is not None
                process.stdout.read(8)
                watch = Watch(tmp_path, self.quota(), servers=lambda: [process.pid])
                assert watch.exceeded(Phase.MEASURE) is None
            finally:
                os.killpg(process.pid, signal.SIGKILL)

    def test_a_study_that_was_killed_is_nobody_s_fellow(self) -> None:
        owner = new_id()
        with fellows(owner, 65400) as others:
            left = Path(FOLDER.format(uid=os.geteuid())) / owner
            left.write_text(f'{{"owner": "{owner}", "pid": 1, "uid": null}}')
            assert others() == ()
            assert not left.exists()


OTHER = 65200
"""A user that no study has in these tests."""


@pytest.mark.xdist_group("own users")  # ids are of the whole machine: another test would take the next one
@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs trials as other users")
class TestOwnUsers:
    @pytest.fixture
    def folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as name:
            yield Path(name)

    @pytest.fixture
    def locks(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
        """Other tests have users at the same time."""
        monkeypatch.setattr(users, "FIRST_UID", 65000)
        return folder

    def study(self, folder: Path, name: str) -> Path:
        (folder / name / "study").mkdir(parents=True)
        return folder / name / "study"

    def test_two_studies_never_share_one(self, locks: Path) -> None:
        """Neither on one machine nor where the studies' folder is shared."""
        (locks / "other").mkdir()
        with users.own_user(self.study(locks, "one")) as first, users.own_user(self.study(locks, "other/x")) as second:
            assert first != second

    def test_a_user_whose_processes_somebody_else_has_is_left_alone(self, locks: Path) -> None:
        """A user with a temporary directory of their own shows no lock."""
        with users.own_user(self.study(locks, "one")) as uid:
            pass
        other = subprocess.Popen([*users.become(uid), "sleep", "60"])
        try:
            wait_until(lambda: Path(f"/proc/{other.pid}").stat().st_uid == uid, "it is that user")
            with users.own_user(self.study(locks, "two")) as second:
                assert second != uid
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()

    def test_a_killed_study_s_files_are_ours_again_before_the_next_study_has_its_user(self, locks: Path) -> None:
        """The next one could read them, and they would count against its quota."""
        locks.chmod(0o755)
        killed = self.study(locks, "one")
        script = (
            "import os, sys; from pathlib import Path; from steptune.service.isolation import users\n"
            "users.FIRST_UID = 65000\n"
            "with users.own_user(Path(sys.argv[1])) as uid: print(uid, flush=True); os._exit(1)"
        )
        (killed / "file").touch()
        command = [sys.executable, "-c", script, str(killed)]
        left = int(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
        assert (killed / "file").stat().st_uid == left
        with users.own_user(self.study(locks, "two")) as uid:
            assert uid == left
            assert {path.stat().st_uid for path in (killed, killed / "file")} == {os.geteuid()}

    def test_a_user_whose_files_somebody_else_has_is_left_alone(self, locks: Path) -> None:
        locks.chmod(0o755)
        with users.own_user(self.study(locks, "one")) as uid:
            pass
        theirs = self.study(locks, "theirs")
        os.chown(theirs, uid, uid)
        with users.own_user(self.study(locks, "two")) as second:
            assert second != uid
        assert theirs.stat().st_uid == uid

    def test_two_studies_of_one_submitter_share_one_limit_and_the_hungrier_ends(self, locks: Path) -> None:
        quota = Quota(disk_bytes=1 << 40, num_files=1 << 20, memory_bytes=1 << 28, memory_reserve_bytes=0)
        with contextlib.ExitStack() as stack:
            watches = {}
            mine = new_id()
            for name, owner, size in (("one", mine, 150), ("two", mine, 200), ("three", new_id(), 230)):
                uid = stack.enter_context(users.own_user(self.study(locks, name)))
                others = stack.enter_context(fellows(owner, uid))
                stack.enter_context(hoarder(uid, size << 20))
                watches[name] = Watch(locks / name, quota, users.become(uid), uid=uid, fellows=others)
            failures = {name: watch.exceeded(Phase.MEASURE) for name, watch in watches.items()}
        assert [name for name, failure in failures.items() if failure] == ["two"]
        failure = failures["two"]
        assert failure is not None
        assert failure.kind is FailureKind.OUT_OF_MEMORY
        assert "in other studies of the same user" in failure.message
        assert "0.25 GiB" in failure.message
        assert "STEPTUNE_STUDY_MEMORY_BYTES" in failure.message

    def test_files_that_studies_of_one_submitter_leave_where_everybody_may_write_share_one_limit(
        self, locks: Path
    ) -> None:
        quota = Quota(disk_bytes=8 << 20, num_files=1 << 20, memory_bytes=1 << 60, memory_reserve_bytes=0)
        with contextlib.ExitStack() as stack:
            watches = {}
            mine = new_id()
            for name, owner, size in (("one", mine, 5), ("two", mine, 6), ("three", new_id(), 7)):
                uid = stack.enter_context(users.own_user(self.study(locks, name)))
                others = stack.enter_context(fellows(owner, uid))
                script = f"head -c {size << 20} /dev/zero > /var/tmp/steptune-test-{uid}"
                subprocess.run([*users.become(uid), "/bin/sh", "-c", script], check=True)
                watches[name] = Watch(locks / name, quota, users.become(uid), uid=uid, fellows=others)
            failures = {name: watch.exceeded(Phase.MEASURE) for name, watch in watches.items()}
        assert [name for name, failure in failures.items() if failure] == ["two"]

    def test_all_is_ours_again_whatever_its_user_closed(self, locks: Path) -> None:
        """Below `/tmp`, too, where nothing else of that user stays."""
        locks.chmod(0o755)
        directory = self.study(locks, "one")
        (directory / "before").write_text("ours")
        script = "umask 077; mkdir -p a/b; echo theirs > a/b/c; chmod 0 a/b/c a/b a before"
        with users.own_user(directory) as uid:
            subprocess.run([*users.become(uid), "sh", "-c", script], cwd=directory, check=True)
            assert (directory / "a").stat().st_uid == uid
        assert {path.stat().st_uid for path in directory.rglob("*")} == {os.geteuid()}
        assert (directory / "a" / "b" / "c").read_text() == "theirs\n"

    def test_what_a_user_left_is_removed_where_everybody_may_write(self, locks: Path) -> None:
        locks.chmod(0o755)
        (locks / "open").mkdir()
        (locks / "open").chmod(0o1777)
        (locks / "open" / "ours").touch()
        left = locks / "open" / "left\nhere"
        kept = Path("/tmp") / f"steptune-kept-{os.getpid()}"
        script = 'mkdir -p "$1/a" "$2"; echo > "$1/a/b"; chmod 0 "$1/a" "$1"'
        with users.own_user(self.study(locks, "one")) as uid:
            subprocess.run([*users.become(uid), "sh", "-c", script, "sh", left, kept], check=True)
            users.remove_left(uid, kept=[kept])
            assert kept.is_dir()
            assert [path.name for path in (locks / "open").iterdir()] == ["ours"]
        assert not kept.exists()

    def test_a_user_s_commands_carry_nothing_of_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The user may read the environment of these commands."""
        monkeypatch.setenv("STEPTUNE_DATABASE_URL", "postgresql://me:secret@host/db")
        seen = run_as(users.become(OTHER), "env").stdout.splitlines()
        assert {line.partition("=")[0] for line in seen} <= {"PATH", "LC_ALL", "PWD", "SHLVL", "_"}

    def test_what_its_user_stops_or_kills_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("steptune.tuner.trials.as_user.TIMEOUT_S", 0.2)
        for number, message in (("KILL", "killed by signal 9"), ("STOP", r"within 0\.2 s")):
            with pytest.raises(DisturbedError, match=message):
                run_as(users.become(OTHER), "/bin/sh", "-c", f"kill -{number} $$")

    def test_memory_is_seen_with_the_eyes_of_its_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where we may not look into other users' processes, as without the capability to trace them."""
        script = "import os, time; f = os.memfd_create('f'); os.write(f, bytes(64 << 20)); print(flush=True); " + (
            "time.sleep(600)"
        )
        command = [*users.become(OTHER), "/usr/bin/env", "python3", "-Ic", script]
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
        assert python
        monkeypatch.setattr(memory_use, "_is_closed", lambda pid: True)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                taken = memory_of([process.pid], 1 << 20, {}, as_user=users.become(OTHER), python=python)
                disturbed = memory_of([process.pid], 1 << 20, {}, as_user=users.become(OTHER), python="/bin/false")
            finally:
                process.kill()
        assert 64 << 20 <= taken < 128 << 20
        assert disturbed >= taken

    def test_what_hides_itself_from_its_own_user_is_found_out(self) -> None:
        """It counts as all that it may have, then."""
        hide = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print(flush=True); time.sleep(600)"
        for begin, expected in (("", "False\n"), (hide, "True\n")):
            script = begin or "import time; print(flush=True); time.sleep(600)"
            command = [*users.become(OTHER), "/usr/bin/env", "python3", "-Ic", script]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                try:
                    assert process.stdout is not None
                    process.stdout.readline()
                    look = f"print(_hidden([{process.pid}]))\n"
                    source = Path(memory_use.__file__).read_text().replace("_answer()\n", look)
                    seen = run_as(users.become(OTHER), "/usr/bin/env", "python3", "-ISc", source).stdout
                finally:
                    process.kill()
            assert seen == expected

"""Results of a hostile workload under each level of isolation: docs/isolation.md has the same as a table."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from isolated import all_but, few_resources, isolated_study, python_for
from marked import VARIABLE, commands, new_mark, none_left, wait_until
from msgspec.structs import replace
from trial_builders import THREE_THREADS, Prepared, reference

from steptune.service.isolation import level_named
from steptune.service.isolation.users import can_change_user
from steptune.service.running import isolated_runner
from steptune.service.settings import Settings
from steptune.tuner.errors import IsolationUnavailableError
from steptune.tuner.hardware import find_compiler
from steptune.tuner.records import Candidate, Deadlines, Failure, FailureKind, Phase, TrialResult, new_id

LEVELS = ("limits", "bubblewrap")
SECRETS = {
    "STEPTUNE_DATABASE_URL": "postgresql://me:secret@host/db",
    "GITHUB_TOKEN": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "WANDB_API_KEY": "secret",
    "NCCL_TOKEN": "secret",
}

pytestmark = pytest.mark.xdist_group("isolation")


def hostile(deed: str = "none", **arguments: str) -> str:
    return reference("hostile", "Hostile", deed=deed, **arguments)


class Study:
    """A study under a level, and the deeds of its candidates."""

    def __init__(self, prepared: Prepared, mark: str) -> None:
        self.prepared = prepared
        self.directory = prepared.directory
        self.mark = mark

    def run(self, deed: str = "none", seconds: float = 60.0, **arguments: str) -> TrialResult:
        spec = self.prepared.spec(
            THREE_THREADS,
            workload=hostile(deed, **arguments),
            guard=False,
            profile=False,
            deadlines=Deadlines(warm_up_s=seconds),
            environment_variables={VARIABLE: self.mark},
        )
        return self.prepared.run(spec)[0]

    def fails(self, deed: str, seconds: float = 60.0) -> Failure:
        """The failure of the deed's trial, after which only the server is left, and the next trial runs."""
        failure = self.run(deed, seconds).failure
        assert failure is not None
        for path in (self.directory / "data").glob("hostile*"):
            path.unlink()
        none_left_but_servers(self.mark)
        after = self.run()
        assert after.ok, after.failure
        return failure

    def look(self, *paths: Path) -> dict[str, Any]:
        """Report what a workload sees of these paths."""
        assert self.run("look", look="|".join(map(str, paths))).ok
        return json.loads((self.directory / "data" / "seen.json").read_text())


def none_left_but_servers(mark: str) -> None:
    """Servers and what bubblewrap keeps around them; what was killed may take a moment to be gone."""

    def one_left() -> bool:
        return sum("bwrap" not in command for command in commands(mark).values()) == 1

    wait_until(one_left, "only the server is left")


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@contextlib.contextmanager
def begun(level: str, **options: Any) -> Iterator[Study]:
    mark = new_mark()
    with isolated_study(level, hostile(), variables={VARIABLE: mark}, **options) as prepared:
        yield Study(prepared, mark)
    none_left(mark)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("service") / "steptune.db"
    path.write_text("secret")
    return path


@pytest.fixture(scope="module")
def study(level: str) -> Iterator[Study]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        # Room for a thread on each core. More tasks only make endless forking slower to end.
        with begun(level, resources=few_resources(num_tasks=60 + (os.cpu_count() or 1))) as begun_study:
            yield begun_study


@pytest.fixture(scope="module")
def small(level: str) -> Iterator[Study]:
    """A study that may take one GiB of memory."""
    with begun(level, resources=few_resources(memory_bytes=1 << 30, temporary_bytes=1 << 30)) as begun_study:
        yield begun_study


class TestHonest:
    def test_trials_run_and_say_how_they_were_isolated(self, study: Study, level: str) -> None:
        result = study.run()
        assert result.ok, result.failure
        assert result.isolation == level

    def test_a_study_without_a_folder_of_its_own_may_be_closed_to_others(self, tmp_path: Path) -> None:
        """Temporary directories are closed so. The study is given to the user of the trials."""
        tmp_path.chmod(0o700)
        settings = Settings(database_url="sqlite:///steptune.db", data_directory=tmp_path)
        study = tmp_path / "study"
        study.mkdir(mode=0o700)
        level = level_named("bubblewrap")
        python_for(level)
        with isolated_runner(workload="zoo:synthetic", directory=study, settings=settings, level=level) as runner:
            assert runner.inspect().global_batch

    @pytest.mark.skipif(os.geteuid() != 0, reason="others run trials as themselves")
    def test_a_workload_that_the_trials_user_cannot_read_is_refused_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "study").mkdir()
        (tmp_path / "train.py").write_text("class Mine: pass")
        (tmp_path / "train.py").chmod(0o600)
        tmp_path.chmod(0o700)
        with (
            pytest.raises(IsolationUnavailableError, match=r"chmod o\+rX"),
            isolated_study("bubblewrap", f"{tmp_path / 'train.py'}:Mine"),
        ):
            pass

    def test_ranks_meet_without_a_network(self) -> None:
        workload = reference("regression", "Regression")
        with isolated_study("bubblewrap", workload, num_ranks=2) as study:
            result = study.run_baseline()
        assert result.ok, result.failure
        assert {peak.rank for peak in result.memory} == {0, 1}

    @pytest.mark.skipif(find_compiler() is None, reason="torch.compile needs a C++ compiler here")
    def test_compilation_works_and_its_caches_stay_in_the_study(self, level: str) -> None:
        """With so much private memory for each process as a small machine has: compile workers are processes, too."""
        workload = reference("regression", "Regression")
        roomy = few_resources(num_tasks=2000, disk_bytes=4 << 30, temporary_bytes=1 << 30, memory_bytes=2 << 30)
        with isolated_study(level, workload, resources=roomy) as study:
            compiled = Candidate(choices={"compile": {"mode": "default"}})
            [result] = study.run(study.spec(compiled, guard=False, profile=False))
            assert result.ok, result.failure
            assert list((study.directory / "compiler_headers").rglob("*.gch"))


class TestSeeing:
    def test_no_secret_is_in_the_environment(self, study: Study) -> None:
        seen = study.look()["environment"]
        assert not SECRETS.keys() & seen.keys()
        assert "secret" not in "".join(seen.values())
        assert {name for name in seen if name.startswith("STEPTUNE_")} <= {"STEPTUNE_CORES", VARIABLE}

    def test_nobody_s_files_can_be_read_or_written(self, study: Study, level: str, database: Path) -> None:
        paths = [Path("/etc/shadow"), database, Path("/etc/passwd"), Path("/usr/bin/env")]
        seen = study.look(*paths)
        assert seen["read"]["/etc/shadow"].startswith("no")
        assert seen["read"]["/usr/bin/env"].startswith("yes")
        if level == "bubblewrap" or os.geteuid() == 0:
            assert not any(answer.startswith("yes") for answer in seen["written"].values())
            assert seen["read"][str(database)].startswith("no")
        if level == "bubblewrap":
            assert seen["read"]["/etc/passwd"].startswith("no FileNotFoundError")
            assert not {"boot", "var", "srv", "mnt"} & set(seen["root"])

    def test_rights_cannot_be_had_again(self, study: Study) -> None:
        seen = study.look()
        assert int(seen["status"]["NoNewPrivs"]) == 1
        assert int(seen["status"]["CapEff"], 16) == 0
        assert seen["raised"].startswith("no")
        assert 0 not in seen["ids"] or os.geteuid() != 0

    def test_only_bubblewrap_closes_the_network_and_hides_processes(self, study: Study, level: str) -> None:
        seen = study.look()
        assert seen["loopback"].startswith("yes")
        if level == "bubblewrap":
            assert seen["connected"].startswith("no OSError 101")  # ENETUNREACH: there is nothing to ask
            assert len(seen["pids"]) < 10


class TestTaking:
    @pytest.mark.parametrize("deed", ["fork", "fork_away"])
    def test_forking_for_ever_ends_at_the_limit_and_with_the_deadline(self, study: Study, deed: str) -> None:
        if deed == "fork_away" and os.geteuid() != 0 and study.run().isolation == "limits":
            pytest.skip("sessions of its own outrun an ordinary user's limits: docs/isolation.md")
        failure = study.fails(deed, seconds=4)
        assert (failure.kind, failure.phase) == (FailureKind.TIMEOUT, Phase.WARM_UP)

    def test_filling_the_disk_ends_at_the_quota(self, study: Study) -> None:
        failure = study.fails("fill_disk")
        assert failure.kind is FailureKind.WORKLOAD_ERROR
        assert "STEPTUNE_STUDY_DISK_BYTES" in failure.message

    def test_one_large_file_ends_there_too(self, study: Study) -> None:
        failure = study.fails("one_large_file")
        assert failure.kind is FailureKind.WORKLOAD_ERROR
        assert "STEPTUNE_STUDY_DISK_BYTES" in failure.message or "File too large" in failure.message

    def test_filling_the_temporary_directory_costs_one_trial(self, study: Study, level: str) -> None:
        failure = study.fails("fill_temporary")
        if level == "bubblewrap":
            assert "No space left" in failure.message
        else:
            assert "STEPTUNE_STUDY_DISK_BYTES" in failure.message

    @pytest.mark.parametrize("place", ["/tmp", "/var/tmp", "/dev/shm"])
    def test_filling_what_everybody_may_write_to_ends_the_trial(self, study: Study, level: str, place: str) -> None:
        if level == "limits" and not can_change_user():
            pytest.skip("files of the user who runs everything cannot be told from a trial's: docs/isolation.md")
        failure = study.fails(f"fill {place}")
        if level == "limits":
            assert "STEPTUNE_STUDY_DISK_BYTES" in failure.message
            assert not any(Path(place).glob("hostile-*"))
        else:
            assert re.search("No space left|No such file|Read-only", failure.message), failure.message

    def test_filling_memory_with_many_processes_ends_while_some_is_left(self, level: str) -> None:
        with begun(level, resources=few_resources(memory_reserve_bytes=all_but(2 << 30))) as study:
            failure = study.run("fill_memory").failure
        assert failure is not None
        assert (failure.kind, failure.phase) == (FailureKind.OUT_OF_MEMORY, Phase.WARM_UP)
        assert "leave" in failure.message

    @pytest.mark.parametrize(
        "deed", ["take_alone", "take_by_many", "take_shared", "take_by_files", "take_by_devices", "take_by_mapping"]
    )
    def test_two_gibibytes_end_at_a_limit_of_one(self, small: Study, deed: str) -> None:
        """However they are held: by one process or many, alone or shared, mapped or not."""
        failure = small.fails(deed)
        full = "No space left" in failure.message or failure.signal == signal.SIGBUS
        if deed in ("take_by_devices", "take_by_mapping") and full:  # the device of bubblewrap is small
            return
        assert (failure.kind, failure.phase) == (FailureKind.OUT_OF_MEMORY, Phase.WARM_UP)
        assert "1 GiB" in failure.message
        assert "STEPTUNE_STUDY_MEMORY_BYTES" in failure.message

    @pytest.mark.parametrize(
        "deed",
        [
            "take_in_flight",
            "take_behind",
            "take_by_sockets",
            *(
                pytest.param(deed, marks=pytest.mark.soak)
                for deed in ("take_by_orphans", "take_by_network", "take_by_pipes")
            ),
        ],
    )
    def test_so_they_do_where_no_living_process_has_them(self, small: Study, deed: str) -> None:
        """Files on their way through a socket, memory behind a first thread that has ended, buffers of the kernel."""
        failure = small.fails(deed)
        assert (failure.kind, failure.phase) == (FailureKind.OUT_OF_MEMORY, Phase.WARM_UP), failure.message
        assert "STEPTUNE_STUDY_MEMORY_BYTES" in failure.message

    @pytest.mark.parametrize("deed", ["take_beside", "take_by_ring", "take_secret"])
    def test_what_would_hide_memory_from_those_who_count_it_is_refused(self, small: Study, deed: str) -> None:
        assert "PermissionError: [Errno 1]" in small.fails(deed).message

    def test_page_tables_are_memory_too(self, small: Study) -> None:
        assert small.fails("take_tables").kind is FailureKind.OUT_OF_MEMORY

    def test_shared_memory_that_is_no_process_s_cannot_be_had(self, small: Study) -> None:
        failure = small.fails("take_system_v")
        assert "Operation not permitted" in failure.message or "no shared memory" in failure.message

    def test_sleeping_for_ever_ends_at_the_deadline(self, study: Study) -> None:
        failure = study.fails("sleep", seconds=1)
        assert (failure.kind, failure.phase) == (FailureKind.TIMEOUT, Phase.WARM_UP)


class TestTalking:
    @pytest.mark.parametrize("deed", ["write_garbage", "announce_gigabytes", "write_for_ever"])
    def test_what_is_no_message_is_a_failure_of_the_trial(self, study: Study, deed: str) -> None:
        before = psutil.Process().memory_info().rss
        failure = study.fails(deed)
        assert failure.kind is FailureKind.WORKLOAD_ERROR
        assert "invalid data" in failure.message
        assert psutil.Process().memory_info().rss - before < 600 << 20


class TestOthers:
    def test_trials_with_environments_of_their_own_do_not_end_each_other(self, level: str) -> None:
        """Each environment has a trial server, and those of one study may be one user."""
        with begun(level) as study:
            plain = study.prepared.spec(guard=False, profile=False, environment_variables={VARIABLE: study.mark})
            other = replace(plain, trial_id=new_id(), environment_variables={VARIABLE: study.mark, "OMP_DYNAMIC": "0"})
            results = study.prepared.run(plain, other)
        assert [(result.failure, result.repeated) for result in results] == [(None, ()), (None, ())]

    def test_orphans_are_gone_when_the_trial_ends(self, study: Study) -> None:
        assert study.run("leave_orphans").ok
        assert study.run().ok

    def test_a_workload_that_kills_whom_it_can_ends_its_own_study_and_nothing_else(self, level: str) -> None:
        if level == "limits" and os.geteuid() != 0:
            pytest.skip("limits alone do not keep processes of one user from each other: docs/isolation.md")
        with begun(level) as study:
            failure = study.run("kill_everybody").failure
        assert failure is not None
        counting = failure.kind is FailureKind.WORKLOAD_ERROR and "could not be counted" in failure.message
        assert failure.kind is FailureKind.INFRASTRUCTURE or counting, (
            failure
        )  # what counts its files is its user's, too

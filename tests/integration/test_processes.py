"""Nothing survives a killed study: no process, no shared memory, no temporary file."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from marked import VARIABLE, commands, left_in, marked, new_mark, none_left, shared_memory_of, wait_until
from trial_builders import reference

from steptune.tuner.hardware import find_compiler
from steptune.tuner.trials.scratch import SHARED_MEMORY, Scratch, remove_abandoned, scratch_directory

ROOT = Path(__file__).parents[2]
STUDY = """
import sys
from pathlib import Path
import msgspec
from trial_builders import prepare
from steptune.tuner.records import Candidate
study = prepare(sys.argv[1], Path(sys.argv[3]), with_reference=False)
candidate = Candidate(choices=msgspec.json.decode(sys.argv[4]))
study.run(study.spec(candidate, workload=sys.argv[2], guard=False, profile=False))
"""
WORKERS = '"data_loading": {"num_workers": 2, "persistent_workers": true}'
THREADS = '"cpu_threads": {"num_threads": 3}'
COMPILED = '"compile": {"mode": "default"}'

pytestmark = pytest.mark.xdist_group("processes")


class Victim:
    """A process that runs one trial, which stays where it is told to."""

    def __init__(self, folder: Path, temporary: Path, *, at: str, choices: str) -> None:
        self.mark = new_mark()
        self.study = folder / "study"
        self.temporary = temporary
        self.killed: set[int] = set()
        self._log = folder / "output.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", STUDY, reference("misbehaving", "Misbehaving")),
                    *(reference("misbehaving", "Misbehaving", deed="hang", at=at), str(self.study), f"{{{choices}}}"),
                ],
                env={
                    **os.environ,
                    VARIABLE: self.mark,
                    "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests" / "support"))),
                    "TMPDIR": str(temporary),
                },
                stdout=log,
                stderr=log,
            )

    @property
    def moment(self) -> bool:
        """True once the trial is where it was told to stay."""
        assert self.process.poll() is None, self._log.read_text()
        return (self.study / "data" / "moment").exists()

    def pids(self, part: str) -> list[int]:
        """Its processes that were started by a command with this part."""
        return [pid for pid, command in commands(self.mark).items() if part in command]

    @property
    def server(self) -> int:
        """The server: what it forked looks the same, and is its child."""
        children = {process.pid for process in psutil.Process(self.process.pid).children()}
        (server,) = children & set(self.pids("steptune.tuner.trials.server"))
        return server

    def kill(self, *who: str) -> None:
        self.killed = {process.pid for process in marked(self.mark)}
        pids = {"parent": self.process.pid, "server": self.server}
        for pid in [pids[name] for name in who]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=240)
        none_left(self.mark)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Short, because the paths of sockets are."""
    with tempfile.TemporaryDirectory(prefix="st") as folder:
        yield Path(folder)


def removed_by_the_next_start(victim: Victim) -> None:
    """Threads of a killed process may hold its files a moment longer than the process is seen."""

    def removed() -> bool:
        remove_abandoned(victim.temporary)
        return left_in(victim.temporary) == []

    wait_until(removed, "temporary files are removed")
    assert shared_memory_of(victim.killed) == []


StartVictim = Callable[..., Victim]


@pytest.fixture
def start(tmp_path: Path, temporary: Path) -> Iterator[StartVictim]:
    """Starts victims; what a failed test leaves of them is ended."""
    victims: list[Victim] = []

    def start_one(**arguments: str) -> Victim:
        victims.append(Victim(tmp_path, temporary, **arguments))
        return victims[-1]

    yield start_one
    for victim in victims:
        for process in marked(victim.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        victim.process.wait()


class TestKilled:
    @pytest.mark.parametrize(
        ("at", "choices", "who"),
        [
            pytest.param("step", THREADS, ("parent",), id="warming up, parent"),
            pytest.param("window", f"{THREADS}, {WORKERS}", ("parent",), id="measuring with workers, parent"),
            pytest.param("window", f"{THREADS}, {WORKERS}", ("parent", "server"), id="measuring with workers, both"),
        ],
    )
    def test_nothing_is_left(self, start: StartVictim, at: str, choices: str, who: tuple[str, ...]) -> None:
        victim = start(at=at, choices=choices)
        wait_until(lambda: victim.moment, "the trial is at the moment", deadline_s=600)
        victim.kill(*who)
        removed_by_the_next_start(victim)

    def test_nothing_is_left_of_a_server_after_which_another_goes_on(self, start: StartVictim) -> None:
        victim = start(at="step", choices=THREADS)
        wait_until(lambda: victim.moment, "the trial is at the moment", deadline_s=600)
        first = {process.pid for process in marked(victim.mark)} - {victim.process.pid}
        (victim.study / "data" / "moment").unlink()
        os.kill(victim.server, signal.SIGKILL)
        wait_until(lambda: victim.moment, "the trial is there again", deadline_s=600)
        assert first.isdisjoint(process.pid for process in marked(victim.mark))
        victim.kill("parent")
        victim.killed |= first
        removed_by_the_next_start(victim)


@pytest.mark.skipif(find_compiler() is None, reason="torch.compile needs a C++ compiler here")
class TestKilledWhileCompiling:
    def test_compilers_end_too(self, start: StartVictim) -> None:
        victim = start(at="never", choices=f"{COMPILED}, {WORKERS}")
        wait_until(
            lambda: victim.process.poll() is not None or victim.pids("cc1plus"),
            "a compiler runs",
            deadline_s=600,
        )
        victim.kill("parent", "server")
        removed_by_the_next_start(victim)


class TestScratch:
    """The temporary directory of a server, and when it may be removed."""

    def test_one_in_use_is_left_alone(self, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        scratch = Scratch()
        (scratch.path / "file").touch()
        remove_abandoned(temporary)
        assert (scratch.path / "file").exists()
        scratch.close()
        scratch.close()
        assert left_in(temporary) == []

    def test_one_is_in_use_as_long_as_anybody_who_inherited_it_lives(
        self, temporary: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        scratch = Scratch()
        heir = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            pass_fds=(scratch.fileno(),),
        )
        os.close(scratch.fileno())  # as the kernel does for a killed parent
        remove_abandoned(temporary)
        assert scratch.path.exists()
        heir.communicate()
        remove_abandoned(temporary)
        assert not scratch.path.exists()

    def test_a_directory_for_a_moment_is_removed_even_where_its_user_was_killed(
        self, temporary: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        script = "import os\nfrom steptune.tuner.trials.scratch import scratch_directory\n"
        script += "with scratch_directory() as path:\n    (path / 'file').touch()\n    os.kill(os.getpid(), 9)\n"
        subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(temporary)}, check=False)
        assert [path.name for path in left_in(temporary) if path.name == "file"] == ["file"]
        with scratch_directory() as path:
            assert path.is_dir()
        assert left_in(temporary) == []

    def test_what_a_killed_process_left_in_shared_memory_goes_too(self, temporary: Path) -> None:
        """But for what others made: a process that never was under the server, and one that lives."""
        script = """
import os, sys
from pathlib import Path
from steptune.tuner.trials.scratch import Scratch, note_forks
before = os.fork()
if before == 0:
    os._exit(0)
scratch = Scratch()
note_forks(scratch.path)
made = [before, os.fork()]
if made[1] == 0:
    os._exit(0)
for pid in made:
    os.waitpid(pid, 0)
made.append(os.fork())
if made[2] == 0:
    os.close(scratch.fileno())
    sys.stdin.read()
    os._exit(0)
while not (scratch.path / "forked" / str(made[2])).exists():
    pass
for pid in made:
    Path(f"/dev/shm/torch_{pid}_7_7").touch()
print(*made, flush=True)
os.kill(os.getpid(), 9)
"""
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        assert process.stdin
        names = [f"torch_{pid}_7_7" for pid in process.stdout.readline().split()]
        process.wait()
        try:
            remove_abandoned(temporary)
            assert [(SHARED_MEMORY / name).exists() for name in names] == [True, False, True]
        finally:
            process.stdin.close()
            process.stdout.close()
            for name in names:
                (SHARED_MEMORY / name).unlink(missing_ok=True)

    def test_a_folder_that_is_not_ours_is_left_alone(self, temporary: Path) -> None:
        (temporary / "steptune-notes").mkdir()
        remove_abandoned(temporary)
        assert (temporary / "steptune-notes").exists()
        shutil.rmtree(temporary / "steptune-notes")

    def test_a_base_too_long_for_sockets_is_not_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        long = tmp_path / ("x" * 60)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        scratch = Scratch()
        try:
            assert len(str(scratch.path / "pymp-12345678" / "listener-12345678")) <= 107
        finally:
            scratch.close()

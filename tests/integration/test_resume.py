"""A killed study goes on where it was: `kill -9` at random moments, then `steptune resume`."""

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from marked import VARIABLE, left_in, marked, new_mark, none_left, shared_memory_of, wait_until

pytestmark = pytest.mark.xdist_group("killed")

ROOT = Path(__file__).parents[2]
WORKLOAD = "zoo:synthetic?batch=4&load_ms=2&compute_ms=1&length=256"
TALLY_VARIABLE = "STEPTUNE_TALLY"
"""Where the long test writes its tally; nowhere if unset."""
RESULT_TABLES = {
    "trials": "SELECT trial_id, record, result, state FROM trials WHERE result IS NOT NULL",
    "trial_attempts": "SELECT a.* FROM trial_attempts a JOIN trials USING (trial_id) WHERE result IS NOT NULL",
    "breakdowns": "SELECT * FROM breakdowns",
    "findings": "SELECT * FROM findings",
}


class StudyProcess:
    """`steptune` in processes of its own, with a database of its own."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.database = folder / "study.db"
        self.temporary = temporary
        self.mark = new_mark()
        self.pids: set[int] = set()
        self._folder = folder
        self._log = folder / "output.log"

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "steptune", *arguments],
                cwd=self._folder,
                env={
                    **os.environ,
                    VARIABLE: self.mark,
                    "PYTHONPATH": str(ROOT / "src"),
                    "TMPDIR": str(self.temporary),
                    "STEPTUNE_DATABASE_URL": f"sqlite:///{self.database}",
                    "STEPTUNE_DATA_DIRECTORY": str(self._folder / "data"),
                },
                stdout=log,
                stderr=log,
            )

    def tune(self) -> subprocess.Popen[bytes]:
        """Few and cheap trials; load from other tests must not void the windows."""
        return self.start(
            *("tune", WORKLOAD, "--budget", "90s", "--trials", "5", "--foreign-load", "100"),
            *("--only", "data_loading", "--only", "optimizer_implementation", "--output", "results"),
        )

    def resume(self) -> subprocess.Popen[bytes]:
        return self.start("resume", "last", "--output", "results")

    def finish(self, process: subprocess.Popen[bytes]) -> int:
        """Waits for the end of a command; its status."""
        return process.wait(timeout=600)

    def query(self, sql: str) -> list[tuple]:
        """Rows of the database; none while it, or its tables, are not there yet."""
        if not self.database.exists():
            return []
        with closing(sqlite3.connect(self.database, timeout=30)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchone():
                return []
            return connection.execute(sql).fetchall()

    def complete(self) -> dict[str, set[tuple]]:
        """Every row that belongs to a complete trial."""
        return {table: set(self.query(sql)) for table, sql in RESULT_TABLES.items()}

    def num_complete(self) -> int:
        return len(self.query(RESULT_TABLES["trials"]))

    def state(self) -> str:
        rows = self.query("SELECT state FROM studies")
        assert len(rows) <= 1, "a resumed study is the same study"
        return rows[0][0] if rows else ""

    def await_moment(self, process: subprocess.Popen[bytes], moment: random.Random) -> bool:
        """Waits for a random number of further complete trials, and a random time longer.

        Returns:
            Whether the study still runs.
        """
        wanted = self.num_complete() + moment.randint(0, 3)

        def reached() -> bool:
            ended = process.poll() is not None or self.state() == "completed"
            return ended or (bool(self.state()) and self.num_complete() >= wanted)

        wait_until(reached, f"{wanted} trials are complete", deadline_s=600)
        try:
            process.wait(timeout=moment.uniform(0, 2.5))
        except subprocess.TimeoutExpired:
            return self.state() != "completed"
        return False

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        self.pids |= {member.pid for member in marked(self.mark)}
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def check_end(self) -> None:
        """The study is complete, with an answer, and left nothing on the machine but its results."""
        assert self.state() == "completed", self.log()
        assert len(self.query("SELECT * FROM recommendations")) == 1
        assert (self._folder / "results" / "steptune.json").exists()
        none_left(self.mark)
        assert shared_memory_of(self.pids) == []
        assert left_in(self.temporary) == []
        asked = self.query(
            "SELECT candidate_key, purpose, replicate FROM trials WHERE result IS NOT NULL AND purpose != 'companion'"
        )
        assert len(asked) == len(set(asked)), "a complete trial was run again"


@contextmanager
def study_in(folder: Path) -> Iterator[StudyProcess]:
    """Sockets are made under the temporary directory, and their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="st") as temporary:
        yield StudyProcess(folder, Path(temporary))


@pytest.fixture
def study(tmp_path: Path) -> Iterator[StudyProcess]:
    with study_in(tmp_path) as process:
        yield process


def survive_kills(study: StudyProcess, num_kills: int, moment: random.Random) -> list[dict]:
    """Kills the parent again and again, then lets it finish.

    Returns:
        What was complete and what was lost at each kill.
    """
    kills: list[dict] = []
    kept: dict[str, set[tuple]] = {}
    process = study.tune()
    while len(kills) < num_kills:
        if not study.await_moment(process, moment):
            break
        study.kill(process)
        if study.state() == "completed":  # the answer was committed between the look and the kill
            process = study.start("export", "last", "--output", "results")
            break
        none_left(study.mark)
        before = study.complete()
        running = len(study.query("SELECT 1 FROM trials WHERE result IS NULL AND state = 'running'"))
        kills.append({"complete_trials": len(before["trials"]), "trials_in_flight": running})
        for table, rows in kept.items():
            assert rows <= before[table], f"rows of {table} were lost or changed"
        kept = before
        process = study.resume()
    assert study.finish(process) == 0, study.log()
    now = study.complete()
    for table, rows in kept.items():
        assert rows <= now[table], f"rows of {table} were lost or changed"
    return kills


class TestKilled:
    def test_a_killed_study_completes_and_keeps_every_row(self, study: StudyProcess) -> None:
        kills = survive_kills(study, 1, random.Random(1))
        assert len(kills) == 1
        study.check_end()

    @pytest.mark.soak
    @pytest.mark.timeout(5400)
    def test_twenty_kills(self, tmp_path: Path) -> None:
        """Studies are killed up to five times each until twenty kills were survived."""
        wanted, kills, studies = 20, [], 0
        moment = random.Random(20)
        while len(kills) < wanted:
            folder = tmp_path / f"study{studies}"
            folder.mkdir()
            with study_in(folder) as study:
                survived = survive_kills(study, min(5, wanted - len(kills)), moment)
                kills += [{"study": studies, **kill} for kill in survived]
                study.check_end()
            studies += 1
        write_tally(kills, studies)


def write_tally(kills: list[dict], num_studies: int) -> None:
    path = os.environ.get(TALLY_VARIABLE)
    if path:
        Path(path).write_text(
            json.dumps(
                {
                    "command": f"{TALLY_VARIABLE}={path} pytest -m soak tests/integration/test_resume.py",
                    "date": datetime.now(UTC).date().isoformat(),
                    "cores": psutil.cpu_count(),
                    "kills": len(kills),
                    "studies": num_studies,
                    "studies_completed": num_studies,
                    "complete_rows_lost_or_changed": 0,
                    "complete_trials_repeated": 0,
                    "processes_left": 0,
                    "moments": kills,
                },
                indent=1,
            )
            + "\n",
            encoding="utf-8",
        )


class TestInterrupted:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
    def test_an_interrupted_study_keeps_what_was_measured_and_reports_the_best(
        self, study: StudyProcess, number: signal.Signals
    ) -> None:
        """Ctrl-C reaches the whole foreground group on a terminal; SIGTERM only the parent."""
        process = study.tune()
        wait_until(
            lambda: study.num_complete() >= 2 or process.poll() is not None, "the baseline is measured", deadline_s=600
        )
        before = study.complete()
        process.send_signal(number)
        assert study.finish(process) == 0, study.log()
        assert study.state() == "interrupted"
        none_left(study.mark)
        now = study.complete()
        assert all(rows <= now[table] for table, rows in before.items())
        ((record,),) = study.query("SELECT record FROM recommendations")
        assert json.loads(record)["certificate"]["ended"] == "interrupted"
        assert study.query("SELECT 1 FROM trials WHERE state = 'running'") == []

    def test_an_interrupt_before_the_baseline_says_so_and_leaves_a_study_to_resume(self, study: StudyProcess) -> None:
        process = study.tune()
        # A trial server checks the workload before there is a study.
        wait_until(lambda: study.state() and has_trial_server(study.mark), "the study has begun", deadline_s=600)
        process.send_signal(signal.SIGINT)
        assert study.finish(process) == 130, study.log()
        assert study.state() == "interrupted"
        none_left(study.mark)


def has_trial_server(mark: str) -> bool:
    """Before it, a command starts other processes: to see how trials can be isolated."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("steptune.tuner.trials.server" in process.cmdline() for process in marked(mark))
    return False

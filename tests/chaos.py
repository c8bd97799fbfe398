"""Workers, trial servers and ranks are killed at random, the database and the service restarted: nothing is lost.

    python tests/chaos.py --kills 1000 --minutes 30 --database postgresql --output benchmarks/results/chaos.json

Processes are found by a mark in their environment, and killed by their id.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
from marked import VARIABLE, left_in, marked, new_mark, wait_until
from postgres import PostgresServer, running_server
from sqlalchemy import func, select

from steptune.service.connections import create_engine_for, reading
from steptune.service.database import migrate
from steptune.service.models import QueueEntryRow, ResourceSlotRow, StudyRow, TrialAttemptRow, TrialRow
from steptune.service.queue import StudyQueue
from steptune.service.submission import new_study
from steptune.tuner.errors import StateConflict, StoreUnavailable
from steptune.tuner.hardware import cpu_name
from steptune.tuner.records import MeasureSettings, StudySettings, StudyState, TrialState, new_id

ROOT = Path(__file__).parents[1]
WORKLOAD = "zoo:synthetic?batch=4&load_ms=1&compute_ms=1&length=64"
LEASE_S, HEARTBEAT_S = 6.0, 1.0
ENDED = {StudyState.COMPLETED, StudyState.FAILED, StudyState.CANCELLED}
WISHES = 0.15
"""How often somebody wants something of a study, for every kill."""
CANCELS = 0.2
"""Of the wishes for a study that runs."""
DRAINS = 0.2
"""Of the ends of workers, those that are told to end."""
CLAIM = re.compile(r"study (\w+): claim (\d+) on")


@dataclass
class Tally:
    """What was done, and what came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    drains: int = 0
    wishes: Counter[str] = field(default_factory=Counter)
    database_restarts: int = 0
    service_restarts: int = 0
    studies: Counter[str] = field(default_factory=Counter)
    claims: int = 0
    trials: Counter[str] = field(default_factory=Counter)
    moves: int = 0
    results_lost_or_changed: int = 0
    results_counted_twice: int = 0
    attempts_without_a_claim: int = 0
    processes_left: int = 0
    leases_left: int = 0
    slots_left: int = 0
    files_left: int = 0
    seconds: float = 0.0

    @property
    def num_kills(self) -> int:
        return sum(self.kills.values())

    @property
    def faults(self) -> dict[str, int]:
        names = ("results_lost_or_changed", "results_counted_twice", "attempts_without_a_claim")
        names += ("processes_left", "leases_left", "slots_left", "files_left")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def as_json(self) -> dict[str, object]:
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


class Service:
    """Three workers and the web service on one database, each in a process of its own, started again when it ends.

    Args:
        wide: Whether the third worker has the cores of both others; else that of the first.
    """

    def __init__(self, folder: Path, temporary: Path, url: str, *, wide: bool = False) -> None:
        self.mark = new_mark()
        self.folder = folder
        self.temporary = temporary
        self.url = url
        self.engine = create_engine_for(url)
        self.queue = StudyQueue(self.engine, lease_s=LEASE_S, max_losses=10**6)
        cores = sorted(os.sched_getaffinity(0))
        chosen = [cores[:1], cores[1:2] or cores, cores[:2] if wide else cores[:1]]
        self._commands = {f"worker-{n}": self._worker(n, own) for n, own in enumerate(chosen)}
        self.port = _free_port()
        self._commands["serve"] = ["serve", "--port", str(self.port), "--no-worker", "--insecure-no-auth"]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @staticmethod
    def _worker(number: int, cores: list[int]) -> list[str]:
        numbers = ",".join(map(str, cores))
        return ["worker", "--name", f"worker-{number}", "--cpus", numbers, "--isolation", "none"]

    def keep_running(self) -> None:
        """Starts what does not run."""
        for name, arguments in self._commands.items():
            process = self._processes.get(name)
            if process is None or process.poll() is not None:
                self._processes[name] = self._start(name, arguments)

    def _start(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        settings = {
            "database_url": self.url,
            "data_directory": self.folder / "data",
            "lease_s": LEASE_S,
            "heartbeat_s": HEARTBEAT_S,
            "poll_s": 0.3,
            "max_losses": 10**6,
            "drain_s": 1,
        }
        variables = {f"STEPTUNE_{key.upper()}": str(value) for key, value in settings.items()}
        own = {VARIABLE: self.mark, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(self.temporary)}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "steptune", *arguments],
                cwd=self.folder,
                env={**os.environ, **own, **variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def restart_api(self) -> None:
        """`kill -9`, then another; it is ready again."""
        process = self._processes["serve"]
        process.kill()
        process.wait()
        self.keep_running()
        wait_until(self.is_ready, "the service is ready again", deadline_s=120)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def victims(self) -> dict[str, list[int]]:
        """Ids of processes by what they are."""
        found: dict[str, list[int]] = {"worker": [], "server": [], "rank": []}
        workers = {process.pid for name, process in self._processes.items() if name.startswith("worker")}
        for process in marked(self.mark):
            try:
                command, parent = process.cmdline(), process.ppid()
            except psutil.NoSuchProcess:
                continue
            if process.pid in workers:
                found["worker"].append(process.pid)
            elif "steptune.tuner.trials.server" in command:
                found["server" if parent in workers else "rank"].append(process.pid)
        return {kind: pids for kind, pids in found.items() if pids}

    def submit(self, number: int) -> str:
        """Every second finds nothing but its baseline, which is soon done; every third may go on with any number of
        cores of this processor.
        """
        settings = StudySettings(
            budget_s=3600,
            max_trials=4 + number % 2,
            only=("optimizer_implementation",),
            device="cpu",
            confirm_blocks=2,
            num_finalists=1,
            seed=number,
            measure=MeasureSettings(window_s=0.02, min_rounds=2, max_rounds=2, cap_s=0.2, foreign_cpu_share=1000),
        )
        study = new_study(new_id(), WORKLOAD, settings, self.folder / "data")
        self.queue.submit(study, owner_id=None, required_hardware=cpu_name()[:8] if number % 3 == 0 else None)
        return study.study_id

    def states(self) -> dict[str, StudyState]:
        with reading(self.engine) as session:
            query = select(StudyRow.study_id, StudyRow.state)
            return {row.study_id: StudyState(row.state) for row in session.execute(query)}

    def results(self) -> dict[str, str]:
        """A digest of every complete trial."""
        with reading(self.engine) as session:
            query = select(TrialRow.trial_id, TrialRow.record, TrialRow.result, TrialRow.state)
            complete = session.execute(query.where(TrialRow.result.is_not(None)))
            return {row.trial_id: hashlib.sha256(repr(tuple(row)).encode()).hexdigest() for row in complete}

    def stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            process.wait(timeout=120)
        self.engine.dispose()

    def log(self) -> str:
        return "\n".join(p.read_text(errors="replace")[-4000:] for p in sorted(self.folder.glob("*.log")))


class Chaos:
    """Kills, and checks after every kill that nothing complete has changed."""

    def __init__(self, service: Service, server: PostgresServer | None, seed: int, pause_s: float) -> None:
        self.service = service
        self.server = server
        self.random = random.Random(seed)
        self.tally = Tally()
        self._pause_s = pause_s
        self._began_s = time.monotonic()
        self._kept: dict[str, str] = {}

    def run(self, *, num_studies: int, kills: int, seconds: float, refill: bool) -> Tally:
        """Kills until there were so many kills or so much time has passed, then lets all studies end."""
        service = self.service
        service.keep_running()
        for number in range(num_studies):
            service.submit(number)
        wait_until(service.is_ready, "the service is ready", deadline_s=120)
        wait_until(lambda: len(service.queue.workers()) >= 3, "all workers have arrived", deadline_s=240)
        self._began_s = time.monotonic()
        restarts = [0.5] if not refill else [0.1 * n for n in range(1, 10)]
        submitted = num_studies
        while (share := max(self.tally.num_kills / kills, self._elapsed_s() / seconds)) < 1:
            time.sleep(self.random.uniform(0.2, 2 * self._pause_s - 0.2))
            self.kill_one()
            service.keep_running()
            if self.random.random() < WISHES:
                self.wish()
            if restarts and share > restarts[0]:
                restarts.pop(0)
                self.restart_what_is_below()
            self.look()
            running = sum(state not in ENDED for state in service.states().values())
            for _ in range(num_studies - running if refill else 0):
                service.submit(submitted)
                submitted += 1
        for _ in restarts[:1]:
            self.restart_what_is_below()
        self.finish()
        return self.tally

    def kill_one(self) -> None:
        victims = self.service.victims()
        if not victims:
            return
        kind = self.random.choice(sorted(victims))
        drains = kind == "worker" and self.random.random() < DRAINS
        try:
            os.kill(self.random.choice(victims[kind]), signal.SIGTERM if drains else signal.SIGKILL)
        except ProcessLookupError:
            return
        self.tally.drains += drains
        self.tally.kills[kind] += not drains

    def wish(self) -> None:
        """What users do meanwhile: pause a study, go on with those that are paused, seldom cancel one."""
        states = self.service.states()
        begun = sorted(study for study, state in states.items() if state is StudyState.RUNNING)
        paused = any(state is StudyState.PAUSED for state in states.values())
        if paused:
            self.go_on()
        elif begun:
            name = "cancel" if self.random.random() < CANCELS else "pause"
            with suppress(StateConflict, StoreUnavailable):
                getattr(self.service.queue, name)(self.random.choice(begun))
                self.tally.wishes[name] += 1

    def go_on(self) -> None:
        for study, state in self.service.states().items():
            if state is StudyState.PAUSED:
                with suppress(StateConflict, StoreUnavailable):
                    self.service.queue.resume(study)
                    self.tally.wishes["resume"] += 1

    def restart_what_is_below(self) -> None:
        if self.server is not None:
            self.server.stop()
            time.sleep(0.5)
            self.server.start()
            self.tally.database_restarts += 1
        self.service.restart_api()
        self.tally.service_restarts += 1

    def look(self) -> None:
        """What was complete is complete, as it was."""
        try:
            now = self.service.results()
        except StoreUnavailable:
            return
        self.tally.results_lost_or_changed += sum(now.get(name) != digest for name, digest in self._kept.items())
        self._kept = now

    def finish(self) -> None:
        def all_ended() -> bool:
            self.service.keep_running()
            self.go_on()
            return all(state in ENDED for state in self.service.states().values())

        wait_until(all_ended, f"every study has ended: {self.service.states()}", deadline_s=1800)
        self.look()
        self.service.stop()
        self.count()
        self.tally.seconds = round(self._elapsed_s(), 1)

    def count(self) -> None:
        """What is left, and whether what was recorded adds up."""
        service, tally = self.service, self.tally
        deadline = time.monotonic() + 30
        while marked(service.mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        tally.processes_left = len(marked(service.mark))
        left = [path.relative_to(service.temporary) for path in left_in(service.temporary)]
        tally.files_left = len(left)
        if left:
            sys.stderr.write("left: " + ", ".join(map(str, left[:50])) + "\n")
        engine = create_engine_for(service.url)
        with reading(engine) as session:
            tally.studies = Counter(session.scalars(select(StudyRow.state)))
            tally.claims = int(session.scalar(select(func.sum(QueueEntryRow.num_claims))) or 0)
            tally.leases_left = len(
                session.scalars(select(QueueEntryRow).where(QueueEntryRow.lease_until.is_not(None))).all()
            )
            tally.slots_left = len(
                session.scalars(select(ResourceSlotRow).where(ResourceSlotRow.study_id.is_not(None))).all()
            )
            trials = session.scalars(select(TrialRow)).all()
            attempts = session.scalars(select(TrialAttemptRow)).all()
            session.expunge_all()  # they are read from here on
        engine.dispose()
        tally.trials = Counter(trial.state for trial in trials)
        tally.moves = len({trial.trial_group for trial in trials if trial.purpose == "moved"})
        self._count_twice(trials, attempts)

    def _count_twice(self, trials: list[TrialRow], attempts: list[TrialAttemptRow]) -> None:
        """A result is asked for once in a place, and every attempt belongs to a claim that a worker says it had."""
        tally = self.tally
        asked = Counter(
            (t.study_id, t.candidate_key, t.purpose, t.replicate, json.loads(t.result)["place"])
            for t in trials
            if t.result is not None and t.purpose != "companion"
        )
        tally.results_counted_twice = sum(count - 1 for count in asked.values())
        by_trial = {trial.trial_id: trial for trial in trials}
        claims = Counter(CLAIM.findall("\n".join(p.read_text() for p in self.service.folder.glob("worker-*.log"))))
        tally.results_counted_twice += sum(count - 1 for count in claims.values())
        completed = Counter(attempt.trial_id for attempt in attempts if attempt.outcome == TrialState.COMPLETED.value)
        tally.results_counted_twice += sum(count - 1 for count in completed.values())
        last = Counter(attempt.trial_id for attempt in attempts)
        for attempt in attempts:
            trial = by_trial[attempt.trial_id]
            known = (trial.study_id, str(attempt.fence)) in claims
            repeated = attempt.number < last[attempt.trial_id]
            expected = TrialState.FAILED.value if repeated else trial.state
            ended = attempt.outcome == expected and trial.state != TrialState.RUNNING.value
            tally.attempts_without_a_claim += not (known and ended)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def chaos(database: str, folder: Path, *, seed: int, pause_s: float, wide: bool = False) -> Iterator[Chaos]:
    """A service on a fresh database."""
    with ExitStack() as stack:
        server = None
        if database == "postgresql":
            server = stack.enter_context(running_server())
            url = server.create("chaos")
        else:
            url = f"sqlite:///{folder}/steptune.db"
        migrate(url)
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="st")))
        service = Service(folder, temporary, url, wide=wide)
        try:
            yield Chaos(service, server, seed, pause_s)
        finally:
            for process in marked(service.mark):
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="postgresql")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=1.7)
    parser.add_argument("--wide", action="store_true", help="the third worker has the cores of both others")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="stp-chaos-") as folder,
        chaos(
            arguments.database, Path(folder), seed=arguments.seed, pause_s=arguments.pause, wide=arguments.wide
        ) as run,
    ):
        try:
            tally = run.run(num_studies=10, kills=arguments.kills, seconds=60 * arguments.minutes, refill=True)
        except BaseException:
            sys.stderr.write(run.service.log())
            raise
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": cpu_name(),
        "cores": psutil.cpu_count(),
        "python": platform.python_version(),
        "command": " ".join(["python", "tests/chaos.py", *sys.argv[1:]]),
    }
    report |= tally.as_json()
    text = json.dumps(report, indent=1) + "\n"
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text)
    sys.exit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()

"""Workers, trial servers and ranks are killed or stopped at random, the service restarted, the database crashed, the
disk filled, while users submit, follow and change their studies over HTTP: nothing is lost, and nobody misses an event.

    python tests/support/chaos.py --minutes 10 --output benchmarks/results/chaos.json

Processes are found by a mark in their environment, and killed by their id.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import random
import re
import signal
import socket
import sqlite3
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
from followers import StudyFollower, UserFollower, missed
from marked import VARIABLE, left_in, marked, new_mark, wait_until
from msgspec.structs import replace
from postgres import PostgresServer, running_server, server_binaries
from small_disk import SmallDisk, small_disk
from sqlalchemy import func, select

import steptune
from steptune.service.access.authentication import Access
from steptune.service.client import Client
from steptune.service.client.errors import ServiceError, ServiceUnreachableError
from steptune.service.connections import create_engine_for, reading, writing
from steptune.service.database import migrate
from steptune.service.models import (
    EventRow,
    QueueEntryRow,
    RecommendationRow,
    ResourceSlotRow,
    StudyRow,
    TrialAttemptRow,
    TrialRow,
    UserRow,
)
from steptune.service.queue import StudyQueue
from steptune.service.settings import Settings
from steptune.service.settings.scopes import Scope
from steptune.tuner.errors import StoreError, StoreUnavailableError
from steptune.tuner.hardware import cpu_name
from steptune.tuner.records import FailureKind, MeasureSettings, Study, StudyState, TrialState
from steptune.tuner.store_rules import decode, encode

ROOT = Path(__file__).parents[2]
WORKLOAD = "zoo:synthetic?batch=4&load_ms=1&compute_ms=1&length=64"
LEASE_S, HEARTBEAT_S = 6.0, 1.0
STOP_S = 2 * LEASE_S
FULL_S = 8.0
DISK_BYTES = 256 << 20
NOBODYS = "hardware that nobody has"
KINDS = ("worker", "server", "rank")
ENDED = {StudyState.COMPLETED, StudyState.FAILED, StudyState.CANCELLED}
WISHES = 0.15
"""How often somebody wants something of a study, for every kill."""
CANCELS = 0.2
"""Share of cancellations among the wishes for a study that runs."""
DRAINS = 0.2
"""Share of the ends of workers in which they are told to end."""
CLAIM = re.compile(r"study (\w+): claim (\d+) on")


@dataclass
class Tally:
    """Count of what was done, and of its outcome."""

    kills: Counter[str] = field(default_factory=Counter)
    drains: int = 0
    wishes: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    full_disks: int = 0
    left_out: list[str] = field(default_factory=list)
    """Parts of what should have been done that were left out, with the reason."""
    database_restarts: int = 0
    database_crashes: int = 0
    service_restarts: int = 0
    studies: Counter[str] = field(default_factory=Counter)
    claims: int = 0
    trials: Counter[str] = field(default_factory=Counter)
    moves: int = 0
    results_lost_or_changed: int = 0
    results_counted_twice: int = 0
    attempts_without_a_claim: int = 0
    studies_without_an_answer: int = 0
    events: int = 0
    events_not_told: Counter[str] = field(default_factory=Counter)
    """Counts by what went wrong, over all streams."""
    streams: int = 0
    """Streams that were opened, again after each restart, by those who follow all of their studies."""
    studies_not_followed_to_the_end: int = 0
    processes_left: int = 0
    leases_left: int = 0
    slots_left: int = 0
    files_left: int = 0
    seconds: float = 0.0

    @property
    def num_kills(self) -> int:
        return sum(self.kills.values())

    @property
    def faults(self) -> dict[str, object]:
        """Counts that must be zero: no study fails because something around it was killed."""
        names = ("results_lost_or_changed", "results_counted_twice", "attempts_without_a_claim")
        names += ("studies_without_an_answer", "events_not_told", "studies_not_followed_to_the_end")
        names += ("processes_left", "leases_left", "slots_left", "files_left")
        found = {name: getattr(self, name) for name in names if getattr(self, name)}
        return found | ({"failed": self.studies["failed"]} if self.studies["failed"] else {})

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
        self.tokens = self._users()
        self.studies: list[StudyFollower] = []
        self.users: list[UserFollower] = []
        cores = sorted(os.sched_getaffinity(0))
        chosen = [cores[:1], cores[1:2] or cores, cores[:2] if wide else cores[:1]]
        self._commands = {f"worker-{n}": self._worker(n, own) for n, own in enumerate(chosen)}
        self.port = _free_port()
        self._commands["serve"] = ["serve", "--port", str(self.port), "--no-worker"]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def _users(self) -> dict[str, str]:
        """Two users, and a token of each."""
        access = Access(self.engine, Settings(_env_file=None, database_url=self.url))
        scopes = [Scope.READ, Scope.SUBMIT]
        users = [access.users.create(name, scopes) for name in ("ada", "bob")]
        return {u.name: access.tokens.issue(u.user_id, name="", scopes=scopes, days=1)[1].text for u in users}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, name: str) -> Client:
        """Client that gives up soon: the same may be asked again."""
        return Client(self.address, self.tokens[name], retries=1, timeout_s=60)

    def follow(self) -> None:
        """Everybody follows all that is theirs from now on."""
        self.users = [UserFollower(self.address, token) for token in self.tokens.values()]
        for follower in self.users:
            follower.start()

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
            "requests_per_minute": 10**6,
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
        wait_until(self.is_ready, "the service is ready again", deadline_s=300)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=30) as answer:
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

    def submit(self, number: int) -> None:
        """Over HTTP. Every second finds nothing but its baseline, which is soon done; every third may go on with any
        number of cores of this processor. It waits for hardware that nobody has until it is as quick as it can be.
        """
        name = sorted(self.tokens)[number % 2]
        asked = {"max_trials": 4 + number % 2, "only": ["optimizer_implementation"], "device": "cpu", "seed": number}
        try:
            with self.client(name) as client:
                study_id = client.submit(WORKLOAD, budget_s=3600, hardware=NOBODYS, **asked).study_id
            self._quicken(study_id, cpu_name()[:8] if number % 3 == 0 else None)
        except (ServiceError, ServiceUnreachableError, StoreError):
            return  # it is asked again; what nobody was told of waits for nobody's hardware, and is removed at the end
        follower = StudyFollower(self.address, self.tokens[name], study_id)
        self.studies.append(follower)
        follower.start()

    def _quicken(self, study_id: str, hardware: str | None) -> None:
        quick = MeasureSettings(window_s=0.02, min_rounds=2, max_rounds=2, cap_s=0.2, foreign_cpu_share=1000)
        with writing(self.engine) as session:
            row = session.get_one(StudyRow, study_id, with_for_update=True)
            study = decode(row.record, Study)
            settings = replace(study.settings, confirm_blocks=2, num_finalists=1, measure=quick)
            row.record = encode(replace(study, settings=settings))
            session.get_one(QueueEntryRow, study_id).required_hardware = hardware

    def forget_what_nobody_follows(self) -> None:
        followed = {follower.study_id for follower in self.studies}
        for study_id in set(self.states()) - followed:
            self.queue.delete(study_id)

    def freeze(self, name: str) -> int | None:
        """Stops a process of ours as it is; returns its id."""
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            return None
        process.send_signal(signal.SIGSTOP)
        return process.pid

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

    def log_of(self, study_id: str) -> str:
        """Log of a study, in the order of time."""
        lines = (p.read_text(errors="replace").splitlines() for p in self.folder.glob("worker-*.log"))
        return "\n".join(sorted(line for line in itertools.chain(*lines) if study_id in line))

    def log(self) -> str:
        return "\n".join(p.read_text(errors="replace")[-4000:] for p in sorted(self.folder.glob("*.log")))


class Chaos:
    """Kills, and checks after every kill that nothing complete has changed."""

    def __init__(
        self, service: Service, server: PostgresServer | None, disk: SmallDisk | None, seed: int, pause_s: float
    ) -> None:
        self.service = service
        self.disk = disk
        self._stopped: dict[int, float] = {}
        self._full_until_s = 0.0
        self.server = server
        self.random = random.Random(seed)
        self.tally = Tally()
        if disk is None:
            self.tally.left_out.append("full disks: this process may mount no small file system")
        if server is None:
            self.tally.left_out.append("restarts and crashes of the database: SQLite has no server")
        self._pause_s = pause_s
        self._began_s = time.monotonic()
        self._kept: dict[str, str] = {}

    def run(self, *, num_studies: int, kills: int, seconds: float, refill: bool) -> Tally:
        """Kills until there were so many kills or so much time has passed, then lets all studies end."""
        service = self.service
        service.keep_running()
        wait_until(service.is_ready, "the service is ready", deadline_s=300)
        service.follow()
        submitted = self.refill(0, num_studies)
        wait_until(lambda: len(service.queue.workers()) >= 3, "all workers have arrived", deadline_s=240)
        self._began_s = time.monotonic()
        troubles = [0.2, 0.4, 0.6, 0.8] if not refill else [0.05 * n for n in range(1, 20)]
        kinds = itertools.cycle((self.restart_api, self.stop_one, self.fill_disk, self.restart_database))
        while (share := max(self.tally.num_kills / kills, self._elapsed_s() / seconds)) < 1:
            time.sleep(self.random.uniform(0.2, 2 * self._pause_s - 0.2))
            self.kill_one()
            service.keep_running()
            self.relieve()
            if self.random.random() < WISHES:
                self.wish()
            if troubles and share > troubles[0]:
                troubles.pop(0)
                next(kinds)()
            self.look()
            if refill:
                submitted = self.refill(submitted, num_studies)
        for _ in troubles:
            next(kinds)()
        self.finish()
        return self.tally

    def refill(self, submitted: int, num_studies: int) -> int:
        """Submit studies until there are as many as there should be; return how many there were until now."""
        running = sum(not follower.has_ended for follower in self.service.studies)
        for _ in range(num_studies - running):
            self.service.submit(submitted)
            submitted += 1
        return submitted

    def kill_one(self) -> None:
        """Kill as many of each kind: workers are always there, trial servers and ranks for seconds."""
        victims = self.service.victims()
        kind = min(sorted(victims), key=self._times_hit, default="")
        if not kind or self._times_hit(kind) > min(map(self._times_hit, KINDS)):
            return
        drains = kind == "worker" and self.random.random() < DRAINS
        try:
            os.kill(self.random.choice(victims[kind]), signal.SIGTERM if drains else signal.SIGKILL)
        except ProcessLookupError:
            return
        self.tally.drains += drains
        self.tally.kills[kind] += not drains

    def _times_hit(self, kind: str) -> int:
        return self.tally.kills[kind] + (self.tally.drains if kind == "worker" else 0)

    def stop_one(self) -> None:
        """SIGSTOP of a worker for longer than its lease: it comes back as one that was presumed dead."""
        name = f"worker-{self.random.randrange(3)}"
        pid = self.service.freeze(name)
        if pid is not None:
            self._stopped[pid] = time.monotonic() + STOP_S
            self.tally.stops[name] += 1

    def fill_disk(self) -> None:
        """Uploads, studies' folders and kept files have no room for a while."""
        if self.disk is not None:
            self.disk.fill()
            self._full_until_s = time.monotonic() + FULL_S
            self.tally.full_disks += 1

    def relieve(self, *, at_once: bool = False) -> None:
        """Ends the stops and the want of room whose time is over."""
        now_s = time.monotonic()
        for pid, until_s in list(self._stopped.items()):
            if at_once or until_s <= now_s:
                del self._stopped[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        if self.disk is not None and (at_once or self._full_until_s <= now_s):
            self.disk.free()

    def wish(self) -> None:
        """Act as users do meanwhile: pause a study, go on with those that are paused, seldom cancel one."""
        try:
            states = self.service.states()
        except StoreUnavailableError:
            return
        begun = sorted(study for study, state in states.items() if state is StudyState.RUNNING)
        paused = any(state is StudyState.PAUSED for state in states.values())
        if paused:
            self.go_on()
        elif begun:
            name = "cancel" if self.random.random() < CANCELS else "pause"
            self._ask(name, self.random.choice(begun))

    def go_on(self) -> None:
        for study, state in self.service.states().items():
            if state is StudyState.PAUSED:
                self._ask("resume", study)

    def _ask(self, name: str, study_id: str) -> None:
        """Over HTTP, as its owner; the other one is refused."""
        for user in self.service.tokens:
            with suppress(ServiceError, ServiceUnreachableError), self.service.client(user) as client:
                getattr(client, name)(study_id)
                self.tally.wishes[name] += 1

    def restart_api(self) -> None:
        self.service.restart_api()
        self.tally.service_restarts += 1

    def restart_database(self) -> None:
        """Every second time it crashes."""
        if self.server is None:
            return
        if self.tally.database_crashes <= self.tally.database_restarts:
            self.server.crash()
            self.tally.database_crashes += 1
        else:
            self.server.stop()
            self.tally.database_restarts += 1
        time.sleep(0.5)
        self.server.start()

    def look(self) -> None:
        """Check that results that were complete still are, and are the same."""
        try:
            now = self.service.results()
        except StoreUnavailableError:
            return
        self.tally.results_lost_or_changed += sum(now.get(name) != digest for name, digest in self._kept.items())
        self._kept = now

    def finish(self) -> None:
        def all_ended() -> bool:
            self.service.keep_running()
            self.go_on()
            return all(state in ENDED for state in self.service.states().values())

        self.relieve(at_once=True)
        self.service.forget_what_nobody_follows()
        wait_until(all_ended, f"every study has ended: {self.service.states()}", deadline_s=1800)
        self.look()
        self.count_events()
        self.service.stop()
        self.count()
        self.tally.seconds = round(self._elapsed_s(), 1)

    def count_events(self) -> None:
        """Count events that somebody was not told once and in order, and studies whose end was not their last event."""
        service, tally = self.service, self.tally
        with suppress(AssertionError):  # counted below
            wait_until(lambda: all(f.has_ended for f in service.studies), "all are told of the end", deadline_s=300)
        with reading(service.engine) as session:
            rows = session.execute(select(EventRow.event_id, EventRow.study_id, EventRow.owner_id)).all()
            names = {user.user_id: user.name for user in session.scalars(select(UserRow))}
        tally.events = len(rows)
        for follower in service.studies:
            there = [number for number, study_id, _ in rows if study_id == follower.study_id]
            tally.events_not_told += missed(follower.told, there)
            ends = follower.has_ended and follower.last[0] == "state" and follower.last[1] in ENDED
            tally.studies_not_followed_to_the_end += not ends
        for name, user in zip(service.tokens, service.users, strict=True):
            there = [n for n, _, owner in rows if names.get(owner or "") == name and n > (user.first or 0)]
            with suppress(AssertionError):
                wait_until(lambda user=user, there=there: set(there) <= set(user.told), "all is told", deadline_s=300)
            user.leaves.set()
            tally.events_not_told += missed(user.told, there)
            tally.streams += user.num_streams

    def count(self) -> None:
        """Count processes and files that are left, and check that the records add up."""
        service, tally = self.service, self.tally
        deadline = time.monotonic() + 120
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
            failed = session.scalars(select(StudyRow.study_id).where(StudyRow.state == StudyState.FAILED.value)).all()
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
            answered = set(session.scalars(select(RecommendationRow.study_id)))
            completed = select(StudyRow.study_id).where(StudyRow.state == StudyState.COMPLETED.value)
            tally.studies_without_an_answer = len(set(session.scalars(completed)) - answered)
        engine.dispose()
        for study_id in failed:
            sys.stderr.write(f"failed: {study_id}\n{service.log_of(study_id)}\n")
        tally.trials = Counter(trial.state for trial in trials)
        tally.moves = len({trial.trial_group for trial in trials if trial.purpose == "moved"})
        self._count_twice(trials, attempts)

    def _count_twice(self, trials: list[TrialRow], attempts: list[TrialAttemptRow]) -> None:
        """A result is asked for once in a place, and every attempt belongs to a claim that a worker says it had."""
        tally = self.tally
        asked = Counter(
            (t.study_id, t.candidate_key, t.purpose, t.replicate, json.loads(t.result)["place"])
            for t in trials
            if t.result is not None and t.purpose != "companion" and not _says_nothing(t)
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


def _says_nothing(trial: TrialRow) -> bool:
    """Say whether its environment ended it, as often as that is repeated: it is asked for again."""
    return trial.failure_kind == FailureKind.INFRASTRUCTURE.value


def database_version(database: str) -> str:
    """Version of the database that the run was on."""
    if database == "sqlite":
        return f"SQLite {sqlite3.sqlite_version}"
    binaries = server_binaries()
    assert binaries is not None
    return subprocess.run(
        [binaries / "postgres", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def chaos(database: str, folder: Path, *, seed: int, pause_s: float, wide: bool = False) -> Iterator[Chaos]:
    """A service on a fresh database, whose files lie on a small disk where one can be had."""
    with ExitStack() as stack:
        server = None
        disk = stack.enter_context(small_disk(folder / "data", DISK_BYTES))
        if database == "postgresql":
            server = stack.enter_context(running_server(durable=True))
            url = server.create("chaos")
        else:
            url = f"sqlite:///{folder}/steptune.db"
        migrate(url)
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="st")))
        service = Service(folder, temporary, url, wide=wide)
        try:
            yield Chaos(service, server, disk, seed, pause_s)
        finally:
            for process in marked(service.mark):
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="postgresql")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--studies", type=int, default=6, help="that are under way at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=3.0)
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
            tally = run.run(
                num_studies=arguments.studies, kills=arguments.kills, seconds=60 * arguments.minutes, refill=True
            )
        except BaseException:
            sys.stderr.write(run.service.log())
            raise
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": cpu_name(),
        "cores": psutil.cpu_count(),
        "python": platform.python_version(),
        "steptune": steptune.__version__,
        "torch": importlib.metadata.version("torch"),
        "database": database_version(arguments.database),
        "load": os.getloadavg(),
        "command": " ".join(["python", "tests/support/chaos.py", *sys.argv[1:]]),
    }
    report |= tally.as_json()
    text = json.dumps(report, indent=1) + "\n"
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text)
    sys.exit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()

"""A fleet at work: a thousand studies at the same time, through the service's own queue, workers, store and events.

Everything is real but the trials: the workers run `steptune.service.worker.loop.Worker` with its leases and heartbeats,
the search chooses what to try, and results are stored in PostgreSQL. In the place of a runner stands its double, whose
trials take the time that trials take and compute nothing, and which tells of its progress as the runner does. Workers
are threads of a few processes here, which share the cores with the database and the server. On a fleet they do not, so
they have a lower priority than those.

    PYTHONPATH=src python benchmarks/fleet_simulation.py --studies 1000 --out benchmarks/results/fleet_simulation.json

- `claims`: from the question of an idle worker to its answer that has a study, asked twice a second during all of the
  run by a process of its own, as a worker is one, for a study that only it may take. `claims_in_threads` is the same
  of the simulated workers, some hundred of which share an interpreter and its lock.
- `event lag`: from the time that a writer gives an event, before its commit, until a client of `/api/v1/events` has it.
- `rows` and `bytes`: live rows of the tables, and `pg_column_size` of them; `growth` is what the tables take on disk.
- `model`: rows and bytes by `docs/scale.md`, for so many studies, trials, and seconds that workers held studies.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
from fleet_crew import Member, probe_claims, run_workers
from sqlalchemy import Engine, text

from steptune.service.access.tokens import TokenStore
from steptune.service.access.users import UserStore
from steptune.service.connections import create_engine_for
from steptune.service.database import migrate
from steptune.service.queue import StudyQueue
from steptune.service.settings.scopes import Scope
from steptune.service.submission import new_study
from steptune.tuner.records import StudySettings, new_id

ROOT = Path(__file__).parents[1]
USERS = 20
FOLLOWERS = 5
"""Users who follow their own studies, beside one administrator who follows all."""
TABLES = (
    *("studies", "queue_entries", "events", "decisions", "recommendations", "strategy_outcomes"),
    *("trials", "trial_attempts", "breakdowns", "kernel_stats", "gap_stats", "collective_stats"),
    *("findings", "artifacts"),
)
SAMPLE_S = 5.0
DELIVERY_S = 30.0


# --- the server and who follows -------------------------------------------------------------------------


@contextmanager
def server(url: str, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """The port and the process of an API server without a worker."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "STEPTUNE_DATA_DIRECTORY": str(folder / "data"),
        "STEPTUNE_REQUESTS_PER_MINUTE": "100000000",
    }
    command = [sys.executable, "-m", "steptune", "serve", "--no-worker", "--port", "0", "--database-url", url]
    log = folder / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen([*command], stderr=output, stdout=output, env=environment, cwd=folder)
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"serves http://[^:]+:(\d+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield int(found[1]), psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


class Follower(threading.Thread):
    """A client of the stream of events.

    Attributes:
        lags_s: How long each event was under way.
        numbers: Of the events that came.
    """

    def __init__(self, port: int, token: str) -> None:
        super().__init__(daemon=True)
        self.lags_s: list[float] = []
        self.numbers: set[int] = set()
        self.reconnected = 0
        self._url = f"http://127.0.0.1:{port}/api/v1/events"
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "text/event-stream"}
        self._last = 0
        self.ended = threading.Event()
        self.connected = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                self._follow()
            except httpx.HTTPError:
                self.reconnected += 1
                time.sleep(0.2)

    def _follow(self) -> None:
        headers = {**self._headers, **({"Last-Event-ID": str(self._last)} if self._last else {})}
        with httpx.stream("GET", self._url, headers=headers, timeout=60) as answer:
            answer.raise_for_status()
            self.connected.set()
            for line in answer.iter_lines():
                if line.startswith("id:"):
                    self._last = int(line[3:])
                    self.numbers.add(self._last)
                elif line.startswith("data:"):
                    written = datetime.fromisoformat(json.loads(line[5:])["at"])
                    self.lags_s.append((datetime.now(UTC) - written).total_seconds())
                if self.ended.is_set():
                    return


# --- the database ---------------------------------------------------------------------------------------


def table_sizes(connection: Any) -> dict[str, dict[str, int]]:
    """Live rows, their bytes, and what each table takes on disk with its indexes."""
    found = {}
    for name in TABLES:
        rows, size = connection.execute(
            text(f"select count(*), coalesce(sum(pg_column_size(t.*)), 0) from {name} t")
        ).one()
        disk = connection.scalar(text(f"select pg_total_relation_size('{name}')"))
        found[name] = {"rows": int(rows), "bytes": int(size), "disk_bytes": int(disk)}
    return found


def model(studies: int, trials: int, held_s: float) -> dict[str, float]:
    """Rows and bytes as `docs/scale.md` says them."""
    return {
        name: constants["per_study"] * studies + constants["per_trial"] * trials + constants["per_held_s"] * held_s
        for name, constants in MODEL.items()
    }


MODEL = {
    "rows": {"per_study": 27.7, "per_trial": 29.0, "per_held_s": 0.0924},
    "bytes": {"per_study": 14_070.0, "per_trial": 7_670.0, "per_held_s": 49.7},
}
"""Solved from three runs of other sizes than the one that is reported: 40 studies of 3 trials of 4 s, 40 of 3 trials of
40 s, and 30 of 7 trials of 8 s, each with two processes and within 5 s. Five rows of windows a trial are gone since."""


SUMS = """select (select count(*) from trials where state <> 'completed'), sum(num_lost), sum(device_seconds)
    from queue_entries"""


def await_end(
    engine: Engine, prober: str, studies: int, deadline_s: float, crew: Sequence[Member]
) -> tuple[int, dict[str, int], float]:
    """Wait until all studies have ended, or the deadline.

    Raises:
        MemberLostError: A process of the fleet has died, so that the run shows nothing.

    Returns:
        Most that ran at a time, studies by state, and seconds.
    """
    running, states, began_s = 0, {}, time.monotonic()
    by_state = text("select state, count(*) from studies where owner_id <> :prober group by state")
    while time.monotonic() - began_s < deadline_s:
        time.sleep(SAMPLE_S)
        for member in crew:
            member.check()
        with engine.connect() as connection:
            states = dict(connection.execute(by_state, {"prober": prober}).all())
        running = max(running, states.get("running", 0))
        print(f"{time.monotonic() - began_s:6.0f} s", states, f"load {os.getloadavg()[0]:.1f}", flush=True)
        if sum(states.values()) == studies and not {"running", "queued"} & states.keys():
            break
    return running, states, time.monotonic() - began_s


def undelivered(engine: Engine, follower: Follower) -> set[int]:
    """Numbers of the events that are stored, and that a follower of all studies has not got."""
    with engine.connect() as connection:
        return set(connection.scalars(text("select event_id from events"))) - follower.numbers


def await_delivery(engine: Engine, follower: Follower) -> None:
    """Wait until a follower of all studies has all events; those that it never gets are counted as lost."""
    deadline_s = time.monotonic() + DELIVERY_S
    while undelivered(engine, follower) and time.monotonic() < deadline_s:
        time.sleep(0.2)


# --- all of it ------------------------------------------------------------------------------------------


def submit(url: str, folder: Path, owners: list[str], count: int, ramp_s: float, max_trials: int) -> None:
    """Submit studies, evenly over some seconds."""
    engine = create_engine_for(url)
    queue = StudyQueue(engine)
    began_s = time.monotonic()
    for number in range(count):
        settings = StudySettings(
            budget_s=6 * 3600.0,
            max_trials=max_trials,
            device="cpu",
            num_finalists=0,
            seed=number,
        )
        study = new_study(new_id(), "zoo:synthetic", settings, folder / "data")
        queue.submit(study, owner_id=owners[number % len(owners)])
        time.sleep(max(0.0, began_s + (number + 1) * ramp_s / count - time.monotonic()))
    engine.dispose()


def simulate(
    url: str,
    folder: Path,
    *,
    studies: int,
    workers: int,
    processes: int,
    trial_s: float,
    max_trials: int,
    ramp_s: float,
    deadline_s: float,
    lease_s: float = 60.0,
    heartbeat_s: float = 10.0,
) -> dict[str, Any]:
    """Run the fleet until all studies have ended, and return what it took."""
    migrate(url)
    engine = create_engine_for(url)
    owners, prober, followers_of = _people(engine)
    with engine.connect() as connection:
        before = table_sizes(connection)
    options = {"trial_s": trial_s, "ramp_s": ramp_s, "lease_s": lease_s, "heartbeat_s": heartbeat_s}
    share = -(-workers // processes)
    with server(url, folder) as (port, serving):
        followers = followers_of(port)
        for follower in followers:
            follower.start()
            follower.connected.wait(60)
        parts = [
            Member(run_workers, url, str(folder), first, min(share, workers - first), options)
            for first in range(0, workers, share)
        ]
        probe = Member(probe_claims, url, str(folder), prober)
        submitting = threading.Thread(target=submit, args=(url, folder, owners, studies, ramp_s, max_trials))
        submitting.start()
        try:
            running, states, elapsed_s = await_end(engine, prober, studies, deadline_s, [*parts, probe])
            await_delivery(engine, followers[0])
            api_cpu_s = sum(serving.cpu_times()[:2])
        finally:
            for member in (*parts, probe):
                member.tell()
            submitting.join()
            for follower in followers:
                follower.ended.set()
        counted, probes_s = [part.counted() for part in parts], sorted(probe.counted())
        stored = _stored(engine, before, studies)
        lost_events = len(undelivered(engine, followers[0]))
    engine.dispose()
    taken_s = sorted(second for taken, _, _ in counted for second in taken)
    return {
        "studies": studies,
        "workers": workers,
        "processes": processes,
        "trial_s": trial_s,
        "max_trials": max_trials,
        "ramp_s": ramp_s,
        "lease_s": lease_s,
        "heartbeat_s": heartbeat_s,
        "elapsed_s": round(elapsed_s, 1),
        "at_a_time": running,
        "states": states,
        "lost": {"studies": studies - states.get("completed", 0), **stored.pop("lost"), "events": lost_events},
        "throughput": {
            "studies_per_min": round(60 * studies / elapsed_s, 1),
            "trials_per_s": round(stored["trials"] / elapsed_s, 2),
            "events_per_s": round(stored["tables"]["events"]["rows"] / elapsed_s, 1),
        },
        "claims": {"number": len(probes_s), **percentiles(probes_s)},
        "claims_in_threads": {
            "number": len(taken_s),
            **percentiles(taken_s),
            "looks_that_found_nothing": sum(idle for _, idle, _ in counted),
        },
        "event_lag": _lag(followers),
        "cpu_s": {
            "workers_per_study": round(sum(cpu for _, _, cpu in counted) / studies, 3),
            "api": round(api_cpu_s, 1),
        },
        **stored,
    }


def _people(engine: Engine) -> tuple[list[str], str, Callable[[int], list[Follower]]]:
    """Users who submit, the one who times claims, and followers of events at a port: an administrator's first."""
    users = UserStore(engine)
    owners = [users.create(f"user{number}", [Scope.SUBMIT, Scope.READ]).user_id for number in range(USERS)]
    prober = users.create("probe", [Scope.SUBMIT]).user_id
    admin = users.create("benchmark", [Scope.ADMIN]).user_id
    tokens = TokenStore(engine, lambda: datetime.now(UTC))
    issue = functools.partial(tokens.issue, name="", days=1)

    def followers_of(port: int) -> list[Follower]:
        return [
            Follower(port, issue(admin, scopes=[Scope.ADMIN])[1].text),
            *(Follower(port, issue(owner, scopes=[Scope.READ])[1].text) for owner in owners[:FOLLOWERS]),
        ]

    return owners, prober, followers_of


def _stored(engine: Engine, before: dict[str, dict[str, int]], studies: int) -> dict[str, Any]:
    """Rows and bytes that the studies left, beside the model, and trials and claims that were lost."""
    with engine.connect() as connection:
        after = table_sizes(connection)
        lost_trials, num_lost, held_s = connection.execute(text(SUMS)).one()
    grown = {
        kind: {name: after[name][kind] - before[name][kind] for name in TABLES}
        for kind in ("rows", "bytes", "disk_bytes")
    }
    trials, held_s = after["trials"]["rows"], float(held_s or 0.0)
    expected = model(studies, trials, held_s)
    return {
        "trials": trials,
        "held_s": round(held_s),
        "per_trial": {
            "rows": round(sum(grown["rows"].values()) / trials, 3),
            "bytes": round(sum(grown["bytes"].values()) / trials),
        },
        "model": {
            "rows": round(expected["rows"] / trials, 3),
            "bytes": round(expected["bytes"] / trials),
        },
        "tables": after,
        "growth_disk_bytes": grown["disk_bytes"],
        "lost": {"trials": int(lost_trials or 0), "claims": int(num_lost or 0)},
    }


def _lag(followers: Sequence[Follower]) -> dict[str, Any]:
    """Time until followers had the events."""
    lags_s = sorted(lag for follower in followers for lag in follower.lags_s)
    return {
        "delivered": len(lags_s),
        **percentiles(lags_s),
        "reconnected": sum(follower.reconnected for follower in followers),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median, tail and longest of sorted seconds, in ms."""
    if not seconds:
        return {}
    of = {"p50_ms": 0.5, "p99_ms": 0.99}
    found = {name: round(1e3 * seconds[int(share * (len(seconds) - 1))], 1) for name, share in of.items()}
    return {**found, "max_ms": round(1e3 * seconds[-1], 1)}


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from postgres import running_server
    from stamp import stamp

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--workers", type=int, help="default: as many as studies")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--trial-s", type=float, default=90.0)
    parser.add_argument("--max-trials", type=int, default=4)
    parser.add_argument("--ramp-s", type=float, default=300.0)
    parser.add_argument("--heartbeat-s", type=float, default=10.0)
    parser.add_argument("--lease-s", type=float, default=60.0)
    parser.add_argument("--deadline-s", type=float, default=3600.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    asked = {name: value for name, value in vars(arguments).items() if name != "out"}
    asked["workers"] = arguments.workers or arguments.studies
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch, running_server(durable=True) as postgres:
        found = simulate(postgres.create("fleet"), Path(scratch), **asked)
    document = {
        **found,
        "hardware": {
            "cpu": next((line.partition(": ")[2] for line in _cpuinfo() if line.startswith("model name")), ""),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
            "load_1min_before": round(load_before, 1),
            "load_1min_after": round(os.getloadavg()[0], 1),
            "machine": "shared",
        },
        **stamp(" ".join(["python", "benchmarks/fleet_simulation.py", *sys.argv[1:]]), code=("service", "benchmarks")),
    }
    written = json.dumps(document, indent=1) + "\n"
    print(written)
    if arguments.out is not None:
        arguments.out.write_text(written, encoding="utf-8")


def _cpuinfo() -> list[str]:
    return Path("/proc/cpuinfo").read_text("utf-8").splitlines()


if __name__ == "__main__":
    main()

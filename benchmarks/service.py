"""How fast the service answers, with 10,000 studies, 300,000 trials and their breakdowns in its database.

    python benchmarks/service.py --out service.json                       # both databases

A real study of two minutes is copied, with new ids, until the database is full. Then one API process (`steptune serve`,
without a worker) and the clients share this machine:

* reads: eight clients, each of which asks again as soon as it is answered: pages of 50 studies (any place in the list,
  any state), a study, a page of 50 trials, a trial's breakdown;
* claims: workers in processes of their own claim and release waiting studies;
* events: 100 streams follow everything while events are written; how many arrive, and how much later.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

HERE = Path(__file__).parent
# Python looks for modules beside a script first, and there this one would hide the package `service`.
sys.path = [*(path for path in sys.path if Path(path).absolute() != HERE.absolute()), str(HERE)]

import psutil  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from sqlalchemy import func, insert, select, text  # noqa: E402
from stamp import RESULTS, stamp  # noqa: E402

from steptune.service.access.tokens import TokenStore, utc_now  # noqa: E402
from steptune.service.access.users import UserStore  # noqa: E402
from steptune.service.connections import create_engine_for, writing  # noqa: E402
from steptune.service.database import migrate  # noqa: E402
from steptune.service.models import BreakdownRow, QueueEntryRow, RecommendationRow, StudyRow, TrialRow, UserRow  # noqa: E402
from steptune.service.queue import StudyQueue  # noqa: E402
from steptune.service.queue.records import WorkerOffer  # noqa: E402
from steptune.service.settings.scopes import Scope  # noqa: E402
from steptune.service.store import SqlStudyStore  # noqa: E402
from steptune.tuner.records import HardwareProfile, Study, StudyState, new_id  # noqa: E402
from steptune.tuner.store_rules import decode  # noqa: E402

ROOT = HERE.parent
NUM_STUDIES, TRIALS_OF_A_STUDY, NUM_USERS = 10_000, 30, 20
NUM_WAITING = 500
CLIENTS, SECONDS, ROUNDS = 8, 25.0, 5
STREAMS, EVENTS, EVENTS_PER_S = 100, 300, 20
CLAIMERS = 4


# --- filling ------------------------------------------------------------------------------------------


def template(folder: Path) -> list[dict]:
    """The rows of a real study: one of each table that is copied, trials with theirs."""
    url = f"sqlite:///{folder}/template.db"
    command = [
        sys.executable,
        "-m",
        "steptune",
        "tune",
        "zoo:synthetic",
        "--budget",
        "2m",
        "--database",
        url,
    ]
    subprocess.run([*command, "--output", str(folder / "results")], check=True, cwd=folder, env=environment(folder))
    engine = create_engine_for(url)
    with engine.connect() as connection:

        def rows(table: type) -> list[dict]:
            return [dict(row._mapping) for row in connection.execute(select(table.__table__))]

        trials = [row for row in rows(TrialRow) if row["result"] is not None]
        parts = rows(BreakdownRow)
        found = {
            "study": rows(StudyRow)[0],
            "recommendation": rows(RecommendationRow)[0],
            "trials": [(trial, [p for p in parts if p["trial_id"] == trial["trial_id"]]) for trial in trials],
        }
        for table in ("workloads", "hardware_profiles"):
            found[table] = [dict(row._mapping) for row in connection.execute(text(f"SELECT * FROM {table}"))]
    engine.dispose()
    return found


def fill(url: str, rows: dict, num_studies: int) -> tuple[list[str], list[str], list[str]]:
    """Copies the study; the ids of users, of studies and of some trials with a breakdown."""
    engine = create_engine_for(url)
    profiled = [pair for pair in rows["trials"] if pair[1]]
    trials = [(profiled if n % 2 else rows["trials"])[n % len(profiled)] for n in range(TRIALS_OF_A_STUDY)]
    users, studies, sample = [new_id() for _ in range(NUM_USERS)], [], []
    with writing(engine) as session:
        for table in ("workloads", "hardware_profiles"):
            for row in rows[table]:
                names = ", ".join(row)
                session.execute(text(f"INSERT INTO {table} ({names}) VALUES (:{', :'.join(row)})"), row)
        now = datetime.now(UTC)
        values = [{"user_id": u, "name": f"user{n}", "scopes": "read submit"} for n, u in enumerate(users)]
        session.execute(insert(UserRow), [{**value, "priority": 0, "created_at": now} for value in values])
    for first in range(0, num_studies, 100):
        batch: dict[type, list[dict]] = {t: [] for t in (StudyRow, QueueEntryRow, TrialRow, BreakdownRow)}
        answers = []
        for number in range(first, min(num_studies, first + 100)):
            study_id = new_id()
            studies.append(study_id)
            copy_study(rows, trials, study_id, random.choice(users), number, batch, answers, sample)
        with writing(engine) as session:
            for table, values in batch.items():
                session.execute(insert(table), values)
            session.execute(insert(RecommendationRow), answers)
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.exec_driver_sql("ANALYZE")
    engine.dispose()
    return users, studies, sample


def copy_study(
    rows: dict,
    trials: list,
    study_id: str,
    owner_id: str,
    number: int,
    batch: dict[type, list[dict]],
    answers: list[dict],
    sample: list[str],
) -> None:
    study, old = rows["study"], rows["study"]["study_id"]
    at = datetime.now(UTC) - timedelta(minutes=NUM_STUDIES - number)
    state = random.choices(["completed", "failed", "cancelled"], [90, 5, 5])[0]
    record = study["record"].replace(old, study_id)
    batch[StudyRow].append(
        {**study, "study_id": study_id, "owner_id": owner_id, "state": state, "created_at": at, "record": record}
    )
    batch[QueueEntryRow].append({"study_id": study_id, "queued_at": at, "ended_at": at, "device_seconds": 120.0})
    answer = rows["recommendation"]
    answers.append({**answer, "study_id": study_id, "record": answer["record"].replace(old, study_id)})
    for sequence, (trial, parts) in enumerate(trials, start=1):
        trial_id = new_id()
        texts = {
            name: trial[name].replace(old, study_id).replace(trial["trial_id"], trial_id)
            for name in ("record", "result")
        }
        batch[TrialRow].append({**trial, **texts, "trial_id": trial_id, "study_id": study_id, "sequence": sequence})
        batch[BreakdownRow] += [{**part, "trial_id": trial_id} for part in parts]
        if parts and random.random() < 0.01:
            sample.append(trial_id)


# --- the server ---------------------------------------------------------------------------------------


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "STEPTUNE_DATA_DIRECTORY": str(folder / "data"),
        "STEPTUNE_REQUESTS_PER_MINUTE": "100000000",
    }


@contextmanager
def server(url: str, folder: Path) -> Iterator[int]:
    """The port of one API process."""
    command = [
        sys.executable,
        "-m",
        "steptune",
        "serve",
        "--no-worker",
        "--port",
        "0",
        "--database-url",
        url,
    ]
    command += ["--log-level", "warning"]
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log, env=environment(folder), cwd=folder)
    try:
        yield wait_for_port(process, folder / "serve.log")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def wait_for_port(process: subprocess.Popen, log: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"serves http://[^:]+:(\d+)", log.read_text())
        if found:
            return int(found[1])
        time.sleep(0.05)
    raise SystemExit(log.read_text())


class Connection:
    """One connection of HTTP/1.1 that stays open: a client that costs less than the server."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token

    async def __aenter__(self) -> Connection:
        self.reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, path: str, accept: str = "application/json") -> None:
        self._writer.write(
            f"GET /api/v1{path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n"
            f"Authorization: Bearer {self._token}\r\n\r\n".encode()
        )
        await self._writer.drain()

    async def get(self, path: str) -> bytes:
        await self.ask(path)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        body = await self.reader.readexactly(length)
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise SystemExit(f"{path}: {head.decode()} {body[:500]!r}")
        return body


async def closed_loop(port: int, token: str, path: Callable[[], str], seconds: float) -> dict:
    """Eight clients that ask again as soon as they are answered."""
    latencies: list[float] = []
    sizes: list[int] = []

    async def client() -> None:
        async with Connection(port, token) as connection:
            while time.perf_counter() < end:
                begin = time.perf_counter()
                sizes.append(len(await connection.get(path())))
                latencies.append(time.perf_counter() - begin)

    async with Connection(port, token) as connection:
        for _ in range(50):
            await connection.get(path())
    stolen_s = psutil.cpu_times().steal
    begin = time.perf_counter()
    end = begin + seconds
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    elapsed = time.perf_counter() - begin
    stolen = (psutil.cpu_times().steal - stolen_s) / elapsed / psutil.cpu_count()
    milliseconds = sorted(1e3 * value for value in latencies)
    return {
        "requests_per_s": round(len(latencies) / elapsed),
        "p50_ms": round(statistics.median(milliseconds), 2),
        "p99_ms": round(milliseconds[int(0.99 * len(milliseconds))], 2),
        "max_ms": round(milliseconds[-1], 2),
        "num_requests": len(latencies),
        "stolen_by_other_machines": round(stolen, 3),
        "median_bytes": round(statistics.median(sizes)),
    }


def reads(port: int, token: str, studies: list[str], trials: list[str], seconds: float) -> dict:
    everywhere = asyncio.run(cursors(port, token, ""))
    failed = asyncio.run(cursors(port, token, "&state=failed"))
    paths: dict[str, Callable[[], str]] = {
        "list of studies": lambda: f"/studies?limit=50{random.choice(everywhere)}",
        "list of failed studies": lambda: f"/studies?limit=50&state=failed{random.choice(failed)}",
        "study": lambda: f"/studies/{random.choice(studies)}",
        "list of trials": lambda: f"/studies/{random.choice(studies)}/trials?limit=50",
        "breakdown": lambda: f"/trials/{random.choice(trials)}/breakdown",
    }
    found: dict[str, list[dict]] = {name: [] for name in paths}
    for _ in range(ROUNDS):  # in turns: what else runs on the machine changes by the minute
        for name, path in paths.items():
            found[name].append(asyncio.run(closed_loop(port, token, path, seconds / ROUNDS)))
            print(name, found[name][-1], flush=True)
    return {name: _of_rounds(rounds) for name, rounds in found.items()}


def _of_rounds(rounds: list[dict]) -> dict:
    """Medians of the rounds, and each round's tail beside what was taken from the machine during it."""
    medians = {name: statistics.median(r[name] for r in rounds) for name in ("requests_per_s", "p50_ms", "p99_ms")}
    kept = ("p99_ms", "max_ms", "num_requests", "stolen_by_other_machines")
    return {
        **medians,
        "median_bytes": rounds[0]["median_bytes"],
        "rounds": [{name: one[name] for name in kept} for one in rounds],
    }


async def cursors(port: int, token: str, query: str) -> list[str]:
    """The places of a list at which its pages begin."""
    found = [""]
    async with Connection(port, token) as connection:
        while following := json.loads(await connection.get(f"/studies?limit=50{query}{found[-1]}"))["next_cursor"]:
            found.append(f"&cursor={following}")
    return found


# --- events -------------------------------------------------------------------------------------------


async def follow(port: int, token: str, ready: Callable[[], Awaitable[None]], delays: list[float], wanted: int) -> int:
    """Counts the benchmark's events of one stream, and how long each was under way."""
    count = 0
    async with Connection(port, token) as connection:
        await connection.ask("/events", "text/event-stream")
        head = await connection.reader.readuntil(b"\r\n\r\n")
        if b"text/event-stream" not in head:
            raise SystemExit(f"not a stream: {head.decode()}")
        await ready()
        while count < wanted:
            line = await connection.reader.readline()
            if not line:
                raise SystemExit("the service ended a stream")
            found = re.search(rb'"sent_ns": ?(\d+)', line)
            if found:
                delays.append((time.time_ns() - int(found[1])) / 1e6)
                count += 1
    return count


async def deliver(port: int, token: str, url: str, study_id: str) -> dict:
    """Events that arrive at every stream."""
    engine = create_engine_for(url)
    store = SqlStudyStore(engine)
    delays: list[float] = []
    connected = asyncio.Semaphore(0)

    async def ready() -> None:
        connected.release()

    streams = [asyncio.create_task(follow(port, token, ready, delays, EVENTS)) for _ in range(STREAMS)]
    for _ in range(STREAMS):
        await connected.acquire()
    await asyncio.sleep(1)
    begin = time.perf_counter()
    for number in range(EVENTS):
        await asyncio.to_thread(store.add_event, study_id, "progress", {"sent_ns": time.time_ns(), "number": number})
        await asyncio.sleep(max(0.0, begin + (number + 1) / EVENTS_PER_S - time.perf_counter()))
    counts = await asyncio.wait_for(asyncio.gather(*streams), timeout=60)
    store.close()
    delays.sort()
    return {
        "streams": STREAMS,
        "written": EVENTS,
        "written_per_s": EVENTS_PER_S,
        "delivered": sum(counts),
        "lost": STREAMS * EVENTS - sum(counts),
        "p50_ms": round(statistics.median(delays), 1),
        "p99_ms": round(delays[int(0.99 * len(delays))], 1),
    }


# --- claims -------------------------------------------------------------------------------------------


def claim_all(url: str, number: int, profile: HardwareProfile) -> list[tuple[str, float]]:
    """Claims and releases until nothing waits: what was claimed, and how long each claim took."""
    engine = create_engine_for(url)
    queue = StudyQueue(engine)
    offer = WorkerOffer(
        worker_id=new_id(), name=f"worker{number}", host_id=f"host{number}", profile=profile, cores=(0,)
    )
    queue.register(offer)
    claimed = []
    while True:
        begin = time.perf_counter()
        claim = queue.claim(offer)
        if claim is None:
            break
        claimed.append((claim.study.study_id, 1e3 * (time.perf_counter() - begin)))
        queue.release(claim.lease, StudyState.COMPLETED)
    engine.dispose()
    return claimed


def claims(url: str, rows: dict, users: list[str]) -> dict:
    """How many claims a second, with as many studies beside those that wait."""
    engine = create_engine_for(url)
    queue = StudyQueue(engine)
    study = decode(rows["study"]["record"], Study)
    profile = study.environment.hardware
    for number in range(NUM_WAITING):
        waiting = replace(study, study_id=new_id(), facts=None, environment=None)
        queue.submit(waiting, owner_id=users[number % len(users)])
    engine.dispose()
    begin = time.perf_counter()
    with ProcessPoolExecutor(CLAIMERS) as pool:
        results = list(pool.map(claim_all, [url] * CLAIMERS, range(CLAIMERS), [profile] * CLAIMERS))
    elapsed = time.perf_counter() - begin
    found = [claim for result in results for claim in result]
    took = sorted(milliseconds for _, milliseconds in found)
    return {
        "waiting": NUM_WAITING,
        "workers": CLAIMERS,
        "claimed": len(found),
        "claimed_twice": len(found) - len({study_id for study_id, _ in found}),
        "claims_and_releases_per_s": round(len(found) / elapsed, 1),
        "p50_ms": round(statistics.median(took), 2),
        "p99_ms": round(took[int(0.99 * len(took))], 2),
    }


# --- all of it ----------------------------------------------------------------------------------------


def measure(url: str, rows: dict, folder: Path, num_studies: int, seconds: float) -> dict:
    migrate(url)
    begin = time.perf_counter()
    users, studies, trials = fill(url, rows, num_studies)
    print(f"filled in {time.perf_counter() - begin:.0f} s", flush=True)
    engine = create_engine_for(url)
    admin = UserStore(engine).create("benchmark", [Scope.ADMIN])
    token = TokenStore(engine, utc_now).issue(admin.user_id, name="", scopes=[Scope.ADMIN], days=1)[1].text
    with engine.connect() as connection:
        counts = {
            table.__tablename__: connection.scalar(select(func.count()).select_from(table))
            for table in (StudyRow, TrialRow, BreakdownRow)
        }
        version = connection.scalar(text("select sqlite_version()" if "sqlite" in url else "show server_version"))
    engine.dispose()
    with server(url, folder) as port:
        found = {"rows": counts, "database_version": version}
        found["reads"] = reads(port, token, studies, trials, seconds)
        found["events"] = asyncio.run(deliver(port, token, url, studies[0]))
        print(found["events"], flush=True)
    found["claims"] = claims(url, rows, users)
    print(found["claims"], flush=True)
    return found


@contextmanager
def databases(names: list[str], folder: Path) -> Iterator[Iterator[tuple[str, str]]]:
    """URLs of new databases."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from postgres import running_server

    def each() -> Iterator[tuple[str, str]]:
        if "sqlite" in names:
            yield "sqlite", f"sqlite:///{folder}/service.db"
        if "postgresql" in names:
            with running_server() as postgres:
                yield "postgresql", postgres.create("service")

    yield each()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--studies", type=int, default=NUM_STUDIES)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each kind of read")
    parser.add_argument("--out", type=Path, default=RESULTS / "service.json")
    arguments = parser.parse_args()
    random.seed(0)
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = template(folder)
        with databases(arguments.databases, folder) as urls:
            for name, url in urls:
                print(name, flush=True)
                results[name] = measure(url, rows, folder, arguments.studies, arguments.seconds)
    document = {
        **results,
        "clients": CLIENTS,
        "hardware": {
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
            "load_1min": round(os.getloadavg()[0], 1),
            "machine": "shared",
        },
        **stamp(" ".join(["python", "benchmarks/service.py", *sys.argv[1:]]), code=("service", "benchmarks")),
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Cost of pages for a server, beside the JSON of the same study.

    python benchmarks/pages.py --out pages.json

A server in a process of its own shows a study of 200 trials that has ended, one of 200 trials that runs, a trial with a
profile, and an overview of 10,000 studies. One reader asks for JSON and for the page in turns; what counts is the CPU
time of the server for a request. A page is read *again* where nothing changed since it was last read, *anew* after a
change of what it shows (a title, a trial that completed with its decision, a study that ended with its answer), and
*first* where nobody has asked this process for anything of its study before. Then 50 readers of JSON are timed alone
and beside eight readers of the overview, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))  # before this folder: both have a module `predictions`

from msgspec.structs import replace  # noqa: E402
from page_builders import large_story, put  # noqa: E402
from stamp import RESULTS, stamp  # noqa: E402

from dashboards import NUM_STUDIES, TRACE, _copy_study, _profiled_trial, server  # noqa: E402
from steptune.service.connections import create_engine_for  # noqa: E402
from steptune.service.database import migrate  # noqa: E402
from steptune.service.queries.studies import change_study  # noqa: E402
from steptune.service.settings import Settings  # noqa: E402
from steptune.service.store import SqlStudyStore  # noqa: E402
from steptune.tuner.records import StudyState, TrialState, new_id  # noqa: E402

READINGS, UNREAD = 40, 3
ROUNDS, SECONDS = 3, 5.0
JSON_READERS, FLEET_READERS = 50, 8
AT_MOST = 20
"""Times the CPU time of the JSON, where a page is read again or anew."""


class Reader:
    """One connection that is kept."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)

    async def __aenter__(self) -> Reader:
        self._in, self._out = await asyncio.open_connection(self._address.hostname, self._address.port, limit=1 << 24)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._out.close()

    async def get(self, path: str) -> float:
        """Seconds until an answer was there."""
        begin = time.perf_counter()
        self._out.write(
            f"GET {path} HTTP/1.1\r\nHost: {self._address.netloc}\r\nAccept-Encoding: gzip\r\n\r\n".encode()
        )
        head = (await self._in.readuntil(b"\r\n\r\n")).decode().lower()
        if " 200 " not in head.partition("\r\n")[0]:
            raise RuntimeError(f"{path}: {head}")
        await self._in.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
        return time.perf_counter() - begin


def cpu_s(process: int) -> float:
    """Return the CPU time of all threads of a process, in seconds."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def spread(seconds: Iterable[float]) -> dict[str, float]:
    ordered = sorted(1e3 * value for value in seconds)
    at = {"p20_ms": 0.2, "median_ms": 0.5, "p80_ms": 0.8}
    return {name: round(ordered[int(share * (len(ordered) - 1))], 2) for name, share in at.items()}


@dataclass
class Shown:
    """A page, its JSON, what changes it, and pages of the same kind that nobody has read."""

    page: str
    document: str
    change: Callable[[], object]
    unread: Sequence[str]


class Times:
    """Times of requests by their kind: CPU time of the server, and time until the answer."""

    def __init__(self, reader: Reader, process: int) -> None:
        self._reader = reader
        self._process = process
        self.cpu: dict[str, list[float]] = {}
        self.wall: dict[str, list[float]] = {}

    async def get(self, kind: str, path: str) -> None:
        before = cpu_s(self._process)
        wall = await self._reader.get(path)
        await asyncio.sleep(0.01)  # the server writes its log after the answer
        self.cpu.setdefault(kind, []).append(cpu_s(self._process) - before)
        self.wall.setdefault(kind, []).append(wall)

    def report(self) -> dict[str, object]:
        middle = statistics.median(self.cpu["json"])
        return {
            "cpu": {kind: spread(values) for kind, values in self.cpu.items()},
            "wall": {kind: spread(values) for kind, values in self.wall.items()},
            "cpu over json": {
                kind: round(statistics.median(values) / middle, 1)
                for kind, values in self.cpu.items()
                if kind != "json"
            },
        }


async def side_by_side(url: str, process: int, shown: Shown) -> dict[str, object]:
    """A page and its JSON in turns."""
    async with Reader(url) as reader:
        for _ in range(3):
            await reader.get(shown.document), await reader.get(shown.page)
        times = Times(reader, process)
        for _ in range(READINGS):
            await times.get("json", shown.document)
            await times.get("page again", shown.page)
            shown.change()
            await times.get("page anew", shown.page)
        for path in shown.unread:
            await times.get("page first", path)
    return times.report()


async def loop(url: str, path: str, seconds: float, times: list[float]) -> None:
    end = time.perf_counter() + seconds
    async with Reader(url) as reader:
        while time.perf_counter() < end:
            times.append(await reader.get(path))


async def beside(url: str, document: str, pages: int) -> dict[str, float]:
    """Readers of JSON beside as many readers of the overview."""
    documents: list[float] = []
    overviews: list[float] = []
    await asyncio.gather(
        *(loop(url, document, SECONDS, documents) for _ in range(JSON_READERS)),
        *(loop(url, "/fleet", SECONDS, overviews) for _ in range(pages)),
    )
    ordered = sorted(documents)
    return {
        "json_per_s": round(len(documents) / SECONDS),
        "fleet_per_s": round(len(overviews) / SECONDS),
        "json_median_ms": round(1e3 * statistics.median(ordered), 1),
        "json_p99_ms": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 1),
    }


def fill(settings: Settings) -> tuple[SqlStudyStore, dict[str, Shown]]:
    """A store, and what it shows by name."""
    migrate(settings.database_url)
    store = SqlStudyStore(create_engine_for(settings.database_url))
    study, trials, decisions, answer = large_story(200)
    ended, *others = (put(store, (study, trials, decisions, answer))[0] for _ in range(1 + UNREAD))
    longer = large_story(200 + READINGS)
    running = replace(study, state=StudyState.RUNNING)
    runs, ids = put(store, (running, longer[1][:200], [], None))
    others_running = [put(store, (running, trials, decisions, None))[0] for _ in range(UNREAD)]
    profiled = [_profiled_trial(store, settings, TRACE) for _ in range(1 + UNREAD)]
    of_trial = store.trial(profiled[0]).study_id
    _copy_study(store, NUM_STUDIES)
    number = itertools.count()
    more = iter(longer[1][200:])

    def rename(study_id: str) -> None:
        change_study(store.engine, study_id, None, title=f"title {next(number)}", priority=None)

    def another_trial() -> None:
        trial = next(more)
        moved = replace(trial, trial_id=new_id(), study_id=runs)
        ids.append(moved.trial_id)
        store.begin_trials([replace(moved, state=TrialState.RUNNING, result=None)])
        if trial.result is not None:
            store.complete_trials([replace(trial.result, trial_id=moved.trial_id)])
        known = {one.trial_id: new for one, new in zip(longer[1], ids, strict=False)}
        kept = [d for d in longer[2] if all(i in known for i in d.trial_ids)]
        store.replace_decisions(runs, [replace(d, trial_ids=tuple(known[i] for i in d.trial_ids)) for d in kept])

    def paths(kind: str, ids: Iterable[str]) -> list[str]:
        return [f"/{kind}/{one}" for one in ids]

    return store, {
        "study of 200 trials, ended": Shown(
            f"/studies/{ended}", f"/api/v1/studies/{ended}", lambda: rename(ended), paths("studies", others)
        ),
        "study of 200 trials, running": Shown(
            f"/studies/{runs}", f"/api/v1/studies/{runs}", another_trial, paths("studies", others_running)
        ),
        "trial with a profile": Shown(
            f"/trials/{profiled[0]}",
            f"/api/v1/trials/{profiled[0]}",
            lambda: rename(of_trial),
            paths("trials", profiled[1:]),
        ),
        "fleet of 10,000 studies": Shown(
            "/fleet", "/api/v1/studies?limit=50", lambda: put(store, (study, [], [], answer)), []
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="pages.json", help="file in benchmarks/results, or a path")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings(_env_file=None, database_url=f"sqlite:///{folder}/s.db", data_directory=folder / "data")
        store, pages = fill(settings)
        with server(settings, folder) as (url, process):
            found = {}
            for title, shown in pages.items():
                found[title] = asyncio.run(side_by_side(url, process, shown))
                print(title, found[title], flush=True)
            document = next(iter(pages.values())).document
            rounds: dict[str, list[dict[str, float]]] = {"alone": [], "beside the fleet": []}
            for _ in range(ROUNDS):
                for kind, readers in (("alone", 0), ("beside the fleet", FLEET_READERS)):
                    rounds[kind].append(asyncio.run(beside(url, document, readers)))
                    print(kind, rounds[kind][-1], flush=True)
        store.close()
    result = {
        **stamp("python benchmarks/pages.py", ("dashboards", "service", "benchmarks")),
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
        "at_most_times_json": AT_MOST,
        "pages": found,
        "readers": {"json": JSON_READERS, "fleet": FLEET_READERS, "seconds": SECONDS, **rounds},
    }
    target = Path(arguments.out) if "/" in arguments.out else RESULTS / arguments.out
    target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

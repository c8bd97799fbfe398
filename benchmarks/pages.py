"""What pages cost a server, beside the JSON of the same study.

    python benchmarks/pages.py --out pages.json

A server in a process of its own shows a study of 200 trials that has ended, one of 200 trials that runs, a trial with a
profile, and an overview of 10,000 studies. One reader asks for a page and for JSON in turns. A page is *again* where
nothing changed since it was last read, and *anew* where something did: then it is rendered, once for all readers. Then
50 readers of JSON are timed alone and beside eight readers of the overview, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))  # before this folder: both have a module `predictions`

from msgspec.structs import replace  # noqa: E402
from page_builders import large_story, put  # noqa: E402
from sqlalchemy import update  # noqa: E402
from stamp import RESULTS, stamp  # noqa: E402

from dashboards import NUM_STUDIES, TRACE, _copy_study, _profiled_trial, serving  # noqa: E402
from steptune.service.connections import create_engine_for, writing  # noqa: E402
from steptune.service.database import migrate  # noqa: E402
from steptune.service.models import StudyRow  # noqa: E402
from steptune.service.settings import Settings  # noqa: E402
from steptune.service.store import SqlStudyStore  # noqa: E402
from steptune.tuner.records import StudyState  # noqa: E402

READINGS, RENDERINGS = 60, 12
ROUNDS, SECONDS = 3, 5.0
JSON_READERS, FLEET_READERS = 50, 8
AT_MOST = 20
"""Times the JSON."""


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


def spread(seconds: Iterable[float]) -> dict[str, float]:
    ordered = sorted(1e3 * value for value in seconds)
    at = {"p20_ms": 0.2, "median_ms": 0.5, "p80_ms": 0.8}
    return {name: round(ordered[int(share * (len(ordered) - 1))], 2) for name, share in at.items()}


async def side_by_side(url: str, store: SqlStudyStore, page: str, document: str, study_id: str) -> dict[str, object]:
    """A page and its JSON in turns."""
    times: dict[str, list[float]] = {"json": [], "page again": [], "page anew": []}
    async with Reader(url) as reader:
        for _ in range(3):
            await reader.get(document), await reader.get(page)
        for _ in range(READINGS):
            times["json"].append(await reader.get(document))
            times["page again"].append(await reader.get(page))
        for _ in range(RENDERINGS):
            with writing(store.engine) as session:
                changed = update(StudyRow).where(StudyRow.study_id == study_id)
                session.execute(changed.values(revision=StudyRow.revision + 1))
            times["page anew"].append(await reader.get(page))
    found: dict[str, object] = {name: spread(values) for name, values in times.items()}
    middle = statistics.median(times["json"])
    found |= {
        f"{name} over json": round(statistics.median(times[name]) / middle, 1) for name in ("page again", "page anew")
    }
    return found


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


def fill(settings: Settings) -> tuple[SqlStudyStore, dict[str, tuple[str, str, str]]]:
    """A store, and by the name of a page its path, that of its JSON, and the study that it is of."""
    migrate(settings.database_url)
    store = SqlStudyStore(create_engine_for(settings.database_url))
    study, trials, decisions, answer = large_story(200)
    ended, _ = put(store, (study, trials, decisions, answer))
    runs, _ = put(store, (replace(study, state=StudyState.RUNNING), trials, decisions, None))
    trial = _profiled_trial(store, settings, TRACE)
    of_trial = store.trial(trial).study_id
    _copy_study(store, NUM_STUDIES)
    return store, {
        "study of 200 trials, ended": (f"/studies/{ended}", f"/api/v1/studies/{ended}", ended),
        "study of 200 trials, running": (f"/studies/{runs}", f"/api/v1/studies/{runs}", runs),
        "trial with a profile": (f"/trials/{trial}", f"/api/v1/trials/{trial}", of_trial),
        "fleet of 10,000 studies": ("/fleet", "/api/v1/studies?limit=50", ended),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="pages.json", help="file in benchmarks/results, or a path")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings(_env_file=None, database_url=f"sqlite:///{folder}/s.db", data_directory=folder / "data")
        store, paths = fill(settings)
        with serving(settings, folder) as url:
            pages = {}
            for title, path in paths.items():
                pages[title] = asyncio.run(side_by_side(url, store, *path))
                print(title, pages[title], flush=True)
            document = next(iter(paths.values()))[1]
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
        "pages": pages,
        "readers": {"json": JSON_READERS, "fleet": FLEET_READERS, "seconds": SECONDS, **rounds},
    }
    target = Path(arguments.out) if "/" in arguments.out else RESULTS / arguments.out
    target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

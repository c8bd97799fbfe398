"""How soon pages are of use in a browser, and how much they send.

    python benchmarks/dashboards.py --out dashboards.json                 # needs chromium and the dev dependencies

A server in a process of its own shows a study of 200 trials, a trial with the profile of a trace of a million events,
and a list and an overview of 10,000 studies. Chromium, on the same machine, loads each page several times with an empty
cache and several times with what it kept. Interactive is when the page has its content, the figures in the window
are drawn, and the main thread has answered a key press; sent is what came over the connection, plotly.js apart. Then
the page is scrolled to its first figure, which with an empty cache brings plotly.js: how long until it is drawn?
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Python looks for modules beside a script first, and there this one would hide the package `dashboards`.
sys.path = [path for path in sys.path if Path(path).absolute() != HERE.absolute()]
sys.path += [str(HERE.parent), str(HERE.parent / "tests" / "support"), str(HERE)]

from msgspec.structs import replace  # noqa: E402
from page_builders import large_story, put, stories  # noqa: E402
from repeated_trace import repeat  # noqa: E402
from sqlalchemy import insert, select  # noqa: E402
from stamp import RESULTS, stamp  # noqa: E402
from traces import FOLDER  # noqa: E402

from steptune.service.artifacts import open_artifacts  # noqa: E402
from steptune.service.connections import create_engine_for, writing  # noqa: E402
from steptune.service.database import migrate  # noqa: E402
from steptune.service.models import RecommendationRow, StrategyOutcomeRow, StudyRow  # noqa: E402
from steptune.service.settings import Settings  # noqa: E402
from steptune.service.store import SqlStudyStore  # noqa: E402
from steptune.tuner.records import new_id  # noqa: E402
from steptune.tuner.trials.analysis_files import analysis_text, lanes_text  # noqa: E402

NUM_STUDIES, NUM_TRIALS, NUM_EVENTS = 10_000, 200, 1_000_000
LOADS = 7
WIDTH, HEIGHT = 1280, 900
TRACE = FOLDER / "h200_swin_t_launch_bound.json.gz"
WITHIN_S, AT_MOST_BYTES = 2.0, 1_000_000
CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]

INTERACTIVE = """
() => new Promise(resolve => {
  const inWindow = figure => {
    const box = figure.getBoundingClientRect();
    return box.top < innerHeight && box.bottom > 0;
  };
  const drawn = figure => figure.querySelector("svg.main-svg") !== null;
  const ready = () => document.documentElement?.dataset.ready === "yes"
    && [...document.querySelectorAll(".figure")].filter(inWindow).every(drawn);
  const look = () => location.protocol === "http:" && ready()
    ? requestAnimationFrame(() => setTimeout(() => resolve(performance.now()), 0))
    : requestAnimationFrame(look);
  look();
})
"""

FIRST_FIGURE = """
() => new Promise(resolve => {
  const figure = document.querySelector(".figure");
  if (figure === null) { resolve(0); return; }
  const began = performance.now();
  figure.scrollIntoView();
  const look = () => figure.querySelector("svg.main-svg")
    ? resolve(performance.now() - began)
    : requestAnimationFrame(look);
  look();
})
"""

SENT = """
() => ["navigation", "resource"].flatMap(kind => performance.getEntriesByType(kind))
  .map(entry => [entry.name, entry.transferSize])
"""


# --- filling ------------------------------------------------------------------------------------------


def fill(settings: Settings, trace: Path) -> dict[str, str]:
    """Fills a database; the paths of the pages by name."""
    migrate(settings.database_url)
    engine = create_engine_for(settings.database_url)
    store = SqlStudyStore(engine)
    study_id, _ = put(store, large_story(NUM_TRIALS))
    paths = {"study with 200 trials": f"/studies/{study_id}"}
    paths["trial with a million events"] = f"/trials/{_profiled_trial(store, settings, trace)}"
    _copy_study(store, NUM_STUDIES)
    engine.dispose()
    return {**paths, "list of 10,000 studies": "/", "list by gain": "/?sort=gain", "fleet of 10,000 studies": "/fleet"}


def _profiled_trial(store: SqlStudyStore, settings: Settings, trace: Path) -> str:
    """A trial whose profile is that of the trace, kept as a worker keeps it."""
    from steptune.tuner.profiling.analysis import analyse_traces, without_timelines
    from steptune.tuner.profiling.lanes import FULL_CELLS
    from steptune.tuner.profiling.tiles import shown_lanes

    whole = analyse_traces([trace], max_cells=FULL_CELLS)
    analysis = without_timelines(whole)
    study, trials, decisions, recommendation = stories()["complete"]
    breakdowns = tuple(b for rank in analysis.ranks for b in rank.breakdowns)
    result = replace(trials[0].result, breakdowns=breakdowns, findings=analysis.findings)
    _, ids = put(store, (study, [replace(trials[0], result=result), *trials[1:]], decisions, recommendation))
    for kind, text in {"analysis": analysis_text(analysis), "lanes": lanes_text(shown_lanes(whole)[0])}.items():
        kept = open_artifacts(settings).put([gzip.compress(text)])
        store.add_artifact(store.trial(ids[0]).study_id, ids[0], kind, kept.digest, kept.size_bytes)
    return ids[0]


def _copy_study(store: SqlStudyStore, count: int) -> None:
    """Rows of lists and overviews, of as many studies."""
    study_id, _ = put(store, stories()["complete"])
    with store.engine.connect() as connection:
        tables = (StudyRow, RecommendationRow, StrategyOutcomeRow)
        rows = [
            [dict(row._mapping) for row in connection.execute(select(t.__table__).where(t.study_id == study_id))]
            for t in tables
        ]
    limits = ("input", "compute", "host", "communication")
    with writing(store.engine) as session:
        for begin in range(0, count, 500):
            ids = [new_id() for _ in range(begin, min(begin + 500, count))]
            for table, found in zip(tables, rows, strict=True):
                copies = [{**row, "study_id": i} for i in ids for row in found]
                if table is RecommendationRow:
                    copies = [
                        {**c, "gain": 1 + n % 170 / 100, "bottleneck_before": limits[n % 4]}
                        for n, c in enumerate(copies)
                    ]
                session.execute(insert(table), copies)


# --- measuring ----------------------------------------------------------------------------------------


@contextmanager
def serving(settings: Settings, folder: Path) -> Iterator[str]:
    """The address of a server in a process of its own."""
    with server(settings, folder) as (url, _):
        yield url


@contextmanager
def server(settings: Settings, folder: Path) -> Iterator[tuple[str, int]]:
    """Address and number of the process of a server."""
    variables = {
        **os.environ,
        "STEPTUNE_DATABASE_URL": settings.database_url,
        "STEPTUNE_DATA_DIRECTORY": str(settings.data_directory),
        "STEPTUNE_INSECURE_NO_AUTH": "true",
        "STEPTUNE_REQUESTS_PER_MINUTE": "1000000",
        "PYTHONPATH": str(HERE.parent / "src"),
    }
    command = [sys.executable, "-m", "steptune", "serve", "--port", "0", "--no-worker"]
    log = folder / "serve.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=sink, stderr=sink)
    try:
        while b"Steptune serves " not in log.read_bytes():
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.05)
        url = log.read_text().partition("Steptune serves ")[2].partition("/api/v1")[0]
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(30)


class Tab:
    """A window of a browser of its own, driven by DevTools messages, of which none makes the browser watch scripts:
    with that on, as test drivers have it, plotly.js takes twice as long to start.
    """

    def __init__(self, chromium: str, folder: Path) -> None:
        commands, ours = os.pipe()
        theirs, answers = os.pipe()

        def connect() -> None:
            """The browser reads commands from descriptor 3 and answers on 4."""
            kept = os.dup(answers)
            os.dup2(commands, 3)
            os.dup2(kept, 4)

        self._process = subprocess.Popen(
            [chromium, *CHROMIUM, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"],
            stderr=subprocess.DEVNULL,
            preexec_fn=connect,
            pass_fds=(3, 4),
        )
        for descriptor in (commands, answers):
            os.close(descriptor)
        self._commands, self._answers = os.fdopen(ours, "wb", buffering=0), os.fdopen(theirs, "rb")
        self._waiting = b""
        self._number = 0
        self._session: dict[str, str] = {}

    def open(self) -> None:
        """A new window with an empty cache."""
        self._session = {}
        context = self.send("Target.createBrowserContext")["browserContextId"]
        wanted = {"url": "about:blank", "browserContextId": context, "width": WIDTH, "height": HEIGHT}
        target = self.send("Target.createTarget", **wanted)["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def close(self) -> None:
        self._session = {}
        self.send("Browser.close")
        self._process.wait(30)

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next_message()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            received = self._answers.read1()
            if not received:
                raise RuntimeError("the browser has ended")
            self._waiting += received
        message, _, self._waiting = self._waiting.partition(b"\0")
        return dict(json.loads(message))

    def evaluate(self, expression: str) -> Any:
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["text"])
        return found["result"].get("value")


def load(tab: Tab, url: str) -> dict[str, float]:
    """One visit: seconds until it is interactive, and bytes that came over the connection."""
    tab.send("Page.navigate", url=url)
    interactive_s = tab.evaluate(f"({INTERACTIVE})()") / 1e3
    for kind in ("keyDown", "keyUp"):
        tab.send("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab")
    answered_s = tab.evaluate("performance.now()") / 1e3
    first_figure_s = tab.evaluate(f"({FIRST_FIGURE})()") / 1e3
    sent = tab.evaluate(f"({SENT})()")
    plotly = sum(size for name, size in sent if "/static/plotly-" in name)
    return {
        "interactive_s": max(interactive_s, answered_s),
        "first_figure_s": first_figure_s,
        "sent_bytes": sum(size for _, size in sent) - plotly,
        "plotly_bytes": plotly,
    }


def measure(tab: Tab, url: str, loads: int) -> dict[str, object]:
    """Medians of visits with an empty cache and with what was kept."""
    rows: dict[str, list[dict[str, float]]] = {"first": [], "again": []}
    for _ in range(loads):
        tab.open()
        rows["first"].append(load(tab, url))
        rows["again"].append(load(tab, url))
    return {
        visit: {
            "interactive_s": _spread([row["interactive_s"] for row in found]),
            "first_figure_s": _spread([row["first_figure_s"] for row in found]),
            "sent_bytes": int(statistics.median(row["sent_bytes"] for row in found)),
            "plotly_bytes": int(statistics.median(row["plotly_bytes"] for row in found)),
        }
        for visit, found in rows.items()
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def figure_bytes(tab: Tab, url: str) -> dict[str, int]:
    """Return the bytes of the data of a page's figures: as they are in it, and compressed."""
    tab.send("Page.navigate", url=url)
    tab.evaluate(f"({INTERACTIVE})()")
    texts = tab.evaluate("[...document.querySelectorAll('.plot-data')].map(element => element.textContent)")
    return {"plain": sum(len(t.encode()) for t in texts), "gzip": len(gzip.compress("".join(texts).encode(), 5))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="dashboards.json", help="file in benchmarks/results, or a path")
    parser.add_argument("--trace", type=Path, default=TRACE, help="a trace, to be repeated to a million events")
    parser.add_argument("--loads", type=int, default=LOADS, help="of each page, with an empty cache and again")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        parser.error("there is no `chromium` here: `apt-get install chromium` brings it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings(_env_file=None, database_url=f"sqlite:///{folder}/s.db", data_directory=folder / "data")
        trace = folder / "million.json.gz"
        num_events = repeat(arguments.trace, trace, NUM_EVENTS)
        paths = fill(settings, trace)
        with serving(settings, folder) as url:
            tab = Tab(chromium, folder / "chromium")
            tab.open()
            for path in paths.values():
                load(tab, url + path)  # the server's first answers import what they need
            pages = {name: measure(tab, url + path, arguments.loads) for name, path in paths.items()}
            for name, path in paths.items():
                pages[name]["figures_bytes"] = figure_bytes(tab, url + path)
            tab.close()
    result = {
        **stamp("python benchmarks/dashboards.py", ("dashboards", "service", "benchmarks")),
        "chromium": subprocess.run([chromium, "--version"], capture_output=True, text=True).stdout.strip(),
        "cores": os.cpu_count(),
        "trace": {"file": arguments.trace.name, "num_events": num_events},
        "within_s": WITHIN_S,
        "at_most_bytes": AT_MOST_BYTES,
        "loads": arguments.loads,
        "pages": pages,
    }
    target = Path(arguments.out) if "/" in arguments.out else RESULTS / arguments.out
    target.write_text(json.dumps(result, indent=2) + "\n")
    for name, found in pages.items():
        first, again = found["first"], found["again"]
        print(
            f"{name}: interactive in {first['interactive_s']['median']:.2f} s, "
            f"again {again['interactive_s']['median']:.2f} s; "
            f"first figure {first['first_figure_s']['median']:.2f} s later, "
            f"again {again['first_figure_s']['median']:.2f} s; "
            f"{first['sent_bytes'] / 1e3:,.0f} kB and plotly.js {first['plotly_bytes'] / 1e3:,.0f} kB; "
            f"figures {found['figures_bytes']['plain'] / 1e3:,.0f} kB"
        )


if __name__ == "__main__":
    main()

"""How soon pages are of use in a browser, and how much they send.

    python benchmarks/dashboards.py --out dashboards.json                 # needs chromium and the dev dependencies

A server in a process of its own shows a study of 200 trials, a trial with the profile of a trace of a million events,
and a list and an overview of 10,000 studies. Chromium, on the same machine, loads each page several times with an empty
cache and several times with what it kept. Interactive is when the page has its content, the figures in the window
are drawn, and the main thread has answered a key press; sent is what came over the connection, plotly.js apart. Then
the page is scrolled to its first figure, which with an empty cache brings plotly.js: how long until it is drawn? What
drives the browser here watches its scripts, which doubles the time that plotly.js takes to start.
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

HERE = Path(__file__).parent
# Python looks for modules beside a script first, and there this one would hide the package `dashboards`.
sys.path = [path for path in sys.path if Path(path).absolute() != HERE.absolute()]
sys.path += [str(HERE.parent), str(HERE.parent / "tests"), str(HERE)]

import msgspec  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from page_builders import large_story, put, stories  # noqa: E402
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402
from repeated_trace import repeat  # noqa: E402
from sqlalchemy import insert, select  # noqa: E402
from stamp import RESULTS, stamp  # noqa: E402
from traces import FOLDER  # noqa: E402

from service.artifacts import open_artifacts  # noqa: E402
from service.connections import create_engine_for, writing  # noqa: E402
from service.database import migrate  # noqa: E402
from service.models import RecommendationRow, StrategyOutcomeRow, StudyRow  # noqa: E402
from service.settings import Settings  # noqa: E402
from service.store import SqlStudyStore  # noqa: E402
from tuner.records import new_id  # noqa: E402

NUM_STUDIES, NUM_TRIALS, NUM_EVENTS = 10_000, 200, 1_000_000
LOADS = 7
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
  const look = () => ready()
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
    from tuner.profiling.analysis import analyse_traces

    analysis = analyse_traces([trace])
    study, trials, decisions, recommendation = stories()["complete"]
    breakdowns = tuple(b for rank in analysis.ranks for b in rank.breakdowns)
    result = replace(trials[0].result, breakdowns=breakdowns, findings=analysis.findings)
    _, ids = put(store, (study, [replace(trials[0], result=result), *trials[1:]], decisions, recommendation))
    kept = open_artifacts(settings).put([gzip.compress(msgspec.json.encode(analysis))])
    store.add_artifact(store.trial(ids[0]).study_id, ids[0], "analysis", kept.digest, kept.size_bytes)
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
    variables = {
        **os.environ,
        "STEPTUNE_DATABASE_URL": settings.database_url,
        "STEPTUNE_DATA_DIRECTORY": str(settings.data_directory),
        "STEPTUNE_INSECURE_NO_AUTH": "true",
        "STEPTUNE_REQUESTS_PER_MINUTE": "1000000",
        "PYTHONPATH": str(HERE.parent),
    }
    command = [sys.executable, "-m", "service.cli.main", "serve", "--port", "0", "--no-worker"]
    log = folder / "serve.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=sink, stderr=sink)
    try:
        while b"Steptune serves " not in log.read_bytes():
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.05)
        url = log.read_text().partition("Steptune serves ")[2].partition("/api/v1")[0]
        yield url
    finally:
        process.terminate()
        process.wait(30)


def load(page: Page, url: str) -> dict[str, float]:
    """One visit: seconds until it is interactive, and bytes that came over the connection."""
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    received: dict[str, int] = {}
    names: dict[str, str] = {}
    session.on("Network.responseReceived", lambda e: names.__setitem__(e["requestId"], e["response"]["url"]))
    session.on("Network.loadingFinished", lambda e: received.__setitem__(e["requestId"], int(e["encodedDataLength"])))
    page.goto(url, wait_until="commit")
    interactive_s = page.evaluate(INTERACTIVE) / 1e3
    page.keyboard.press("Tab")
    page.evaluate("document.activeElement.tagName")
    answered_s = page.evaluate("performance.now()") / 1e3
    first_figure_s = page.evaluate(FIRST_FIGURE) / 1e3
    page.wait_for_load_state("load")
    sent = {names.get(i, ""): size for i, size in received.items()}
    plotly = sum(size for name, size in sent.items() if "/static/plotly-" in name)
    return {
        "interactive_s": max(interactive_s, answered_s),
        "first_figure_s": first_figure_s,
        "sent_bytes": sum(sent.values()) - plotly,
        "plotly_bytes": plotly,
    }


def measure(browser: Browser, url: str, loads: int) -> dict[str, object]:
    """Medians of visits with an empty cache and with what was kept."""
    rows: dict[str, list[dict[str, float]]] = {"first": [], "again": []}
    for _ in range(loads):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        rows["first"].append(load(page, url))
        rows["again"].append(load(page, url))
        context.close()
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


def figure_bytes(page: Page, url: str) -> dict[str, int]:
    """Of the data of a page's figures: as they are in it, and compressed."""
    page.goto(url)
    texts = page.locator(".plot-data").all_text_contents()
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
        with serving(settings, folder) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM)
            load(browser.new_page(), url + "/")  # the server's first answer imports what it needs
            pages = {name: measure(browser, url + path, arguments.loads) for name, path in paths.items()}
            page = browser.new_page()
            for name, path in paths.items():
                pages[name]["figures_bytes"] = figure_bytes(page, url + path)
            browser.close()
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

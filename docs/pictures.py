"""Takes the pictures of pages for README and docs, in Chromium.

    python docs/pictures.py sqlite:///steptune.db STUDY       # needs chromium and the dev dependencies

The study should be one that went well: it is what newcomers see first.
"""

from __future__ import annotations

import argparse
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from playwright.sync_api import Page, sync_playwright

from steptune.service.app import create_app
from steptune.service.settings import Settings
from steptune.service.store import SqlStudyStore

IMAGES = Path(__file__).parent / "images"
WIDTH, HEIGHT = 1180, 860
CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@contextmanager
def serving(database: str, data_directory: Path) -> Iterator[tuple[str, SqlStudyStore]]:
    """The service in a thread, open to this machine."""
    app = create_app(
        Settings(_env_file=None, database_url=database, data_directory=data_directory, insecure_no_auth=True)
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    began = threading.Event()
    startup = server.startup

    async def startup_told(sockets: list[object] | None = None) -> None:
        await startup(sockets)
        began.set()

    server.startup = startup_told
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    began.wait(60)
    yield (
        f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}",
        SqlStudyStore(app.state.services.engine),
    )
    app.state.services.events.close()
    server.should_exit = True
    thread.join(20)


def take(page: Page, name: str, *, top: str = "body", height: int = HEIGHT) -> None:
    """A picture of the window, from an element on, once its figures are drawn."""
    page.locator(top).first.evaluate("element => scrollTo(0, element.getBoundingClientRect().top + scrollY - 16)")
    page.wait_for_function(
        """() => [...document.querySelectorAll(".figure")].every(figure => {
            const box = figure.getBoundingClientRect();
            return box.top > innerHeight || box.bottom < 0 || figure.querySelector("svg.main-svg");
        })"""
    )
    page.screenshot(path=IMAGES / name, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database")
    parser.add_argument("study")
    parser.add_argument("--data", type=Path, default=Path(".steptune"), help="data directory of the service")
    arguments = parser.parse_args()
    with serving(arguments.database, arguments.data) as (url, store), sync_playwright() as playwright:
        study_id = store.get_study(arguments.study).study_id
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(url)
        take(page, "studies.png", height=420)
        page.goto(f"{url}/studies/{study_id}")
        take(page, "study.png")
        take(page, "search.png", top="nav.tabs")
        profiled = [trial for trial in store.trials(study_id) if trial.result and trial.result.breakdowns]
        page.goto(f"{url}/trials/{profiled[0].trial_id}")
        take(page, "trial.png", top="section:has(.timeline)")
        page.goto(f"{url}/compare?a={study_id}")
        take(page, "compare.png", top="main")
        browser.close()


if __name__ == "__main__":
    main()

"""The parts of seeded pages stand where a committed file has them, at three widths: boxes, because fonts differ between
machines (decision 0056). After a change of the design: `python tests/e2e/test_page_layout.py` writes the file anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
from page_builders import Shown, shown
from test_pages_in_browser import OPTIONS, WIDTHS, Visit, browser

__all__ = ["browser"]  # a fixture
pytestmark = pytest.mark.xdist_group("browser")

LAYOUTS = Path(__file__).parent / "page_layouts.json"
SIDEWAYS = 0.04
"""Share of the window's width by which other fonts move or widen a part."""
DOWNWARDS_PX, DOWNWARDS = 48, 0.12
"""Two lines that wrap otherwise, and a share of the part's own place or height."""
PARTS = {
    "study": ("h1", "#controls", ".hero", "#answer > .facts", "#changes", "#use", "nav.tabs", "#search h2"),
    "list": ("h1", ".filters", ".chosen", "table.studies"),
}


def boxes(service: Shown, browser: object) -> dict[str, dict[str, list[int]]]:
    """`[x, y, width, height]` of every part, by page and width of the window."""
    paths = {"study": f"/studies/{service.studies['complete']}", "list": "/"}
    found = {}
    for name, parts in PARTS.items():
        for width, window in WIDTHS.items():
            visit = Visit(browser)
            visit.page.set_viewport_size(window)
            page = visit.go(service.url + paths[name])
            places = {part: page.locator(part).first.bounding_box() for part in parts}
            found[f"{name}, {width}"] = {
                part: [round(box[side]) for side in ("x", "y", "width", "height")] for part, box in places.items()
            }
            visit.context.close()
    return found


@pytest.fixture(scope="module")
def measured(browser, tmp_path_factory) -> dict[str, dict[str, list[int]]]:
    with shown(tmp_path_factory.mktemp("layout")) as service:
        service.add("complete")
        return boxes(service, browser)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PARTS)
def test_parts_stand_where_they_stood(name, width, measured):
    wanted = json.loads(LAYOUTS.read_text())[f"{name}, {width}"]
    found = measured[f"{name}, {width}"]
    assert list(found) == list(wanted)
    sideways = SIDEWAYS * WIDTHS[width]["width"]
    for part, box in found.items():
        for place, (value, expected) in enumerate(zip(box, wanted[part], strict=True)):
            room = sideways if place in (0, 2) else DOWNWARDS_PX + DOWNWARDS * expected
            assert abs(value - expected) <= room, (part, ["x", "y", "width", "height"][place], value, expected)


def write() -> None:
    import shutil

    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, shown(Path(folder)) as service, sync_playwright() as playwright:
        service.add("complete")
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=OPTIONS)
        LAYOUTS.write_text(json.dumps(boxes(service, chromium), indent=1) + "\n")
        chromium.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    write()

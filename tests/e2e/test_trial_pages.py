"""The page of a trial in a real browser: looking closely at the timeline, the log, Perfetto, and a trial that ends."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from analysed import write_loop
from msgspec.structs import replace
from page_builders import Shown, shown, stories
from readable import contrast
from report_builders import BASELINE, make_result
from test_pages_in_browser import WIDTHS, Visit, axe, browser, expect, violations, visit

from steptune.dashboards.site import STANDALONE
from steptune.dashboards.templating import render
from steptune.dashboards.theme import category_colour
from steptune.dashboards.trial_page import trial_context
from steptune.service.trial_source import KeptTrials
from steptune.tuner.profiling.analysis import analyse_traces, without_timelines
from steptune.tuner.profiling.tiles import shown_lanes
from steptune.tuner.records import TrialState
from steptune.tuner.trials.analysis_files import analysis_text, lanes_text

__all__ = ["axe", "browser", "visit"]  # fixtures
pytestmark = pytest.mark.xdist_group("browser")

EXPLORER_WIDTHS = {**WIDTHS, "tablet": {"width": 820, "height": 1180}}
PERFETTO = "https://ui.perfetto.dev"
LOG = b"epoch 1\nloss 2.5\nepoch 2\n"
LISTENS = """<!DOCTYPE html><title>waiting</title><script>
addEventListener("message", event => {
  if (event.data === "PING") event.source.postMessage("PONG", event.origin);
  const given = event.data.perfetto;
  if (given) document.title = `${given.buffer.byteLength} bytes of ${given.title}`;
});</script>"""


class Profiled:
    """A service with a study whose first trial has all files that a trial can have."""

    def __init__(self, service: Shown, folder: Path) -> None:
        self.service = service
        files = [write_loop(folder / f"rank{rank}.json", rank=rank) for rank in range(2)]
        self.analysis = analyse_traces(files, top=60)
        study, (first, *others), decisions, answer = stories()["complete"]
        first = replace(first, result=replace(first.result, breakdowns=self.analysis.ranks[0].breakdowns))
        study_id = service.add("complete", (study, [first, *others], decisions, answer))
        self.trial_id = service.trials["complete"][0]
        self.trace = gzip.compress(files[0].read_bytes())
        content = {
            "analysis": gzip.compress(analysis_text(without_timelines(self.analysis))),
            "lanes": gzip.compress(lanes_text(shown_lanes(self.analysis)[0])),
            "trace": self.trace,
            "log": gzip.compress(LOG),
        }
        for kind, packed in content.items():
            kept = service.app.state.services.artifacts.put([packed])
            service.store.add_artifact(study_id, self.trial_id, kind, kept.digest, kept.size_bytes)
        self.url = f"{service.url}/trials/{self.trial_id}"


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> Iterator[Profiled]:
    folder = tmp_path_factory.mktemp("profiled")
    with shown(folder) as service:
        yield Profiled(service, folder)


def drawn(page):
    """The page once the timeline is drawn, and a function that says what part of it is shown, in nanoseconds."""
    frame = page.locator(".timeline")
    frame.scroll_into_view_if_needed()
    page.wait_for_selector(".timeline[data-drawn=yes]")
    page.locator(".timeline button[data-do=all]").click()
    return page, lambda: [float(frame.get_attribute(name)) for name in ("data-low", "data-high")]


def colours(page, row: int) -> dict[str, float]:
    """The share of a row's pixels by colour, "" for those without; inside of its edges."""
    return page.evaluate(
        """async row => {
          await new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)));
          const canvas = document.querySelector(".timeline canvas"), pen = canvas.getContext("2d");
          const ratio = canvas.width / canvas.clientWidth, left = canvas.clientWidth < 480 ? 62 : 104;
          const top = [4, 52, 86, 120][row], height = row ? 26 : 40;
          const inner = [left + 2, top + 1, canvas.clientWidth - left - 6, height - 2];
          const box = inner.map(value => Math.round(value * ratio));
          const pixels = pen.getImageData(...box).data, found = {};
          for (let at = 0; at < pixels.length; at += 4) {
            const hex = [...pixels.slice(at, at + 3)].map(value => value.toString(16).padStart(2, "0")).join("");
            const name = pixels[at + 3] < 128 ? "" : `#${hex}`;
            found[name] = (found[name] || 0) + 4 / pixels.length;
          }
          return found;
        }""",
        row,
    )


class TestTimeline:
    def test_every_figure_is_drawn_without_complaint(self, profiled, visit):
        page, _ = drawn(visit.go(profiled.url))
        assert visit.draw_all() >= 7
        assert page.locator(".timeline .legend").inner_text().startswith("matmuls")
        assert visit.complaints == []

    def test_keys_lead_to_the_longest_gaps_and_back(self, profiled, visit):
        page, span = drawn(visit.go(profiled.url))
        whole = span()
        said = page.locator(".timeline .where")
        page.locator(".timeline").focus()
        page.keyboard.press("n")
        expect(said).to_contain_text("Gap 1 of")
        low, high = span()
        gap = page.locator("button.gap").first
        assert low < float(gap.get_attribute("data-from")) < float(gap.get_attribute("data-to")) < high
        page.keyboard.press("n")
        expect(said).to_contain_text("Gap 2 of")
        page.keyboard.press("p")
        expect(said).to_contain_text("Gap 1 of")
        page.keyboard.press("+")
        assert span()[1] - span()[0] == pytest.approx((high - low) / 2)
        page.keyboard.press("0")
        assert span() == pytest.approx(whole)
        expect(said).to_have_text("")

    def test_a_gap_in_the_list_is_shown_when_it_is_clicked(self, profiled, visit):
        page = visit.go(profiled.url)
        gap = page.locator("button.gap").nth(1)
        gap.click()
        expect(page.locator(".timeline .where")).to_contain_text("Gap 2 of")
        low, high = (float(page.locator(".timeline").get_attribute(f"data-{name}")) for name in ("low", "high"))
        assert low < float(gap.get_attribute("data-from")) < float(gap.get_attribute("data-to")) < high

    def test_steps_are_gone_through(self, profiled, visit):
        page, span = drawn(visit.go(profiled.url))
        for number, edges in ((1, (0, 1e6)), (2, (1e6, 2e6))):
            page.get_by_role("button", name="Next step").click()
            expect(page.locator(".timeline .where")).to_contain_text(f"Step {number} of 3")
            assert span() == pytest.approx(edges, abs=50_000)

    def test_a_colour_covers_its_share_of_the_time(self, profiled, visit):
        """At any closeness: of the whole, and of a step."""
        page, _ = drawn(visit.go(profiled.url))
        lane = shown_lanes(profiled.analysis)[0][0]
        times = Counter()
        for length, code in zip(lane.length_ns, lane.category, strict=True):
            times[lane.categories[code]] += length / sum(lane.length_ns)
        for _ in range(2):
            found = colours(page, 0)
            for category, share in times.items():
                assert found.get(category_colour(category), 0.0) == pytest.approx(share, abs=0.06), category
            page.get_by_role("button", name="Next step").click()

    def test_closeness_is_fetched_by_tiles(self, profiled, visit):
        page, _ = drawn(visit.go(profiled.url))
        assert [url for url in visit.requests if "/lanes?level=0&tile=0" in url]
        for _ in range(3):
            page.get_by_role("button", name="Zoom in").click()
        asked = [url for url in visit.requests if "/lanes?" in url and "level=0" not in url]
        assert asked == [], "the whole is exact already"

    def test_names_lead_from_the_tables_to_the_timeline_and_back(self, profiled, visit):
        page, span = drawn(visit.go(profiled.url))
        whole = span()
        button = page.locator("button.events").first
        button.click()
        said = page.locator(".timeline .where")
        expect(said).to_contain_text("1 of the")
        assert span()[1] - span()[0] < (whole[1] - whole[0]) / 2
        box = page.locator(".timeline canvas").bounding_box()
        page.mouse.click(box["x"] + 104 + (box["width"] - 106) / 2, box["y"] + 20)
        page.get_by_role("button", name="show in the tables").click()
        expect(page.locator("tr:has(button.events:focus)")).to_contain_text(button.get_attribute("data-name"))
        page.locator(".timeline").focus()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="End highlight")).to_be_hidden()

    def test_the_wheel_zooms_with_control_only_and_a_drag_zooms(self, profiled, visit):
        page, span = drawn(visit.go(profiled.url))
        whole = span()
        box = page.locator(".timeline canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
        page.mouse.wheel(0, -100)
        page.wait_for_timeout(100)
        assert span() == whole
        page.locator(".timeline").scroll_into_view_if_needed()
        box = page.locator(".timeline canvas").bounding_box()
        page.keyboard.down("Control")
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
        page.mouse.wheel(0, -100)
        page.keyboard.up("Control")
        page.wait_for_function(
            "w => { const {low, high} = document.querySelector('.timeline').dataset; return high - low < w; }",
            arg=whole[1] - whole[0],
        )
        before = span()
        box = page.locator(".timeline canvas").bounding_box()
        page.mouse.move(box["x"] + 300, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 400, box["y"] + 20, steps=3)
        page.mouse.up()
        share = 100 / (box["width"] - 106)
        assert span()[1] - span()[0] == pytest.approx((before[1] - before[0]) * share, rel=0.05)

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", EXPLORER_WIDTHS)
    def test_the_label_under_the_pointer_can_be_read(self, profiled, visit, scheme, width):
        visit.page.set_viewport_size(EXPLORER_WIDTHS[width])
        visit.page.emulate_media(color_scheme=scheme)
        page, _ = drawn(visit.go(profiled.url))
        box = page.locator(".timeline canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 20)
        tip = page.locator(".timeline .tip")
        expect(tip).to_be_visible()
        assert len(tip.inner_text().splitlines()) >= 2
        text, behind, alpha = tip.evaluate(
            "tip => { const {color, backgroundColor, opacity} = getComputedStyle(tip);"
            " return [color, backgroundColor, opacity]; }"
        )
        assert contrast(text, behind) >= 7
        assert alpha == "1"
        inside = tip.bounding_box()
        assert inside["x"] >= 0
        assert inside["x"] + inside["width"] <= EXPLORER_WIDTHS[width]["width"]

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", EXPLORER_WIDTHS)
    def test_there_is_no_serious_accessibility_violation(self, profiled, visit, axe, scheme, width):
        visit.page.set_viewport_size(EXPLORER_WIDTHS[width])
        visit.page.emulate_media(color_scheme=scheme)
        page, _ = drawn(visit.go(profiled.url))
        page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
        visit.draw_all()
        assert violations(page, axe) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= EXPLORER_WIDTHS[width]["width"]


def table_of(page, cells: list[str]):
    """The page with nothing but a table of these cells, as after a refresh."""
    page.evaluate(
        """cells => {
          const rows = cells.map(cell => `<tr><td class="number">${cell}</td></tr>`).join("");
          document.getElementById("main").innerHTML = `<section id="made"><h2>Made</h2><table>
            <thead><tr><th class="number">Value</th></tr></thead><tbody>${rows}</tbody></table></section>`;
          document.getElementById("made").dispatchEvent(new CustomEvent("section-replaced", {bubbles: true}));
        }""",
        cells,
    )
    return page


class TestTables:
    def test_a_heading_sorts_its_table_by_what_the_cells_show(self, profiled, visit):
        page = visit.go(profiled.url)
        table = page.locator('[aria-label="Kernels"] table')
        table.get_by_role("button", name="mean").click()
        cells = table.locator("tbody td:nth-child(4)").all_inner_texts()
        units = {"ns": 1, "µs": 1e3, "ms": 1e6}
        values = [float(cell.split()[0]) * units[cell.split()[1]] for cell in cells]
        assert values == sorted(values, reverse=True)
        expect(table.locator("th[aria-sort=descending]")).to_have_text("mean")
        table.get_by_role("button", name="mean").click()
        assert table.locator("tbody td:nth-child(4)").all_inner_texts() == cells[::-1]

    def test_a_search_leaves_the_rows_with_all_of_its_words(self, profiled, visit):
        page = table_of(
            visit.go(profiled.url), [f"{kind} {number}" for kind in ("gemm", "copy") for number in range(6)]
        )
        rows = page.locator("#made tbody tr:visible")
        search = page.get_by_role("searchbox", name="Search: Made")
        says = page.locator(".search", has=search).get_by_role("status")
        search.fill("GEMM")
        expect(rows).to_have_text([f"gemm {number}" for number in range(6)])
        expect(says).to_have_text("6 of 12")
        search.fill("3 gemm")
        expect(rows).to_have_text(["gemm 3"])
        expect(says).to_have_text("1 of 12")
        search.fill("")
        expect(rows).to_have_count(12)
        expect(says).to_have_text("")

    def test_a_heading_holds_one_button_and_a_table_one_field(self, profiled, visit):
        page = visit.go(profiled.url)
        assert page.locator("th button.sort").count() > 20
        assert page.locator("th:has(button ~ button), th button:has(button)").count() == 0
        assert page.locator("input[type=search] + .scroll, .search + .search, .search input + input").count() == 0

    @pytest.mark.parametrize(
        ("cells", "descending"),
        [
            (["900 µs", "1.5 ms", "", "12 ns", "2 s"], ["2 s", "1.5 ms", "900 µs", "12 ns", ""]),
            (["7 min 42 s", "1 h 2 min", "45 s", "8 min"], ["1 h 2 min", "8 min", "7 min 42 s", "45 s"]),
            (["12k", "900", "1.2M", "3 G"], ["3 G", "1.2M", "12k", "900"]),
            (["612 MiB", "1.43 GiB", "4 KiB"], ["1.43 GiB", "612 MiB", "4 KiB"]),
            (["93.4 GB/s", "458 MB/s", "7.66 TFLOP/s"], ["7.66 TFLOP/s", "93.4 GB/s", "458 MB/s"]),
            (["1.2e-05", "0.001", "−14.50", "3e+04"], ["3e+04", "0.001", "1.2e-05", "−14.50"]),
        ],
    )
    def test_cells_sort_by_the_number_they_show_and_empty_ones_last(self, profiled, visit, cells, descending):
        page = table_of(visit.go(profiled.url), cells)
        for order in (
            descending,
            [cell for cell in descending[::-1] if cell] + [cell for cell in descending if not cell],
        ):
            page.get_by_role("button", name="Value").click()
            assert [text.strip() for text in page.locator("#made td").all_text_contents()] == order


class TestFiles:
    def test_the_log_comes_when_it_is_opened(self, profiled, visit):
        page = visit.go(profiled.url)
        assert not [url for url in visit.requests if "/logs" in url]
        page.locator("details.log summary").click()
        expect(page.locator("details.log pre")).to_contain_text("loss 2.5")

    def test_the_trace_can_be_saved(self, profiled, visit):
        page = visit.go(profiled.url)
        with page.expect_download() as saved:
            page.get_by_role("link", name="Download the trace").click()
        assert Path(saved.value.path()).read_bytes() == profiled.trace

    def test_perfetto_is_opened_by_a_click_only_and_gets_the_trace(self, profiled, visit):
        visit.context.route(f"{PERFETTO}/**", lambda route: route.fulfill(body=LISTENS, content_type="text/html"))
        page = visit.go(profiled.url)
        visit.draw_all()
        assert visit.hosts() == {profiled.url.split("/")[2]}
        with visit.context.expect_page() as opened:
            page.get_by_role("button", name="Open in Perfetto").click()
        expect(page.locator("[data-perfetto-says]")).to_have_text("The trace is open in Perfetto.")
        expect(opened.value).to_have_title(re.compile(rf"{len(profiled.trace)} bytes of Steptune trial 1"))
        assert visit.complaints == []

    def test_without_a_network_it_says_to_download_the_trace(self, profiled, visit):
        visit.context.route(f"{PERFETTO}/**", lambda route: route.abort())
        visit.page.clock.install()
        page = visit.go(profiled.url)
        with visit.context.expect_page():
            page.get_by_role("button", name="Open in Perfetto").click()
        says = page.locator("[data-perfetto-says]")
        expect(says).to_have_text("Waiting for Perfetto…")
        page.clock.run_for(20_000)
        expect(says).to_contain_text("Download the trace and open it there")


def test_a_running_trial_becomes_what_it_showed_without_reload(tmp_path, visit):
    with shown(tmp_path) as service:
        study_id = service.add("running")
        running = next(t for t in service.store.trials(study_id) if t.state is TrialState.RUNNING)
        page = visit.go(f"{service.url}/trials/{running.trial_id}")
        page.wait_for_selector("html[data-live=yes]")
        page.evaluate("window.same = true")
        expect(page.locator(".claim")).to_have_text("Running")
        service.store.complete_trials(
            [replace(make_result(running.trial_id, BASELINE, 2e7), candidate=running.candidate)]
        )
        service.store.add_event(study_id, "trials_ended", {"group": "x", "outcomes": {}})
        expect(page.locator(".claim")).to_contain_text("samples/s")
        expect(page.locator('[data-figure="windows"] svg.main-svg').first).to_be_attached()
        assert page.evaluate("window.same") is True
        assert visit.complaints == []


def test_inside_a_file_it_works_without_a_network(profiled, browser, tmp_path):
    source = KeptTrials(profiled.service.store, profiled.service.app.state.services.artifacts)
    path = tmp_path / "trial.html"
    path.write_text(render("trial.html", STANDALONE, **trial_context(source, profiled.trial_id)), encoding="utf-8")
    away = Visit(browser, offline=True)
    page = away.page
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    drawn(page)
    page.locator("button.gap").first.click()
    expect(page.locator(".timeline .where")).to_contain_text("Gap 1 of")
    assert len(colours(page, 0)) > 3
    assert away.complaints == []
    assert {url for url in away.requests if not url.startswith("data:")} == {path.as_uri()}
    away.context.close()

"""The page of a trial in a real browser: looking closely at the timeline, the log, Perfetto, and a trial that ends."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from analysed import write_loop
from msgspec.structs import replace
from page_builders import Shown, shown, stories
from report_builders import BASELINE, make_result
from test_pages_in_browser import WIDTHS, Visit, axe, browser, expect, violations, visit

from steptune.dashboards.lanes import get_lanes_info, plot_lanes
from steptune.dashboards.site import STANDALONE
from steptune.dashboards.templating import render
from steptune.dashboards.theme import kind_title
from steptune.dashboards.trial_page import trial_context
from steptune.dashboards.units import short_time
from steptune.service.trial_source import KeptTrials
from steptune.tuner.profiling.analysis import analyse_traces, without_timelines
from steptune.tuner.records import TrialState

__all__ = ["axe", "browser", "visit"]  # fixtures
pytestmark = pytest.mark.xdist_group("browser")

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
            "analysis": gzip.compress(msgspec.json.encode(without_timelines(self.analysis))),
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
    """The page once the timeline is drawn, and a function that says what part of it is shown."""
    figure = page.locator('[data-figure="lanes"]')
    figure.scroll_into_view_if_needed()
    expect(figure.locator(".plot svg.main-svg").first).to_be_visible()
    return page, lambda: page.evaluate(
        "document.querySelector('[data-figure=lanes] .plot').layout.xaxis.range.map(Number)"
    )


class TestTimeline:
    def test_every_figure_is_drawn_without_complaint(self, profiled, visit):
        visit.go(profiled.url)
        assert visit.draw_all() >= 8
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
        page, span = drawn(page)
        expect(page.locator(".timeline .where")).to_contain_text("Gap 2 of")
        low, high = span()
        assert low < float(gap.get_attribute("data-from")) < float(gap.get_attribute("data-to")) < high

    def test_steps_are_gone_through_and_wide_cells_have_names(self, profiled, visit):
        page, span = drawn(visit.go(profiled.url))
        for number, edges in ((1, (0, 1)), (2, (1, 2))):
            page.get_by_role("button", name="Next step").click()
            expect(page.locator(".timeline .where")).to_contain_text(f"Step {number} of 3")
            assert span() == pytest.approx(edges, abs=0.05)
        expect(page.locator('[data-figure="lanes"] .annotation-text').first).to_be_visible()
        names = page.locator('[data-figure="lanes"] .annotation-text').all_text_contents()
        assert any(name.startswith("ampere") for name in names)

    def test_cells_tile_their_row_and_say_what_they_are(self, profiled, visit):
        """Lengths of each unit, one that rounds up to the next unit, joined spans, and a name with a tag in it."""
        lengths = (640, 999, 1000, 12_345, 999_499, 999_600, 4_560_000, 98_760_000, 1_230_000_000, 2_000 * 10**9)
        lane = replace(
            profiled.analysis.ranks[0].lanes[0],
            names=("", "<i>mine</i>"),
            categories=("compute_matmul", "data_wait"),
            start_ns=tuple(
                end - length + 7 for end, length in zip(itertools.accumulate(lengths), lengths, strict=True)
            ),
            length_ns=lengths,
            name=(0, 1) * 5,
            category=(0, 1) * 5,
            count=(1, 1, 3, 1, 1, 20, 1, 1, 1, 1),
            busy_ns=tuple(length // 2 for length in lengths),
        )
        lanes = (lane, replace(lane, start_ns=tuple(start + 10 * n for n, start in enumerate(lane.start_ns))))
        rank = replace(profiled.analysis.ranks[0], lanes=lanes)
        info = get_lanes_info(replace(profiled.analysis, ranks=(rank,)))
        rows = visit.go(profiled.url).evaluate(
            "figure => { steptune.prepare.lanes(figure); return figure.data.filter(row => row.type === 'heatmap')"
            ".map(row => [[...row.x], [...row.z[0]].map(code => Number.isNaN(code) ? null : code), row.text[0]]); }",
            json.loads(plot_lanes(info).to_json()),
        )
        said = [self._said(lane, span) for span in range(10)]
        ends = [(start + length) / 1e6 for start, length in zip(lane.start_ns, lengths, strict=True)]
        assert rows[0] == [pytest.approx([lane.start_ns[0] / 1e6, *ends]), [0, 1] * 5, said]
        edges, codes, texts = rows[1]
        assert len(edges) == 20
        assert edges[::2] == pytest.approx([start / 1e6 for start in lanes[1].start_ns])
        assert edges[1::2] == pytest.approx([end + number / 1e5 for number, end in enumerate(ends)])
        assert (codes[::2], texts[::2]) == ([0, 1] * 5, said)
        assert (codes[1::2], texts[1::2]) == ([None] * 9, [""] * 9)

    @staticmethod
    def _said(lane, span):
        kind = kind_title(lane.categories[lane.category[span]])
        name = "&lt;i&gt;mine&lt;/i&gt;" if lane.name[span] else ""
        title = f"<b>{name}</b><br>{kind}" if name else f"<b>{kind}</b>"
        length, count = short_time(lane.length_ns[span]), lane.count[span]
        if count == 1:
            return f"{title}<br>{length}"
        return f"{title}, mostly<br>{length}: {count} events in {short_time(lane.busy_ns[span])}"

    def test_the_wheel_zooms_with_control_only(self, profiled, visit):
        page, span = drawn(visit.go(profiled.url))
        whole = span()
        box = page.locator('[data-figure="lanes"] .nsewdrag').first.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.wheel(0, -100)
        assert span() == whole
        page.keyboard.down("Control")
        box = page.locator('[data-figure="lanes"] .nsewdrag').first.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.wheel(0, -100)
        page.keyboard.up("Control")
        page.wait_for_function(
            "w => { const r = document.querySelector('[data-figure=lanes] .plot').layout.xaxis.range; "
            "return r[1] - r[0] < w; }",
            arg=whole[1] - whole[0],
        )

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", WIDTHS)
    def test_there_is_no_serious_accessibility_violation(self, profiled, visit, axe, scheme, width):
        visit.page.set_viewport_size(WIDTHS[width])
        visit.page.emulate_media(color_scheme=scheme)
        page = visit.go(profiled.url)
        page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
        visit.draw_all()
        assert violations(page, axe) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]["width"]


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
        expect(page.locator("[data-perfetto-says]")).to_have_text("Perfetto has it.")
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
        expect(says).to_contain_text("Download it and open it there")


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
    assert away.complaints == []
    assert {url for url in away.requests if not url.startswith("data:")} == {path.as_uri()}
    away.context.close()

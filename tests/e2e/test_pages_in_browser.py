"""The pages in a real browser: what they show in every state, live, without any other host, for everybody."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace
from page_builders import STEP_AFTER, Shown, shown, stories
from report_builders import WINNER, make_recommendation, make_result

from steptune.dashboards.report import render_report
from steptune.service.pages import PAGES
from steptune.service.settings.scopes import Scope
from steptune.tuner.records import Purpose, StudyState, Trial, TrialState, new_id

if os.environ.get("CI"):
    import playwright.sync_api as playwright_api
else:
    playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright_api.expect
expect.set_options(timeout=60_000)  # a busy machine is slow; what never comes is found all the same

pytestmark = pytest.mark.xdist_group("browser")

STATES = ("none", "one", "running", "failed", "large")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTHS = {
    "desktop": {"width": 1440, "height": 900},
    "tablet": {"width": 820, "height": 1180},
    "phone": {"width": 390, "height": 844},
}
LOOKS = [(width, scheme) for width in WIDTHS for scheme in ("light", "dark")]
LOOKS_OF = {"running": LOOKS, "large": [("desktop", "dark"), ("tablet", "light"), ("phone", "light")]}
"""Looks by state; pages of other states have parts of the pages of these."""
FEW_LOOKS = [("desktop", "dark"), ("phone", "light")]
SERIOUS = {"serious", "critical"}


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    path = shutil.which("chromium")
    if path is None:
        message = "there is no `chromium` here: `apt-get install chromium` brings it"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def axe() -> str:
    """axe-core, as its package brings it."""
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


class Visit:
    """A page in a browser, with what it complained of and what it asked for."""

    def __init__(self, browser, **options) -> None:
        self.context = browser.new_context(viewport=WIDTHS["desktop"], **options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def go(self, url: str, *, status: int = 200):
        answer = self.page.goto(url)
        assert answer.status == status, answer.text()
        if status == 200:
            self.page.wait_for_selector("html[data-ready=yes]")
        return self.page

    def draw_all(self) -> int:
        """Scrolls through the page until every figure is drawn; returns how many there are."""
        figures = self.page.locator(".figure")
        tabs = self.page.get_by_role("tab")
        for place in range(max(1, tabs.count())):
            if tabs.count():
                tabs.nth(place).click()
            for number in range(figures.count()):
                figure = figures.nth(number)
                if figure.is_visible():
                    figure.scroll_into_view_if_needed()
                    expect(figure.locator(".plot svg.main-svg").first).to_be_visible()
        return figures.count()

    def hosts(self) -> set[str]:
        return {urlsplit(url).netloc for url in self.requests if not url.startswith(("data:", "blob:"))}


@pytest.fixture
def visit(browser) -> Iterator[Visit]:
    found = Visit(browser)
    yield found
    found.context.close()


@pytest.fixture(scope="module", params=STATES)
def state(request, tmp_path_factory) -> Iterator[tuple[str, Shown]]:
    """A service with one study in this state, or with none."""
    with shown(tmp_path_factory.mktemp(f"pages-{request.param}")) as service:
        if request.param != "none":
            service.add(request.param)
        yield request.param, service


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Iterator[Shown]:
    """A service with one study of every state."""
    with shown(tmp_path_factory.mktemp("pages")) as service:
        for name in stories():
            service.add(name)
        yield service


def address(page, service: Shown, name: str) -> tuple[str, int]:
    """The address of a page that shows the study of a state, and the status that it should have."""
    study = service.studies.get(name, "0" * 26)
    trials = service.trials.get(name, ["0" * 26])
    path = page.path.format(study_id=study, trial_id=trials[0])
    if page.name == "compare_page" and name != "none":
        path += f"?a={study}"
    is_there = name != "none" or "{" not in page.path
    return service.url + path, 200 if is_there else 404


def violations(page, axe: str) -> list[str]:
    page.evaluate(axe)
    found = page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
    return [
        f"{v['id']} ({v['impact']}): {v['help']}: {[node['html'][:160] for node in v['nodes'][:3]]}"
        for v in found
        if v["impact"] in SERIOUS
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_in_every_state(page, state, visit, axe):
    """It shows without complaint, asks no other host, is no wider than a phone, and axe-core finds no serious
    violation: in light and dark, on a phone and a desktop.
    """
    name, service = state
    url, status = address(page, service, name)
    visit.go(url, status=status)
    visit.draw_all()
    expect(visit.page.locator("main h1, main .claim").first).to_be_visible()
    assert [text for text in visit.complaints if not (status == 404 and "404" in text)] == []
    assert visit.hosts() == {urlsplit(service.url).netloc}
    visit.page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    found = {}
    for width, scheme in LOOKS_OF.get(name, FEW_LOOKS):
        visit.page.set_viewport_size(WIDTHS[width])
        visit.page.emulate_media(color_scheme=scheme)
        visit.draw_all()
        for tab in visit.page.get_by_role("tab").all() or [None]:
            if tab is not None:
                tab.click()
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]["width"]
            problems = violations(visit.page, axe)
            if problems:
                found[width, scheme, tab and tab.text_content()] = problems
    assert found == {}


class TestStudy:
    def test_figures_are_drawn_and_their_data_are_in_tables(self, complete, visit):
        page = visit.go(f"{complete.url}/studies/{complete.studies['complete']}")
        assert visit.draw_all() >= 6
        expect(page.locator(".figure-number")).to_have_text("2.42×")
        for section in ("profile", "search", "parts"):
            assert page.locator(f"#{section} table").count() >= 1

    def test_gain_cause_and_use_are_seen_without_scrolling(self, complete, visit):
        """At 1440 x 900, with what it cost and what more time would bring."""
        for name in ("complete", "large"):
            page = visit.go(f"{complete.url}/studies/{complete.studies[name]}")
            seen = page.locator("#answer")
            for part in (".figure-number", ".interval", ".facts", "#changes", "#use"):
                box = seen.locator(part).bounding_box()
                assert box["y"] >= 0
                assert box["y"] + box["height"] <= WIDTHS["desktop"]["height"], part
            expect(seen.locator(".facts")).to_contain_text("input-bound: 63 % of the step waits for data")
            expect(seen.locator(".facts")).to_contain_text("7 min 42 s")
            expect(seen.locator(".interval")).to_contain_text("2.37× to 2.47×")
            expect(page.locator("nav.tabs")).to_be_in_viewport(ratio=1)

    def test_tabs_by_pointer_keys_and_address(self, complete, visit):
        study = f"{complete.url}/studies/{complete.studies['complete']}"
        page = visit.go(study)
        shown_now = page.locator(".panel:not([hidden])")
        expect(shown_now).to_have_attribute("data-panel", "search")
        page.get_by_role("tab", name="Profile").click()
        expect(shown_now).to_have_attribute("data-panel", "profile")
        expect(page.get_by_role("tabpanel", name="Profile")).to_be_visible()
        assert page.url.endswith("#profile")
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="Evidence")).to_be_focused()
        expect(shown_now).to_have_attribute("data-panel", "evidence")
        page.keyboard.press("End")
        expect(shown_now).to_have_attribute("data-panel", "configuration")
        page.locator("#use").get_by_role("link", name="all formats").click()
        expect(page.locator("#files")).to_be_in_viewport()
        page.goto("about:blank")
        page.goto(f"{study}#neighbours-details")
        expect(shown_now).to_have_attribute("data-panel", "evidence")
        expect(page.locator("#neighbours-details")).to_be_in_viewport()

    def test_without_scripts_tabs_are_sections(self, complete, browser):
        visit = Visit(browser, java_script_enabled=False)
        page = visit.page
        page.goto(f"{complete.url}/studies/{complete.studies['complete']}#evidence")
        for panel in page.locator(".panel").all():
            expect(panel).to_be_visible()
        expect(page.locator("#evidence")).to_be_in_viewport()
        expect(page.locator("button.copy").first).to_be_hidden()
        visit.context.close()

    def test_a_table_sorts_and_is_searched(self, complete, visit):
        page = visit.go(f"{complete.url}/studies/{complete.studies['large']}")
        decisions = page.get_by_label("Decisions", exact=True)
        rows = decisions.locator("tbody tr:visible")
        before = rows.count()
        speeds = "rows => rows.map(r => r.cells[3].textContent.trim()).filter(Boolean).map(t => parseFloat(t))"
        page.get_by_role("button", name="Speed").first.click()
        expect(decisions.locator("th[aria-sort=descending]")).to_have_text("Speed")
        found = rows.evaluate_all(speeds)
        assert found == sorted(found, reverse=True)
        page.get_by_role("button", name="Speed").first.click()
        found = rows.evaluate_all(speeds)
        assert found == sorted(found)
        page.get_by_role("searchbox", name="Search: What was tried").fill("micro_batch gain")
        assert 0 < rows.count() < before
        for text in rows.all_text_contents():
            assert "micro_batch" in text
            assert "gain" in text

    def test_a_search_goes_on_while_the_page_changes(self, tmp_path, visit):
        """Text and focus stay in the field."""
        with shown(tmp_path) as service:
            study_id = service.add(
                "large", (replace(stories()["large"][0], state=StudyState.RUNNING), *stories()["large"][1:])
            )
            page = visit.go(f"{service.url}/studies/{study_id}")
            page.wait_for_selector("html[data-live=yes]")
            field = page.get_by_role("searchbox", name="Search: What was tried")
            field.fill("micro_batch")
            page.evaluate("window.section = document.querySelector('input[type=search]').closest('[data-live]')")
            began = replace(
                stories()["large"][1][0],
                trial_id=new_id(),
                study_id=study_id,
                sequence=9000,
                result=None,
                group="live",
                state=TrialState.RUNNING,
            )
            service.store.begin_trials([began])
            service.store.add_event(study_id, "trials_began", {"group": "live", "trials": [began.trial_id]})
            page.wait_for_function("() => !window.section.isConnected")
            expect(field).to_have_value("micro_batch")
            expect(field).to_be_focused()

    def test_a_figure_and_a_way_of_use_are_copied(self, complete, browser):
        visit = Visit(browser, permissions=["clipboard-read", "clipboard-write"])
        page = visit.go(f"{complete.url}/studies/{complete.studies['complete']}#evidence")
        page.get_by_role("button", name="Copy: In your script").click()
        clipboard = "navigator.clipboard.readText()"
        expect(page.locator("#use button.copy").first).to_have_text("Copied")
        assert page.evaluate(clipboard).startswith('job = steptune.apply("steptune.json", workload)')
        button = page.locator("[data-figure=gains] button.copy")
        button.click()
        expect(button).to_have_text("Copied")
        lines = page.evaluate(clipboard).splitlines()
        assert lines[0].startswith("series,x,y")
        assert "1.92,data loading" in lines[1]
        visit.context.close()

    def test_it_is_live_without_reload(self, tmp_path, visit):
        """A trial that ends, a decision, the answer and the new state appear; what the reader did stays."""
        with shown(tmp_path) as service:
            study_id = service.add("running")
            page = visit.go(f"{service.url}/studies/{study_id}")
            page.wait_for_selector("html[data-live=yes]")
            page.evaluate("window.same = true")
            details = page.locator("#trials-details")
            details.locator("summary").click()
            rows = page.locator("#trials-details tbody tr")
            before = rows.count()
            began = Trial(
                trial_id=new_id(),
                study_id=study_id,
                sequence=100,
                candidate=WINNER,
                purpose=Purpose.EXPLORE,
                group="live",
                replicate=0,
                state=TrialState.RUNNING,
                started_at="2026-11-21T09:50:00+00:00",
            )
            service.store.begin_trials([began])
            service.store.add_event(study_id, "trials_began", {"group": "live", "trials": [began.trial_id]})
            expect(rows).to_have_count(before + 1)
            expect(page.locator(".now").last).to_contain_text("100")
            result = make_result(began.trial_id, WINNER, 1.03e7, breakdown=STEP_AFTER)
            service.store.complete_trials([result])
            service.store.add_event(study_id, "trials_ended", {"group": "live", "outcomes": {}})
            expect(rows.last).to_contain_text("measured")
            expect(details).to_have_attribute("open", "")
            service.store.add_event(study_id, "progress", {"stage": "moves", "current": "", "activity": "warming up"})
            expect(page.locator("#activity")).to_contain_text("warming up")
            service.store.save_recommendation(make_recommendation(study_id=study_id))
            service.store.add_event(study_id, "recommended", {"verdict": "faster"})
            expect(page.locator(".figure-number")).to_have_text("2.42×")
            service.change_state(study_id, StudyState.COMPLETED)
            expect(page.locator("#controls .state")).to_have_text("completed")
            assert page.evaluate("window.same") is True
            assert visit.complaints == []

    def test_pause_resume_and_cancel(self, tmp_path, visit):
        with shown(tmp_path) as service:
            study = replace(stories()["running"][0], state=StudyState.QUEUED)
            study_id = service.add("queued", (study, [], [], None))
            page = visit.go(f"{service.url}/studies/{study_id}")
            page.get_by_role("button", name="Pause").click()
            expect(page.locator("#controls .state")).to_have_text("paused")
            page.get_by_role("button", name="Resume").click()
            expect(page.locator("#controls .state")).to_have_text("queued")
            page.on("dialog", lambda dialog: dialog.accept())
            page.get_by_role("button", name="Cancel").click()
            expect(page.locator("#controls .state")).to_have_text("cancelled")
            expect(page.locator("#controls button")).to_have_text(["Delete"])

    def test_a_button_that_is_pressed_stays_until_it_is_released(self, tmp_path, visit):
        """Else the click were lost whenever the page is brought up to date in between."""
        with shown(tmp_path) as service:
            study = replace(stories()["running"][0], state=StudyState.QUEUED)
            page = visit.go(f"{service.url}/studies/{service.add('queued', (study, [], [], None))}")
            page.get_by_role("button", name="Pause").hover()
            page.mouse.down()
            page.evaluate(
                """() => new Promise(done => {
                    document.getElementById("activity").textContent = "not what the service says";
                    document.addEventListener("page-refreshed", () => done(), {once: true});
                    steptune.refresh();
                })"""
            )
            page.mouse.up()
            expect(page.locator("#controls .state")).to_have_text("paused")

    def test_events_in_quick_succession_do_not_keep_the_page_from_changing(self, tmp_path, visit):
        with shown(tmp_path) as service:
            study = replace(stories()["running"][0], state=StudyState.QUEUED)
            page = visit.go(f"{service.url}/studies/{service.add('queued', (study, [], [], None))}")
            changed = page.evaluate(
                """() => new Promise(done => {
                    const events = setInterval(() => steptune.refresh(), 100);
                    const end = changed => { clearInterval(events); done(changed); };
                    document.addEventListener("page-refreshed", () => end(true), {once: true});
                    setTimeout(() => end(false), 20000);
                })"""
            )
            assert changed

    def test_the_price_stays_in_this_browser_and_gives_costs(self, complete, visit):
        page = visit.go(f"{complete.url}/studies/{complete.studies['large']}#evidence")
        num_requests = len(visit.requests)
        page.get_by_label("Price of this machine").fill("36")
        note = page.locator("#price-note")
        expect(note).to_contain_text(re.compile(r"an epoch costs [\d.]+, today [\d.]+; the search cost 4.62"))
        assert [url for url in visit.requests[num_requests:] if "/api/" in url] == []
        page.reload()
        expect(page.get_by_label("Price of this machine")).to_have_value("36")

    def test_exports_can_be_saved(self, complete, visit):
        page = visit.go(f"{complete.url}/studies/{complete.studies['complete']}")
        with page.expect_download() as saved:
            page.locator("#use").get_by_role("link", name="steptune.json").click()
        assert '"verdict": "faster"' in Path(saved.value.path()).read_text()


class TestList:
    def test_search_filter_and_order(self, complete, visit):
        page = visit.go(complete.url)
        rows = page.locator("table.studies tbody tr")
        expect(rows).to_have_count(len(complete.studies))
        page.get_by_label("State").select_option("failed")
        page.get_by_role("button", name="Show").click()
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text("failed")
        page.get_by_role("link", name="Clear").click()
        page.get_by_role("searchbox").fill("no such workload")
        page.keyboard.press("Enter")
        expect(page.get_by_text("No study matches.")).to_be_visible()
        page.goto(f"{complete.url}/?sort=gain")
        expect(rows.first).to_contain_text("2.42×")

    def test_two_studies_are_compared_and_ended_ones_deleted(self, tmp_path, visit):
        with shown(tmp_path) as service:
            for name in ("complete", "large", "failed"):
                service.add(name)
            page = visit.go(service.url)
            compare, delete = (page.get_by_role("button", name=name) for name in ("Compare two", "Delete"))
            expect(compare).to_be_disabled()
            rows = page.locator("table.studies tbody tr")
            for name in ("complete", "large"):
                page.locator(f"input[value='{service.studies[name]}']").check()
            compare.click()
            page.wait_for_url(f"{service.url}/compare?a={service.studies['complete']}&b={service.studies['large']}")
            page.goto(service.url)
            page.on("dialog", lambda dialog: dialog.accept())
            page.locator(f"input[value='{service.studies['failed']}']").check()
            delete.click()
            expect(rows).to_have_count(2)
            assert {study.study_id for study in service.store.list_studies()} == {
                service.studies[name] for name in ("complete", "large")
            }

    def test_tags_and_notes_are_written_and_found(self, tmp_path, visit):
        with shown(tmp_path) as service:
            study = f"{service.url}/studies/{service.add('complete')}"
            service.add("failed")
            page = visit.go(f"{study}#about")
            page.get_by_label("Tags").fill("nightly, vit")
            page.get_by_label("Notes").fill("first try\n<b>on two cores</b>")
            page.get_by_role("button", name="Save").click()
            expect(page.locator("#about-note")).to_have_text("saved")
            page.reload()
            expect(page.get_by_label("Tags")).to_have_value("nightly vit")
            page.get_by_label("Tags").fill("not/a tag!")
            page.get_by_role("button", name="Save").click()
            expect(page.locator("#about-note")).not_to_have_text("saved")
            page.goto(service.url)
            expect(page.locator("table.studies")).to_contain_text("<b>on two cores</b>")
            page.get_by_role("link", name="vit", exact=True).click()
            expect(page.locator("table.studies tbody tr")).to_have_count(1)
            page.goto(f"{service.url}/?q=two+cores")
            expect(page.locator("table.studies tbody tr")).to_have_count(1)
            page.goto(f"{service.url}/?tag=vi")
            expect(page.get_by_text("No study matches.")).to_be_visible()

    def test_pages_of_a_long_list(self, tmp_path, visit):
        with shown(tmp_path) as service:
            story = stories()["failed"]
            for _ in range(51):
                service.add("failed", story)
            page = visit.go(service.url)
            rows = page.locator("table.studies tbody tr")
            expect(rows).to_have_count(50)
            page.get_by_role("link", name="Next page").click()
            expect(rows).to_have_count(1)
            page.get_by_role("link", name="First page").click()
            expect(rows).to_have_count(50)

    def test_a_new_study_appears_without_reload(self, tmp_path, visit):
        with shown(tmp_path) as service:
            page = visit.go(service.url)
            page.wait_for_selector("html[data-live=yes]")
            study_id = service.add("one")
            service.store.add_event(study_id, "state", {"state": "running", "message": ""})
            expect(page.locator("table.studies tbody tr")).to_have_count(1)


class TestSubmit:
    def test_a_zoo_entry_becomes_a_study(self, tmp_path, visit):
        with shown(tmp_path) as service:
            page = visit.go(f"{service.url}/submit")
            page.get_by_label("Entry").select_option("synthetic")
            page.get_by_label("Title").fill("first try")
            page.get_by_label("lossy").check()
            page.get_by_role("button", name="Submit").click()
            page.wait_for_url(re.compile(r"/studies/[0-9a-z]{26}$"))
            expect(page.locator("h1")).to_contain_text("zoo:synthetic")
            study = service.store.list_studies()[0]
            assert [numerics.value for numerics in study.settings.allow] == ["lossy"]
            assert study.settings.budget_s == 600

    def test_a_study_that_has_ended_is_deleted_after_a_question(self, tmp_path, visit):
        with shown(tmp_path) as service:
            page = visit.go(f"{service.url}/submit")
            page.get_by_role("button", name="Submit").click()
            page.wait_for_url(re.compile(r"/studies/[0-9a-z]{26}$"))
            expect(page.get_by_role("button", name="Delete")).to_have_count(0)
            page.once("dialog", lambda dialog: dialog.accept())
            page.get_by_role("button", name="Cancel").click()
            delete = page.get_by_role("button", name="Delete")
            page.once("dialog", lambda dialog: dialog.dismiss())
            delete.click()
            assert len(service.store.list_studies()) == 1
            page.once("dialog", lambda dialog: dialog.accept())
            delete.click()
            page.wait_for_url(f"{service.url}/")
            assert service.store.list_studies() == []

    def test_a_file_is_uploaded(self, tmp_path, visit):
        folder = tmp_path / "service"
        folder.mkdir()
        code = tmp_path / "train.py"
        code.write_text("import steptune\n\n\nclass Tiny(steptune.Workload):\n    global_batch = 4\n")
        with shown(folder) as service:
            page = visit.go(f"{service.url}/submit")
            page.get_by_label("My file or archive").check()
            page.get_by_label("Python file, or archive").set_input_files(code)
            page.get_by_label("Workload in it").fill("train.py:Tiny")
            page.get_by_role("button", name="Submit").click()
            page.wait_for_url(re.compile(r"/studies/[0-9a-z]{26}$"))
            assert service.store.list_studies()[0].workload.endswith("train.py:Tiny")

    def test_what_is_wrong_is_said_at_its_field(self, tmp_path, visit):
        with shown(tmp_path) as service:
            page = visit.go(f"{service.url}/submit")
            page.get_by_label("A class on the workers").check()
            page.get_by_label("Class", exact=False).last.fill("not a class")
            page.get_by_role("button", name="Submit").click()
            expect(page.get_by_role("alert")).to_be_visible()
            assert service.store.list_studies() == []


class TestAccess:
    def test_whoever_is_not_logged_in_gets_there_by_the_login(self, tmp_path, visit):
        with shown(tmp_path, insecure_no_auth=False) as service:
            access = service.app.state.access
            user = access.users.create("ada", [Scope.READ, Scope.SUBMIT])
            _, bearer = access.tokens.issue(user.user_id, name="", scopes=[Scope.READ, Scope.SUBMIT], days=1)
            page = visit.page
            page.goto(f"{service.url}/fleet")
            page.get_by_label("Token").fill(bearer.text)
            page.get_by_role("button", name="Log in").click()
            page.wait_for_url(f"{service.url}/fleet")
            expect(page.locator(".user")).to_have_text("ada")
            page.goto(f"{service.url}/submit")
            page.get_by_role("button", name="Submit").click()
            page.wait_for_url(re.compile(r"/studies/[0-9a-z]{26}$"))
            page.get_by_role("button", name="Pause").click()
            expect(page.locator("#controls .state")).to_have_text("paused")

    def test_below_a_base_path(self, tmp_path, visit):
        with shown(tmp_path, base_path="/tune") as service:
            study_id = service.add("complete")
            page = visit.go(service.url + "/")
            page.get_by_role("link", name="photo_resnet").click()
            page.wait_for_url(f"{service.url}/studies/{study_id}")
            assert visit.draw_all() > 0
            assert visit.complaints == []
            assert all(urlsplit(url).path.startswith("/tune") for url in visit.requests)


def test_the_keyboard_reaches_the_content_and_the_pages(complete, visit):
    page = visit.go(complete.url)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.goto(complete.url)
    for _ in range(4):
        page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Fleet")).to_be_focused()
    page.keyboard.press("Enter")
    page.wait_for_url(f"{complete.url}/fleet")


def test_the_report_is_the_page_as_one_file(complete, browser, tmp_path):
    """From a disk, with the network cut off."""
    path = tmp_path / "report.html"
    path.write_text(render_report(complete.store, complete.studies["complete"]), encoding="utf-8")
    visit = Visit(browser, offline=True)
    page = visit.page
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    assert visit.draw_all() >= 6
    expect(page.locator(".figure-number")).to_have_text("2.42×")
    assert visit.complaints == []
    assert {url for url in visit.requests if not url.startswith("data:")} == {path.as_uri()}
    visit.context.close()

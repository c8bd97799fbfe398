"""Every page: who may read it, what it refuses, how it is sent; and the list and the overview on both databases."""

from __future__ import annotations

import gzip
import re

import pytest
from api_builders import Served, fill, served, sqlite_url
from msgspec.structs import replace
from page_builders import put, ranks_story, stories
from report_builders import make_recommendation, make_study, without_gain

from steptune.dashboards.fleet import get_strategies_info
from steptune.dashboards.site import PLOTLY, asset_file, asset_names
from steptune.service.connections import create_engine_for
from steptune.service.pages import PAGES, ROUTERS
from steptune.service.queries.fleet import FleetSums
from steptune.service.queries.studies import StudyFilter, list_studies
from steptune.service.queries.study_list import ListQuery, list_page
from steptune.service.store import SqlStudyStore
from steptune.tuner.records import Verdict

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    with served(sqlite_url(folder), folder) as found:
        found.filled = fill(found)
        yield found


def get(service: Served, path: str, user: str | None = "ada", scopes: str = "read submit", **headers: str):
    if user is not None:
        headers["Authorization"] = f"Bearer {service.token(user, scopes)}"
    return service.http.get(path, headers=headers)


def path_of(service, page) -> str:
    study_id, trial_ids = service.filled
    return page.path.format(study_id=study_id, trial_id=trial_ids[0])


def test_every_page_is_served_and_every_served_page_is_listed():
    """Files and downloads are no pages."""
    paths = {route.name: route.path for router in ROUTERS for route in router.routes}
    listed = {page.name: page.path for page in PAGES}
    assert listed == {name: path for name, path in paths.items() if name.endswith("_page")}


@every_page
class TestEveryPage:
    def test_it_is_a_page_for_those_who_may_read_it(self, service, page):
        answer = get(service, path_of(service, page))
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert '<main id="main"' in answer.text
        assert 'class="skip"' in answer.text

    def test_it_has_no_inline_script(self, service, page):
        """The content security policy forbids them."""
        text = get(service, path_of(service, page)).text
        scripts = re.findall(r"<script([^>]*)>", text)
        assert scripts
        assert all("src=" in script or 'type="application/json"' in script for script in scripts)
        assert not re.search(r"<[^>]+\son\w+=", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))

    def test_nobody_known_is_sent_to_the_login_and_back(self, service, page):
        path = path_of(service, page)
        answer = get(service, f"{path}?x=1", user=None)
        assert answer.status_code == 303
        wanted = f"{path}?x=1".replace("/", "%2F").replace("?", "%3F").replace("=", "%3D")
        assert answer.headers["location"] == f"/login?next={wanted}"

    def test_a_parameter_that_it_does_not_have_is_not_passed_over(self, service, page):
        answer = get(service, f"{path_of(service, page)}?no_such=1")
        assert answer.status_code == 404
        assert "no_such: unknown parameter" in answer.text

    def test_what_belongs_to_another_is_not_there(self, service, page):
        answer = get(service, path_of(service, page), user="eve")
        if "{" in page.path:
            assert answer.status_code == 404
            assert "or it is not yours" in answer.text.replace("&#39;", "'")
        else:
            assert answer.status_code == 200
            assert service.filled[0] not in answer.text

    def test_it_is_sent_compressed_and_only_when_it_changed(self, service, page):
        path = path_of(service, page)
        first = get(service, path, **{"Accept-Encoding": "gzip"})
        assert first.headers["content-encoding"] == "gzip"
        again = get(service, path, **{"If-None-Match": first.headers["etag"]})
        assert again.status_code == 304
        plain = get(service, path, **{"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.text == first.text

    def test_it_is_only_read(self, service, page):
        path = path_of(service, page)
        headers = {"Authorization": f"Bearer {service.token('ada')}"}
        assert service.http.post(path, headers=headers).status_code == 405


def test_a_reader_without_the_scope_gets_a_page_that_says_so(service):
    answer = get(service, "/submit", user="bob", scopes="read")
    assert answer.status_code == 403
    assert "needs the scope" in answer.text
    assert answer.headers["content-type"].startswith("text/html")


def test_a_page_that_is_not_there_is_no_json(service):
    for path in ("/studies/nothing-here", "/trials/%20", "/?cursor=abc"):
        answer = get(service, path)
        assert answer.status_code == 404
        assert answer.headers["content-type"].startswith("text/html")


class TestFiles:
    @pytest.mark.parametrize("name", [*(asset_file(name) for name in asset_names()), PLOTLY])
    def test_they_may_be_kept_for_good_and_need_no_login(self, service, name):
        answer = get(service, f"/static/{name}", user=None, **{"Accept-Encoding": "gzip"})
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["x-content-type-options"] == "nosniff"

    def test_the_name_follows_the_content(self):
        assert re.fullmatch(r"page-[0-9a-f]{12}\.css", asset_file("page.css"))

    def test_plotly_is_that_of_the_package(self, service):
        from plotly.offline import get_plotlyjs

        answer = get(service, f"/static/{PLOTLY}", user=None, **{"Accept-Encoding": "identity"})
        assert answer.text == get_plotlyjs()

    def test_others_are_not_there(self, service):
        for name in ("page.css", "..%2fpage.css", "plotly-0.0.0.min.js", "page-000000000000.css"):
            assert get(service, f"/static/{name}", user=None).status_code == 404


class TestReport:
    def test_it_is_a_file_to_save(self, service):
        study_id, trial_ids = service.filled
        answer = get(service, f"/studies/{study_id}/report.html")
        assert answer.status_code == 200
        assert answer.headers["content-disposition"].startswith("attachment")
        assert f'id="trial-{trial_ids[0]}"' in answer.text
        assert get(service, f"/studies/{study_id}/report.html", user="eve").status_code == 404

    def test_it_is_compressed(self, service):
        answer = get(service, f"/studies/{service.filled[0]}/report.html", **{"Accept-Encoding": "gzip"})
        assert len(gzip.compress(answer.content, 5)) < len(answer.content) / 2
        assert answer.headers["content-encoding"] == "gzip"


class TestComparing:
    def test_a_trial_does_not_differ_from_itself(self, service):
        _, trial_ids = service.filled
        answer = get(service, f"/compare?a={trial_ids[0]}&b={trial_ids[0]}")
        assert answer.status_code == 200
        assert "No difference beyond noise" in answer.text

    def test_what_has_no_profile_is_said(self, service):
        _, trial_ids = service.filled
        text = get(service, f"/compare?a={trial_ids[0]}&b={trial_ids[2]}").text
        assert "These two cannot be compared" in text
        assert "has no result (running)" in text

    def test_those_of_others_are_not_there(self, service):
        _, trial_ids = service.filled
        assert get(service, f"/compare?a={trial_ids[0]}&b={trial_ids[0]}", user="eve").status_code == 404


@pytest.fixture(scope="module")
def ranks_study(service) -> str:
    """Id of a study of two ranks that were measured two ways."""
    store = SqlStudyStore(service.services.engine)
    return put(store, ranks_story(), owner_id=service.user_id("ada"))[0]


class TestScaling:
    def test_curves_and_all_ways_are_shown(self, service, ranks_study):
        answer = get(service, f"/studies/{ranks_study}/scaling?hosts=4&network=25gbps&latency=20us")
        assert answer.status_code == 200
        for part in ("step_times", "throughput", "efficiency"):
            assert f'data-figure="{part}"' in answer.text
        for part in (
            "ZeRO-1",
            "two levels",
            "bf16",
            "<h2>Scaling</h2>",
            "median error",
            "4 ranks and emulated links",
        ):
            assert part in answer.text
        assert 'value="25gbps"' in answer.text

    def test_a_study_leads_there(self, service, ranks_study):
        assert f'href="/studies/{ranks_study}/scaling"' in get(service, f"/studies/{ranks_study}").text

    def test_what_is_missing_is_asked_for(self, service, ranks_study):
        for query, said in (("devices=8&inside=fast", "not a bandwidth"), ("network=&hosts=2", "--network 25gbps")):
            text = get(service, f"/studies/{ranks_study}/scaling?{query}").text
            assert "This cannot be predicted" in text
            assert said in text

    def test_nonsense_is_no_page(self, service, ranks_study):
        for query in ("hosts=0", "hosts=999999", "devices=-1", "network=%3Cscript%3E"):
            assert get(service, f"/studies/{ranks_study}/scaling?{query}").status_code == 404


@pytest.fixture
def listed(database_url):
    """A store with a study of every state, and their ids; on each kind of database."""
    engine = create_engine_for(database_url)
    store = SqlStudyStore(engine)
    ids = {name: put(store, story)[0] for name, story in stories(num_trials=12).items()}
    other = stories()["complete"]
    story = (replace(other[0], workload="zoo:synthetic?batch=8"), *other[1:3], replace(other[3], gain=None))
    ids["synthetic"] = put(store, story)[0]
    yield store, ids
    engine.dispose()


class TestList:
    def found(self, store, **wanted):
        return [s.study_id for s in list_page(store.engine, ListQuery(owner_id=None, **wanted), 50).studies]

    def test_the_newest_come_first_with_their_answers(self, listed):
        store, ids = listed
        page = list_page(store.engine, ListQuery(owner_id=None), 50)
        assert [s.study_id for s in page.studies] == sorted(ids.values(), reverse=True)
        row = next(s for s in page.studies if s.study_id == ids["large"])
        assert (row.answer, row.bottleneck_before, row.bottleneck_after) == ("2.42×", "input", "compute")
        assert row.hardware == "AMD EPYC 7B13, 2 cores"
        assert row.cost == "7 min 42 s"

    def test_filters(self, listed):
        store, ids = listed
        assert self.found(store, state="failed") == [ids["failed"]]
        assert self.found(store, text="SYNTH") == [ids["synthetic"]]
        assert self.found(store, text=ids["one"][-8:]) == [ids["one"]]
        assert self.found(store, text="%") == []
        assert self.found(store, hardware="AMD EPYC 7B13, 2 cores") == [ids["large"]]
        assert set(self.found(store, bottleneck="input")) == {ids["complete"], ids["large"], ids["synthetic"]}
        assert self.found(store, bottleneck="host") == []
        assert list_page(store.engine, ListQuery(owner_id="nobody"), 50).studies == ()

    @pytest.mark.parametrize("sort", ["newest", "gain", "cost", "workload"])
    def test_pages_of_every_order_hold_each_study_once(self, listed, sort):
        store, ids = listed
        cursor, found = "", []
        for _ in range(len(ids)):
            page = list_page(store.engine, ListQuery(owner_id=None, sort=sort, cursor=cursor), 2)
            found += [s.study_id for s in page.studies]
            cursor = page.next_cursor
            if not cursor:
                break
        assert sorted(found) == sorted(ids.values())
        assert found == self.found(store, sort=sort)

    def test_what_was_rejected_or_not_confirmed_is_no_gain(self, listed):
        """Neither shown nor sorted by, nor part of what strategies gain."""
        store, _ = listed
        rejected = replace(make_recommendation().gain, ratio=6.88)
        put(store, (make_study(), [], [], without_gain(unproven_gain=rejected)))
        put(store, (make_study(), [], [], make_recommendation(verdict=Verdict.UNCONFIRMED, gain=None)))
        page = list_page(store.engine, ListQuery(owner_id=None, sort="gain"), 50)
        assert [row.gain for row in page.studies[:2]] == [2.42, 2.42]
        assert {row.answer for row in page.studies if row.gain is None} >= {"no significant gain", "unconfirmed"}
        summaries = list_studies(store.engine, StudyFilter(), limit=50, before=None)
        assert max(summary.gain or 0.0 for summary in summaries) == 2.42
        studies, parts = FleetSums().read(store.engine, None)
        assert max(gain for s in studies for gain in s.gains) == 2.42
        [row] = [row for row in get_strategies_info(parts) if row.strategy == "data_loading"]
        assert row.num_parts == 3

    def test_a_cursor_of_another_list_is_refused(self, listed):
        store, _ = listed
        for cursor in ("abc", "W10", "eyJhIjogMX0"):
            with pytest.raises(ValueError, match="not a position in this list"):
                list_page(store.engine, ListQuery(owner_id=None, cursor=cursor), 2)


def test_the_overview_reads_columns_only(listed):
    """The contribution of each strategy is written with the answer."""
    store, ids = listed
    studies, parts = FleetSums().read(store.engine, None)
    assert sum(s.num_studies for s in studies) == len(ids)
    assert [gain for s in studies for gain in s.gains] == [2.42, 2.42]
    [row] = [row for row in get_strategies_info(parts) if row.strategy == "data_loading"]
    assert row.bottleneck == "input"
    assert (row.num_parts, row.gain) == (3, 1.92)
    assert row.num_studies >= 3
    assert FleetSums().read(store.engine, "nobody") == ([], [])

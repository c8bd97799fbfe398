"""Pages that readers share: rendered once for a version of what they show, and again after every change of it."""

from __future__ import annotations

import pytest
from api_builders import served, sqlite_url
from msgspec.structs import replace
from page_builders import put, stories
from report_builders import WINNER, make_recommendation, make_result
from sqlalchemy import event

from steptune.service.deleting import delete_study
from steptune.service.pages import fleet, routing, study, trials
from steptune.service.queries import fleet as fleet_queries
from steptune.service.queries.fleet import FleetSums
from steptune.service.queries.studies import change_study
from steptune.service.queries.versions import block_versions, fleet_version
from steptune.service.settings.scopes import Scope
from steptune.service.store import SqlStudyStore
from steptune.tuner.records import Decision, Purpose, StudyState, Trial, TrialState, new_id

NOW = "2026-11-21T09:50:00+00:00"


@pytest.fixture
def service(tmp_path):
    with served(sqlite_url(tmp_path), tmp_path) as found:
        found.token("ada"), found.token("root", "read admin"), found.token("eve")
        found.store = SqlStudyStore(found.services.engine)
        found.study_id, found.trial_ids = put(found.store, stories()["running"], owner_id=found.user_id("ada"))
        yield found


@pytest.fixture
def renderings(monkeypatch) -> list[str]:
    """The names of the pages that were made, as they are."""
    made: list[str] = []
    for module, name in ((study, "study_context"), (trials, "trial_context"), (fleet, "fleet_context")):
        inner = getattr(module, name)

        def counted(*arguments, _inner=inner, _name=name):
            made.append(_name)
            return _inner(*arguments)

        monkeypatch.setattr(module, name, counted)
    return made


def get(service, path: str, user: str = "ada", token: str = "", **headers: str):
    headers["Authorization"] = f"Bearer {token or service.token(user)}"
    answer = service.http.get(path, headers=headers)
    assert answer.status_code in (200, 304), answer.text
    return answer


def paths(service) -> list[str]:
    return [f"/studies/{service.study_id}", f"/trials/{service.trial_ids[0]}", "/fleet"]


def test_a_page_is_made_once_for_all_who_read_it(service, renderings):
    for path in paths(service):
        first = get(service, path)
        assert get(service, path).text == first.text
        assert get(service, path, **{"If-None-Match": first.headers["etag"]}).status_code == 304
    assert renderings == ["study_context", "trial_context", "fleet_context"]


def test_readers_get_their_own_name_and_rights(service, renderings):
    path = f"/studies/{service.study_id}"
    issue = service.app.state.access.tokens.issue
    _, reading = issue(service.user_id("ada"), name="", scopes=[Scope.READ], days=1)
    owner, reader, admin = get(service, path), get(service, path, token=reading.text), get(service, path, user="root")
    assert ">ada</a>" in owner.text
    assert ">ada</a>" not in admin.text
    assert "/submit" in owner.text
    assert "/submit" not in reader.text
    assert ">root</a>" in admin.text
    assert len({answer.headers["etag"] for answer in (owner, reader, admin)}) == 3
    assert renderings == ["study_context"] * 2  # with the right to submit, and without


def test_an_overview_is_of_ones_own_studies(service):
    assert "1" in get(service, "/fleet").text
    assert "There is no study yet" in get(service, "/fleet", user="eve").text


def _begin(service) -> None:
    service.store.begin_trials([_trial(service, 100)])


def _trial(service, sequence: int) -> Trial:
    return Trial(
        trial_id=new_id(),
        study_id=service.study_id,
        sequence=sequence,
        candidate=WINNER,
        purpose=Purpose.EXPLORE,
        group="late",
        replicate=0,
        state=TrialState.RUNNING,
        started_at=NOW,
    )


def _complete(service) -> None:
    trial = next(t for t in service.store.trials(service.study_id) if t.result is None)
    service.store.complete_trials([make_result(trial.trial_id, trial.candidate, 1.0e7)])


def _decide(service) -> None:
    kept = service.store.decisions(service.study_id)
    decision = Decision(sequence=999, stage="move", verdict="no_gain", reason="another", candidate=WINNER)
    service.store.replace_decisions(service.study_id, [*kept, decision])


def _add_file(service) -> None:
    service.store.add_artifact(service.study_id, service.trial_ids[0], "log", "0" * 64, 10)


CHANGES = {
    "a trial begins": _begin,
    "a trial completes": _complete,
    "trials are lost": lambda s: s.store.lose_running_trials(s.study_id),
    "decisions": _decide,
    "an answer": lambda s: s.store.save_recommendation(make_recommendation(study_id=s.study_id)),
    "a file": _add_file,
    "a state": lambda s: s.store.set_state(s.study_id, StudyState.FAILED, "no device"),
    "its inspection": lambda s: s.store.update_study(replace(s.store.get_study(s.study_id), message="looked at")),
    "its title": lambda s: change_study(s.services.engine, s.study_id, None, title="new", priority=None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_a_study_makes_its_pages_anew(service, renderings, change):
    for path in paths(service)[:2]:
        get(service, path)
    del renderings[:]
    change(service)
    for path in paths(service)[:2]:
        get(service, path)
        get(service, path)
    assert renderings == ["study_context", "trial_context"]


def test_progress_makes_no_page_anew_but_the_page_goes_on_from_it(service, renderings):
    path = f"/studies/{service.study_id}"
    before = get(service, path).text
    service.store.add_event(service.study_id, "progress", {"activity": "warming up"})
    after = get(service, path).text
    assert renderings == ["study_context"]
    number = service.store.events(service.study_id)[-1].sequence
    assert f"events?after={number}" in after
    assert f"events?after={number}" not in before


def test_the_overview_changes_with_answers_and_states_and_not_with_trials(service, renderings):
    get(service, "/fleet")
    _begin(service)
    get(service, "/fleet")
    assert renderings == ["fleet_context"]
    for change in (
        lambda: service.store.set_state(service.study_id, StudyState.COMPLETED),
        lambda: service.store.save_recommendation(make_recommendation(study_id=service.study_id)),
        lambda: put(service.store, stories()["complete"], owner_id=service.user_id("ada")),
    ):
        count = len(renderings)
        change()
        get(service, "/fleet")
        assert len(renderings) == count + 1


@pytest.fixture
def templates(monkeypatch) -> list[str]:
    """The templates that were rendered."""
    rendered: list[str] = []
    inner = routing.render
    monkeypatch.setattr(
        routing, "render", lambda name, site, **shown: rendered.append(name) or inner(name, site, **shown)
    )
    return rendered


def test_lists_comparisons_and_predictions_are_made_once_too(service, templates):
    paths = ["/", "/?sort=gain", f"/compare?a={service.study_id}", f"/studies/{service.study_id}/scaling?hosts=2"]
    for path in paths:
        first = get(service, path)
        assert get(service, path).text == first.text
    once = ["studies.html", "studies.html", "compare.html", "scaling.html"]
    assert templates == once
    change_study(service.services.engine, service.study_id, None, title="another title", priority=None)
    for path in paths:
        get(service, path)
        get(service, path)
    assert templates == once * 2
    assert "another title" in get(service, "/").text


def test_a_list_is_of_its_reader_and_of_what_was_asked_for(service):
    assert service.study_id in get(service, "/").text
    assert service.study_id not in get(service, "/", user="eve").text
    assert service.study_id not in get(service, "/?state=failed").text
    assert get(service, f"/compare?a={service.study_id}").status_code == 200
    answer = service.http.get(
        f"/compare?a={service.study_id}", headers={"Authorization": f"Bearer {service.token('eve')}"}
    )
    assert answer.status_code == 404


def _another(service) -> None:
    """A study with an answer, without its trials."""
    study, *_, answer = stories()["complete"]
    put(service.store, (study, [], [], answer), owner_id=service.user_id("ada"))


OVERVIEW_CHANGES = {
    "a study comes": _another,
    "a study ends": lambda s: s.store.set_state(s.study_id, StudyState.COMPLETED),
    "an answer": lambda s: s.store.save_recommendation(make_recommendation(study_id=s.study_id)),
    "a study goes": lambda s: delete_study(s.store.get_study(s.study_id), s.store, s.services.settings),
}


def test_kept_sums_are_those_of_all_studies_after_every_change(service):
    engine, kept = service.services.engine, FleetSums()
    for _ in range(40):  # every block has studies, some have several
        _another(service)
    for owner_id in (None, service.user_id("ada"), service.user_id("eve")):
        kept.read(engine, owner_id)
    for title, change in OVERVIEW_CHANGES.items():
        change(service)
        for owner_id in (None, service.user_id("ada"), service.user_id("eve")):
            now, anew = (sums.read(engine, owner_id) for sums in (kept, FleetSums()))
            assert [sorted(found, key=str) for found in now] == [sorted(found, key=str) for found in anew], title


def test_only_the_block_of_a_study_that_changed_is_summed_anew(service, monkeypatch):
    engine, kept = service.services.engine, FleetSums()
    for _ in range(40):
        _another(service)
    kept.read(engine, None)
    summed = []
    inner = fleet_queries._summed
    monkeypatch.setattr(fleet_queries, "_summed", lambda e, o, blocks: summed.append([*blocks]) or inner(e, o, blocks))
    kept.read(engine, None)
    service.store.set_state(service.study_id, StudyState.COMPLETED)
    kept.read(engine, None)
    assert summed == [[service.study_id[-1]]]


def test_the_version_of_the_overview_is_read_from_an_index_alone(service):
    statements = []

    def remember(connection, cursor, statement, parameters, context, many) -> None:
        statements.append((statement, parameters))

    engine = service.services.engine
    event.listen(engine, "before_cursor_execute", remember)
    for version in (fleet_version, block_versions):
        version(engine, None), version(engine, service.user_id("ada"))
    event.remove(engine, "before_cursor_execute", remember)
    with engine.connect() as connection:
        plans = [connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {s}", p).all() for s, p in statements]
    steps = [row[3] for plan in plans for row in plan if "studies" in row[3]]
    assert steps
    assert [step for step in steps if "COVERING INDEX" not in step and "PRIMARY KEY" not in step] == []

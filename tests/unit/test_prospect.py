"""Statement on the next minutes by a study that spent its budget."""

import re

import pytest
from rich.console import Console
from search_builders import SMALL, Machine, StudyRun

from steptune.dashboards.headline import get_headline_info
from steptune.service.cli.answer import print_answer


def short_study(search, **settings):
    """One whose budget ends before every choice was tried."""
    run = StudyRun(Machine(SMALL, start_s=4.0), search=search, max_trials=None, **{"budget_s": 28.0, **settings})
    return run, run.run()


def test_the_model_says_its_own_probabilities():
    _, answer = short_study("model", budget_s=16.0)
    assert answer.certificate.ended == "budget spent"
    found = re.search(
        r"would try \d configurations?: the first, .*, has a chance of (\d+)% to become the best so far",
        answer.prospect,
    )
    assert found, answer.prospect
    left = re.search(r"the chance that any other configuration is 2% faster is (\d+)%", answer.prospect)
    assert int(left[1]) / 100 == pytest.approx(answer.certificate.probability_left, abs=0.3)


def test_others_say_that_they_know_no_probability():
    _, answer = short_study("random")
    assert "this search does not estimate how likely that is" in answer.prospect
    assert re.search(r"takes about \d+ s, usually saves [\d.]+% of the step, and saves at most \d+%\.", answer.prospect)


def test_a_search_that_ended_by_itself_promises_nothing():
    run = StudyRun(Machine(SMALL, noise_sd=0.001), max_trials=20)
    assert run.run().prospect == ""


def test_page_and_terminal_say_it():
    run, answer = short_study("random")
    facts = {fact.name: fact for fact in get_headline_info(run.store, run.study_id).facts}
    _, value, note = facts["With more time"]
    assert re.fullmatch(r"\d+ choices? may still save time", value), "what stands large on a page is short"
    assert f"{value}, {note}" == answer.prospect
    console = Console(width=80, record=True)
    print_answer(console, run.store, run.study_id)
    lines = console.export_text().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert " ".join(answer.prospect.split()[:6]) in " ".join(lines)

"""The speed that a study states of each configuration that its answer names."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from report_builders import WINNER, WORKERS, WORKERS_AND_THREADS, make_recommendation, without_gain

from steptune.tuner.records import BASELINE, Candidate, Interval, Verdict
from steptune.tuner.speeds import (
    Method,
    answer_of,
    contribution_of,
    is_wide,
    proven_gain,
    speed_of,
    unclear_contribution,
)

ends = st.floats(0.01, 100.0)


def test_the_answer_is_the_confirmed_gain() -> None:
    found = answer_of(make_recommendation())
    assert (found.ratio, found.method, found.num_blocks) == (2.42, Method.CONFIRMED, 5)
    assert found == speed_of(make_recommendation(), WINNER)


def test_a_finalist_that_was_not_proven_keeps_its_confirmed_figure() -> None:
    """The search saw more in it, which is why it was a finalist."""
    answer = replace(without_gain(), unproven_candidate=WINNER)
    found = speed_of(answer, WINNER)
    assert found is not None
    assert (found.ratio, found.method) == (1.003, Method.CONFIRMED)
    assert answer_of(answer).method is Method.REFERENCE


def test_the_confirmation_goes_before_the_search() -> None:
    [other] = make_recommendation().alternatives
    searched = speed_of(make_recommendation(), WORKERS_AND_THREADS)
    assert searched is not None
    assert (searched.ratio, searched.method) == (2.33, Method.SEARCHED)
    gain = replace(make_recommendation().gain, ratio=2.1)
    confirmed = speed_of(make_recommendation(alternatives=(replace(other, confirmed=gain),)), WORKERS_AND_THREADS)
    assert confirmed is not None
    assert (confirmed.ratio, confirmed.method) == (2.1, Method.CONFIRMED)


def test_of_what_the_answer_does_not_name_nothing_is_stated() -> None:
    assert speed_of(make_recommendation(), Candidate(choices={"data_loading": WORKERS})) is None
    assert speed_of(make_recommendation(verdict=Verdict.ENABLES_TRAINING), BASELINE) is None


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_what_is_faster_is_a_proven_gain(verdict: Verdict) -> None:
    assert (proven_gain(make_recommendation(verdict=verdict)) is not None) == (verdict is Verdict.FASTER)


@given(low=ends, width=st.floats(1.0, 10.0))
def test_a_contribution_is_stated_where_its_interval_excludes_one(low: float, width: float) -> None:
    answer = make_recommendation()
    interval = Interval(low=low, high=low * width)
    part = replace(answer.parts[0], gain=math.sqrt(low * low * width), interval=interval, num_blocks=3)
    found = contribution_of(replace(answer, parts=(part, *answer.parts[1:])), part)
    assert (found is None) == (interval.low <= 1 <= interval.high)
    assert unclear_contribution(replace(answer, parts=(part, *answer.parts[1:])), part) == (
        None if found is not None else interval
    )
    assert is_wide(interval) == (width > 4) or math.isclose(width, 4)


def test_an_only_part_contributes_what_the_answer_gains() -> None:
    part = replace(make_recommendation().parts[0], gain=3.03)
    found = contribution_of(make_recommendation(parts=(part,)), part)
    assert found is not None
    assert found.ratio == 2.42


def test_a_part_that_others_need_says_whose_contribution_it_is() -> None:
    answer = make_recommendation()
    first, *others = answer.parts
    beside = replace(first, together=(others[0].strategy,))
    found = contribution_of(replace(answer, parts=(beside, *others)), beside)
    assert found is not None
    assert found.told == f"measured by leaving it out, in 5 blocks, with {others[0].strategy}, which needs it"
    whole = replace(first, together=tuple(part.strategy for part in others), gain=None, interval=None, num_blocks=0)
    found = contribution_of(replace(answer, parts=(whole, *others)), whole)
    assert found is not None
    assert found.ratio == 2.42


def test_an_only_part_over_settings_that_had_to_give_way_needs_a_measurement() -> None:
    """The answer may also have undone what the reference does to fit."""
    part = replace(make_recommendation().parts[0], gain=None, interval=None, num_blocks=0)
    assert contribution_of(make_recommendation(parts=(part,), verdict=Verdict.ENABLES_TRAINING), part) is None


def test_what_an_older_answer_estimated_of_its_parts_is_not_stated() -> None:
    """It was the search's, whose trials chose the answer."""
    answer = make_recommendation()
    old = tuple(replace(part, num_blocks=0) for part in answer.parts)
    for told in (contribution_of, unclear_contribution):
        assert [told(replace(answer, parts=old), part) for part in old] == [None] * len(old)
    found = [contribution_of(answer, part) for part in answer.parts]
    assert [speed.method for speed in found if speed] == [Method.LEFT_OUT] * len(answer.parts)


def test_an_answer_that_claims_nothing_has_no_contributions() -> None:
    answer = make_recommendation(verdict=Verdict.UNCONFIRMED, gain=None)
    assert [contribution_of(answer, part) for part in answer.parts] == [None] * len(answer.parts)

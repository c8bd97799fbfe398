"""Gains of findings: replayed or a range; and the order that follows."""

import pytest

from steptune.dashboards.finding_gain import finding_gain
from steptune.tuner.profiling.gains import ASIDE, REPLAY_MARGIN, by_worth, gain_of
from steptune.tuner.records import Finding, Replay


def replay(saved: float, error: float) -> Replay:
    return Replay(recorded_ns=100, step_time_ns=100, saved={"stalls": saved}, unprofiled_error=error)


def finding(rule: str, bound: float, **evidence: float | str) -> Finding:
    return Finding(
        rule=rule, severity="note", message="", advice="", strategies=(), bound=bound, evidence=dict(evidence)
    )


def ordered(*findings: Finding) -> list[str]:
    return [one.rule for one in by_worth(findings)]


def test_a_replay_of_the_unprofiled_step_states_one_figure() -> None:
    gain = gain_of(replay(0.3, 0.01), "stalls", share=0.2)
    assert gain is not None
    assert (gain.low, gain.high, gain.why_range) == (0.3, 0.3, "")
    assert gain.bound == pytest.approx(0.3 + REPLAY_MARGIN)
    assert gain.evidence == {"saves": "30.0% of the step, replayed", "expected": 0.3}


@pytest.mark.parametrize(("saved", "low", "high"), [(0.3, 0.2, 0.4), (0.05, 0.0, 0.15), (0.95, 0.85, 1.0)])
def test_a_replay_that_misses_the_unprofiled_step_states_a_range_as_wide_as_it_misses(
    saved: float, low: float, high: float
) -> None:
    gain = gain_of(replay(saved, 0.1), "stalls", share=0.2)
    assert gain is not None
    assert (gain.low, gain.high) == pytest.approx((low, high))
    assert gain.expected == saved
    assert "unprofiled" in gain.why_range


def test_no_range_saves_what_the_device_computes() -> None:
    gain = gain_of(replay(0.3, 0.6), "stalls", share=0.2, idle=0.4)
    assert gain is not None
    assert (gain.low, gain.high) == (0.0, 0.4)
    assert gain.why_range == "the replayed step time differs from the unprofiled one by 60%"
    assert gain_of(replay(0.3, 0.01), "stalls", share=0.2, idle=0.25) == gain_of(replay(0.3, 0.01), "stalls", share=0.2)


def test_a_range_down_to_none_is_still_replayed() -> None:
    gain = gain_of(replay(0.05, 0.1), "stalls", share=0.2)
    assert gain is not None
    text = finding_gain(finding("host_stall", gain.bound, **gain.evidence))
    assert text == "between none and 1.20×, not exact: the replayed step time differs from the unprofiled one by 10%"


def test_without_a_replay_the_categories_bound_the_range() -> None:
    gain = gain_of(Replay(recorded_ns=100, refusal="one step"), "stalls", share=0.2)
    assert gain is not None
    assert (gain.low, gain.high, gain.expected) == (0.0, 0.2, None)
    assert gain.evidence == {"saves": "between 0 and 20% of the step: one step"}
    assert gain_of(None, "stalls", share=0.2) is None


def test_a_range_from_a_replay_is_shown_with_both_ends() -> None:
    gain = gain_of(replay(0.3, 0.1), "stalls", share=0.2)
    assert gain is not None
    text = finding_gain(finding("host_stall", gain.bound, **gain.evidence))
    assert text.startswith("between 1.25× and 1.72×, not exact: ")


def test_a_stated_gain_comes_before_a_larger_bound() -> None:
    """Nothing says how much of the element-wise work would be saved."""
    unfused, waits = finding("unfused", 0.7), finding("synchronisation", 0.05, expected=0.03)
    assert ordered(unfused, waits, finding("layout_conversions", 0.2)) == [
        "synchronisation",
        "unfused",
        "layout_conversions",
    ]


@pytest.mark.parametrize(("launches", "first"), [(0.32, "host_stall"), (0.35, "launch_bound")])
def test_launches_come_first_where_their_gain_is_clearly_larger(launches: float, first: str) -> None:
    """1 / 0.68 is 2.9 % more than 1 / 0.7, 1 / 0.65 is 7.7 % more."""
    stall, launch_bound = finding("host_stall", 0.32, expected=0.3), finding("launch_bound", 0.4, expected=launches)
    assert ordered(launch_bound, stall)[0] == first


def test_what_others_have_to_precede_comes_after_those() -> None:
    """It counts as at most so much, and stands before all that saves less."""
    aside = finding("launch_bound", 0.6, expected=0.5, **{ASIDE: "others come first"})
    small, bound = finding("synchronisation", 0.05, expected=0.03), finding("unfused", 0.7)
    stall = finding("host_stall", 0.3, expected=0.2)
    assert ordered(bound, small, aside, stall) == ["host_stall", "launch_bound", "synchronisation", "unfused"]
    larger = finding("allocation", 0.3, expected=0.25)
    assert ordered(stall, aside, larger) == ["allocation", "host_stall", "launch_bound"]


def test_a_small_gain_that_others_have_to_precede_stays_small() -> None:
    aside = finding("launch_bound", 0.1, expected=0.05, **{ASIDE: "others come first"})
    stall, allocation = finding("host_stall", 0.5, expected=0.4), finding("allocation", 0.3, expected=0.2)
    assert ordered(aside, allocation, stall) == ["host_stall", "allocation", "launch_bound"]


def test_a_stall_that_gains_nothing_states_no_gain() -> None:
    assert ordered(finding("host_stall", 0.0, expected=0.3), finding("unfused", 0.2)) == ["unfused", "host_stall"]


def test_a_bound_leaves_room_for_what_the_profilers_cost_leaves_open() -> None:
    said = Replay(
        recorded_ns=100, step_time_ns=100, saved={"stalls": 0.3}, uncertain={"stalls": 0.04}, unprofiled_error=0.01
    )
    gain = gain_of(said, "stalls", share=0.2)
    assert gain is not None
    assert (gain.low, gain.high) == (0.3, 0.3)
    assert gain.bound == pytest.approx(0.3 + REPLAY_MARGIN + 0.04)

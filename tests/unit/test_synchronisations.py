"""Places in which the host waits, and what each costs, on a machine whose steps without one of them are known."""

import json
from pathlib import Path

import pytest
from counterfactuals.machine import Do, Machine, step_time, write_traces
from counterfactuals.programs import training

from steptune.dashboards.trace_page import render_trace_page
from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.trace_records import TraceAnalysis

MACHINE = Machine()
NEAR = 0.03


def reads_and_waits(rank: int, step: int, place: int) -> list[Do]:
    """A value is read where the host is ahead, just before a pause, and another one after it, where it has no lead."""
    found = {
        20: [Do(kind="read", cause="early", stays=1.0)],
        25: [Do(kind="pause", host=3000.0, stays=10.0)],
        26: [Do(kind="read", cause="late", stays=1.0)],
    }
    return found.get(place, [])


PROGRAM = training(host=10.0, device=60.0, operations=100, extra=reads_and_waits)


def analysed(folder: Path) -> TraceAnalysis:
    paths = write_traces(folder, PROGRAM, MACHINE, num_steps=6)
    return analyse_traces(paths, round(1000 * step_time(PROGRAM, MACHINE)))


def test_all_reads_of_one_operator_are_one_place_with_their_cost(tmp_path: Path) -> None:
    (place,) = analysed(tmp_path).ranks[0].synchronisations
    whole = step_time(PROGRAM, MACHINE)
    truth = 1 - step_time(PROGRAM, MACHINE, without=frozenset({"early", "late"})) / whole
    assert truth > 0.1
    assert (place.call, place.count, place.num_steps) == ("aten::item", 12, 6)
    assert place.saved_share == pytest.approx(truth, abs=NEAR)


def test_each_place_has_the_cost_of_its_own_waits(tmp_path: Path) -> None:
    """The second of each two reads is another operator."""
    (path,) = write_traces(tmp_path, PROGRAM, MACHINE, num_steps=6)
    trace = json.loads(path.read_text())
    items = [one for one in trace["traceEvents"] if one["name"] == "aten::item"]
    for one in sorted(items, key=lambda one: one["ts"])[1::2]:
        one["name"] = "aten::nonzero"
    path.write_text(json.dumps(trace))
    whole = step_time(PROGRAM, MACHINE)
    analysis = analyse_traces([path], round(1000 * whole))
    found = {one.call: one.saved_share for one in analysis.ranks[0].synchronisations}
    for call, cause in (("aten::item", "early"), ("aten::nonzero", "late")):
        truth = 1 - step_time(PROGRAM, MACHINE, without=frozenset({cause})) / whole
        assert found[call] == pytest.approx(truth, abs=NEAR)


def test_the_finding_says_where_and_how_much(tmp_path: Path) -> None:
    analysis = analysed(tmp_path)
    (place,) = analysis.ranks[0].synchronisations
    finding = next(one for one in analysis.findings if one.rule == "synchronisation")
    assert finding.evidence["at_1"] == f"aten::item, costs {place.saved_share:.1%} of the step"
    assert "Places of synchronisations" in render_trace_page(analysis)


def test_a_wait_that_costs_nothing_is_listed_with_no_cost(tmp_path: Path) -> None:
    def reads(rank: int, step: int, place: int) -> list[Do]:
        return [Do(kind="read", stays=1.0)] if place == 20 else []

    paths = write_traces(tmp_path, training(host=10.0, device=60.0, operations=100, extra=reads), MACHINE, num_steps=6)
    (place,) = analyse_traces(paths).ranks[0].synchronisations
    assert place.saved_share == 0.0
    assert place.wait_ns > 0

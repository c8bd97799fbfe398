"""Work that only some steps have, as an evaluation inside of the loop."""

from pathlib import Path

import pytest
from trace_events import Event, launched, note, operator, step, trace_of

from steptune.tuner.profiling.analysis import analyse_trace
from steptune.tuner.records import Finding
from steptune.tuner.trace_records import RankAnalysis


def analysed(directory: Path, events: list[Event]) -> RankAnalysis:
    return analyse_trace(trace_of(directory, events), "trace")[0]


def on_cpu(*, evaluations: dict[int, str], slow: tuple[int, ...] = (), num_steps: int = 8) -> list[Event]:
    """Steps of five products of 10 us; an evaluation is ten more, and in a slow step each takes three times as long."""
    events: list[Event] = []
    now = 0.0
    for number in range(num_steps):
        begin, length = now, 30.0 if number in slow else 10.0
        for _ in range(5):
            events.append(operator("aten::mm", now, now + length))
            now += length
        if number in evaluations:
            if evaluations[number]:
                events.append(note(evaluations[number], now, now + 100))
            events += [operator("aten::mm", now + 10 * place, now + 10 * place + 10) for place in range(10)]
            now += 100
        events.append(step(number, begin, now))
    return events


def extra_finding(analysis: RankAnalysis) -> Finding | None:
    return next((finding for finding in analysis.findings if finding.rule == "extra_work"), None)


def test_an_evaluation_in_few_steps_is_found_and_named(tmp_path: Path) -> None:
    analysis = analysed(tmp_path, on_cpu(evaluations={3: "validation", 7: "validation"}))
    assert analysis.extra_work is not None
    assert (analysis.extra_work.steps, analysis.extra_work.time_ns) == ((4, 8), 200_000)
    found = analysis.findings[0]
    assert found == extra_finding(analysis)
    assert "33% of the steps' time" in found.message
    assert "steps 4 and 8 of 8, during validation" in found.message
    assert "evaluate" in found.advice
    assert found.bound == pytest.approx(200 / 600)


def test_without_a_name_the_steps_are_named(tmp_path: Path) -> None:
    found = extra_finding(analysed(tmp_path, on_cpu(evaluations={5: ""})))
    assert found is not None
    assert "step 6 of 8, in operations that other steps do not run" in found.message


def test_a_slow_step_has_no_further_work(tmp_path: Path) -> None:
    assert analysed(tmp_path, on_cpu(evaluations={}, slow=(2, 5))).extra_work is None


def test_work_of_most_steps_is_the_usual(tmp_path: Path) -> None:
    assert analysed(tmp_path, on_cpu(evaluations=dict.fromkeys(range(6), "validation"))).extra_work is None


def test_three_steps_show_no_usual_one(tmp_path: Path) -> None:
    assert analysed(tmp_path, on_cpu(evaluations={1: "validation"}, num_steps=3)).extra_work is None


def test_kernels_count_for_the_step_that_launched_them(tmp_path: Path) -> None:
    """The host is a step ahead of the device."""
    events: list[Event] = []
    device, correlation = 100.0, 0
    for number in range(6):
        num_kernels = 14 if number == 3 else 4
        events.append(step(number, 50 * number, 50 * number + 50))
        for place in range(num_kernels):
            correlation += 1
            events += launched("gemm", 50 * number + 3 * place, device, device + 20, correlation)
            device += 20
    analysis = analysed(tmp_path, events)
    assert analysis.extra_work is not None
    assert (analysis.extra_work.steps, analysis.extra_work.time_ns) == ((4,), 200_000)

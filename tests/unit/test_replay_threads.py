"""Answers for a second simulated machine: threads beside the steps, slow devices, full queues, work of some steps."""

from pathlib import Path

import pytest
from counterfactuals.processes import (
    Host,
    Program,
    Running,
    Without,
    copying,
    layers,
    step_time,
    stepping,
    taken,
    write_traces,
)

from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.profiling.replay.answers import EXTRA, LATE_RANKS, STALLS
from steptune.tuner.trace_records import TraceAnalysis

TOLERANCE = 0.03
"""Points of the step that an answer may miss the truth by, as shares."""
BESIDE = 0.06
"""The same where a profiler makes a thread beside the steps slower, too."""


def analysed(program: Program, directory: Path) -> TraceAnalysis:
    return analyse_traces(write_traces(directory, program), round(1000 * step_time(program)))


def truth(program: Program, cause: str) -> float:
    return 1 - step_time(program, without=[cause]) / step_time(program)


def test_a_device_that_is_a_little_slow_in_each_bucket_is_late_in_all(tmp_path: Path) -> None:
    """Launches of its peers wait for places in full queues, which is no time of their hosts."""

    def step(host: Host, number: int, without: Without) -> Running:
        yield from layers(host, 44, 9.0, 30.0, buckets=8, ranks=3)

    def slow(rank: int, without: Without) -> float:
        return 1.35 if rank == 1 and LATE_RANKS not in without else 1.0

    program = Program(threads={"main": stepping(step)}, num_ranks=3, slow=slow)
    analysis, true = analysed(program, tmp_path), truth(program, LATE_RANKS)
    assert true > 0.15
    assert analysis.replay.saved[LATE_RANKS] == pytest.approx(true, abs=TOLERANCE)
    assert analysis.findings[0].rule == "rank_skew"
    assert analysis.findings[0].evidence["rank"] == 1


def test_a_thread_that_copies_batches_ahead_takes_no_time_of_the_steps(tmp_path: Path) -> None:
    def step(host: Host, number: int, without: Without) -> Running:
        yield from taken(host, number)
        host.work(12.0 if STALLS in without else 4000.0)
        yield from layers(host, 60, 9.0, 14.0)

    program = Program(threads={"main": stepping(step), "copies": copying(1200.0, 2000.0)})
    analysis = analysed(program, tmp_path)
    replay = analysis.ranks[0].breakdowns[0].replay
    assert replay.saved[STALLS] == pytest.approx(truth(program, STALLS), abs=BESIDE)
    assert "synchronisation" not in replay.saved
    assert analysis.findings[0].rule == "host_stall"


def test_work_of_some_steps_is_replayed_without(tmp_path: Path) -> None:
    def step(host: Host, number: int, without: Without) -> Running:
        yield from layers(host, 60, 9.0, 20.0)
        if number % 5 == 2 and EXTRA not in without:
            begin = host.time
            for _ in range(150):
                yield from host.operator(9.0, 20.0)
            host.annotate("evaluate", begin)

    program = Program(threads={"main": stepping(step)})
    analysis = analysed(program, tmp_path)
    first = analysis.findings[0]
    assert (first.rule, first.evidence["cause"]) == ("extra_work", "evaluation")
    assert first.evidence["expected"] == pytest.approx(truth(program, EXTRA), abs=TOLERANCE)
    assert "steps 2 and 7 of 10" in first.message

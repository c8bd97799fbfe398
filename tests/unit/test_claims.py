"""Every lost share of a step is claimed by one finding, so that claims add up to no more than was lost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from counterfactuals.machine import Do, Machine, Program, step_time, write_traces
from counterfactuals.programs import Pair, pairs, training
from msgspec import structs
from traces import NAMES, needs_traces, trace_file

from steptune.dashboards.finding_gain import finding_gain
from steptune.dashboards.trace_page import render_trace_page
from steptune.tuner.costs.categories import COMPUTE
from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.claims import claimed
from steptune.tuner.profiling.diagnosis import SUBJECTS
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.replay.answers import DISPATCH, LATE_RANKS, replay_ranks
from steptune.tuner.profiling.replay.graph import build_graph
from steptune.tuner.profiling.replay.together import saved_without, with_ranks_together
from steptune.tuner.records import Finding, Replay
from steptune.tuner.trace_records import TraceAnalysis

MACHINE = Machine(clocks=(0.0, 5000.0))
NEAR = 0.03
EVERY = 29
"""A sample of the pairs: all of them take minutes."""


def reads_and_pauses(rank: int, step: int, place: int) -> list[Do]:
    pause = [Do(kind="pause", host=4000.0, cause="stalls", stays=10.0)] if place == 60 else []
    return ([Do(kind="read", cause="synchronisation", stays=1.0)] if place == 30 else []) + pause


def sleeps_on_one_rank(rank: int, step: int, place: int) -> list[Do]:
    return [Do(kind="pause", host=4000.0, cause="late_ranks", stays=10.0)] if place == 10 and rank == 1 else []


def analysed(folder: Path, program: Program, num_ranks: int = 1) -> TraceAnalysis:
    paths = write_traces(folder, program, MACHINE, num_steps=6, num_ranks=num_ranks)
    return analyse_traces(paths, round(1000 * step_time(program, MACHINE, num_ranks=num_ranks)))


def claims(findings: Sequence[Finding]) -> dict[str, float]:
    return {finding.rule: finding.claim for finding in findings if finding.claim is not None}


def assert_claimed_once(analysis: TraceAnalysis) -> None:
    evidence = [Evidence(analysis=rank) for rank in analysis.ranks]
    found = claims(analysis.findings)
    assert all(claim >= 0 for claim in found.values())
    assert sum(found.values()) <= 1 + 1e-9
    waiting = {"synchronisation", "host_stall", "input_bound", "allocation", "launch_bound", "rank_skew", "blocked"}
    lost = max(one.idle_share for one in evidence)
    assert sum(claim for rule, claim in found.items() if rule in waiting) <= lost + 1e-9
    gains = [finding for finding in analysis.findings if finding.bound > 0]
    assert all(finding.claim is not None for finding in gains)


@pytest.mark.parametrize("kind", ["development", "held out"])
def test_claims_of_simulated_pairs_add_up_to_what_was_lost(kind: str, tmp_path: Path) -> None:
    for number, pair in enumerate(list(pairs(kind))[::EVERY]):
        assert_claimed_once(analysed_pair(tmp_path / str(number), pair))


def analysed_pair(folder: Path, pair: Pair) -> TraceAnalysis:
    folder.mkdir()
    options = {"num_ranks": pair.num_ranks, "seed": pair.seed}
    paths = write_traces(folder, pair.program, pair.machine, num_steps=pair.num_steps, **options)
    return analyse_traces(paths, round(1000 * step_time(pair.program, pair.machine, **options)))


@needs_traces
def test_claims_of_real_traces_add_up_to_what_was_lost() -> None:
    for name in NAMES:
        assert_claimed_once(analyse_traces([trace_file(name)]))


@needs_traces
def test_claims_of_two_ranks_add_up_to_what_was_lost() -> None:
    assert_claimed_once(analyse_traces([trace_file(f"h200_vit_b_ddp2_split0_rank{rank}") for rank in (0, 1)]))


def test_two_causes_claim_together_what_is_saved_without_both(tmp_path: Path) -> None:
    """The pause costs the step something only because the host lost its lead: alone, each saves most of it."""
    program = training(host=10.0, device=60.0, operations=100, extra=reads_and_pauses)
    findings = [f for f in analysed(tmp_path, program).findings if f.rule in ("synchronisation", "host_stall")]
    both = step_time(program, MACHINE, without=frozenset({"synchronisation", "stalls"}))
    truth = 1 - both / step_time(program, MACHINE)
    alone = sum(float(finding.evidence["expected"]) for finding in findings)
    assert alone > truth + 2 * NEAR
    first, second = findings
    assert first.claim == pytest.approx(first.evidence["expected"], abs=0.005)
    assert sum(claims(findings).values()) == pytest.approx(truth, abs=NEAR)
    assert second.evidence["after"] == first.rule
    assert finding_gain(second).endswith(f"once {first.rule} is mended, nothing")
    assert "mended" not in finding_gain(first)


def test_a_rank_that_sleeps_is_claimed_by_its_lateness(tmp_path: Path) -> None:
    program = training(host=20.0, device=12.0, operations=80, buckets=4, network=300.0, extra=sleeps_on_one_rank)
    analysis = analysed(tmp_path, program, num_ranks=2)
    late, stall = (next(f for f in analysis.findings if f.rule == rule) for rule in ("rank_skew", "host_stall"))
    truth = 1 - step_time(program, MACHINE, without=frozenset({"late_ranks"}), num_ranks=2) / step_time(
        program, MACHINE, num_ranks=2
    )
    assert late.claim == pytest.approx(truth, abs=NEAR)
    assert stall.bound > 0.1
    assert stall.claim == pytest.approx(0.0, abs=NEAR)
    assert "once rank_skew is mended" in render_trace_page(analysis)


@pytest.mark.parametrize("recording_ns", [(1600.0, 6000.0), (6000.0, 1600.0)])
@pytest.mark.parametrize("profiled", [0.95, 0.6], ids=["events", "whole host"])
def test_causes_of_ranks_are_left_out_of_the_steps_that_their_replay_timed(
    recording_ns: tuple[float, float], profiled: float, tmp_path: Path
) -> None:
    """Recording an event costs each rank its own time: at the largest of them, all would be another step."""
    program = training(host=20.0, device=12.0, operations=80, buckets=4, network=300.0, extra=sleeps_on_one_rank)
    paths = write_traces(tmp_path, program, MACHINE, num_steps=6, num_ranks=2)
    graphs = [build_graph(link(read_trace(path))) for path in paths]
    graphs = [
        replace(graph, chain=graph.chain.having(recording_ns=most))
        for graph, most in zip(graphs, recording_ns, strict=True)
    ]
    ranks = dict(enumerate(graphs))
    replay = replay_ranks(ranks, profiled * max(graph.recorded_ns for graph in graphs))
    assert replay.host_slowdown is not None
    assert (replay.host_slowdown > 1) == (profiled < 0.9)
    again = with_ranks_together(structs.replace(replay, saved={}), ranks, [LATE_RANKS, DISPATCH], workers=False)
    assert again.together[LATE_RANKS] == pytest.approx(replay.saved[LATE_RANKS], abs=0.001)


def test_a_share_that_only_categories_bound_is_claimed_by_the_first(tmp_path: Path) -> None:
    """Layout conversions are element-wise kernels: those that are claimed already are not claimed again."""
    analysis = analysed(tmp_path, training(host=5.0, device=40.0, operations=60))
    evidence = Evidence(analysis=analysis.ranks[0])
    of_kernels = evidence.breakdown.removable_share(*COMPUTE)
    assert of_kernels > 0.5

    def finding(rule: str, bound: float) -> Finding:
        return Finding(rule=rule, severity="note", message="", advice="", strategies=(), bound=bound)

    first, second, third = claimed(
        [finding("single_precision", 0.4), finding("inefficient_compute", 1.0), finding("idle_tensor_cores", 0.3)],
        [evidence],
        SUBJECTS,
    )
    assert first.claim == pytest.approx(0.4)
    assert second.claim == pytest.approx(of_kernels - 0.4)
    assert third.claim == pytest.approx(0.0, abs=0.01)
    assert third.evidence["after"] == "single_precision, inefficient_compute"
    assert "after" not in claimed([third], [evidence], SUBJECTS)[0].evidence


def test_a_set_that_was_not_simulated_saves_at_most_what_a_larger_one_does() -> None:
    replay = Replay(
        recorded_ns=1,
        saved={"stalls": 0.2, "synchronisation": 0.3},
        together={"stalls+synchronisation": 0.35, "stalls+synchronisation+dispatch": 0.5},
    )
    assert saved_without(replay, frozenset()) == 0.0
    assert saved_without(replay, frozenset({"stalls"})) == 0.2
    assert saved_without(replay, frozenset({"synchronisation", "stalls"})) == 0.35
    assert saved_without(replay, frozenset({"dispatch", "stalls"})) == 0.5
    assert saved_without(replay, frozenset({"loader"})) is None

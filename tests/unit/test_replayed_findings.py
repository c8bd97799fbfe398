"""Findings state gains that are true, on a machine whose steps without the cause are known."""

import re
from pathlib import Path

import msgspec
import pytest
from counterfactuals.machine import Do, Machine, Program, step_time, write_traces
from counterfactuals.programs import Extra, training
from traces import needs_traces, trace_file

from steptune.dashboards.finding_gain import finding_gain
from steptune.dashboards.trace_info import get_findings_info
from steptune.dashboards.trace_page import render_trace_page
from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.profiling.gains import REPLAY_MARGIN
from steptune.tuner.profiling.replay.answers import saved_share
from steptune.tuner.records import Breakdown, Finding, Replay
from steptune.tuner.trace_records import TraceAnalysis

MACHINE = Machine(clocks=(0.0, 5000.0))
NEAR = 0.03
WARM_UP = 5
"""Steps of the machine that are not recorded."""


def reads_a_value(rank: int, step: int, place: int) -> list[Do]:
    return [Do(kind="read", cause="synchronisation", stays=1.0)] if place == 30 else []


def reads_and_pauses(rank: int, step: int, place: int) -> list[Do]:
    pause = [Do(kind="pause", host=4000.0, cause="stalls", stays=10.0)] if place == 60 else []
    return reads_a_value(rank, step, place) + pause


def late_in_turn(rank: int, step: int, place: int) -> list[Do]:
    return [Do(kind="pause", host=3000.0, cause="late_ranks", stays=10.0)] if place == 10 and rank == step % 2 else []


def found(folder: Path, program: Program, num_ranks: int = 1) -> tuple[TraceAnalysis, dict[str, Finding]]:
    paths = write_traces(folder, program, MACHINE, num_steps=6, num_ranks=num_ranks)
    unprofiled_ns = round(1000 * step_time(program, MACHINE, num_ranks=num_ranks))
    analysis = analyse_traces(paths, unprofiled_ns)
    return analysis, {finding.rule: finding for finding in analysis.findings}


def saved(program: Program, cause: str, num_ranks: int = 1) -> float:
    whole = step_time(program, MACHINE, num_ranks=num_ranks)
    return 1 - step_time(program, MACHINE, without=frozenset({cause}), num_ranks=num_ranks) / whole


@pytest.mark.parametrize("cause", ["synchronisation", "stalls"])
def test_a_synchronisation_that_costs_the_lead_is_found(cause: str, tmp_path: Path) -> None:
    """The device idles in the pause, but only because the host had no lead: without either the step is shorter."""
    program = training(host=10.0, device=60.0, operations=100, extra=reads_and_pauses)
    analysis, findings = found(tmp_path, program)
    finding = findings["synchronisation" if cause == "synchronisation" else "host_stall"]
    truth = saved(program, cause)
    assert truth > 0.2
    assert finding.bound - REPLAY_MARGIN == pytest.approx(truth, abs=NEAR)
    assert "replayed" in str(finding.evidence["saves"])
    assert (
        analysis.ranks[0].breakdowns[0].categories["synchronisation"]
        < 0.02 * analysis.ranks[0].breakdowns[0].step_time_ns
    )


def test_a_synchronisation_that_costs_nothing_is_not(tmp_path: Path) -> None:
    program = training(host=10.0, device=60.0, operations=100, extra=reads_a_value)
    assert saved(program, "synchronisation") < 0.02
    assert "synchronisation" not in found(tmp_path, program)[1]


def pauses(rank: int, step: int, place: int) -> list[Do]:
    return [Do(kind="pause", host=4000.0, cause="stalls", stays=10.0)] if place == 60 else []


def test_launches_beside_a_stall_cost_what_they_do_without_it(tmp_path: Path) -> None:
    """Launches without a cost would let the device work during the pause, which is not their doing."""
    program = training(host=25.0, device=20.0, operations=100, extra=pauses)
    _, findings = found(tmp_path, program)
    whole = step_time(program, MACHINE)
    unhindered = step_time(program, MACHINE, without=frozenset({"stalls"}))
    truth = (unhindered - step_time(program, MACHINE, without=frozenset({"stalls", "launches"}))) / whole
    alone = saved(program, "launches")
    assert alone > truth + 2 * NEAR
    launches = findings["launch_bound"]
    assert launches.evidence["expected"] == pytest.approx(truth, abs=NEAR)
    assert launches.bound - REPLAY_MARGIN == pytest.approx(alone, abs=NEAR)
    assert launches.severity == "note"
    assert next(iter(findings)) == "host_stall"


def test_what_ifs_are_replayed(tmp_path: Path) -> None:
    """Without its launches the step would only take what the device needs; a batch from the main process stays."""
    program = training(host=25.0, device=10.0, operations=100)
    analysis, findings = found(tmp_path, program)
    one = next(one for one in analysis.ranks[0].what_ifs if "graph" in one.scenario)
    truth = saved(program, "launches")
    assert one.replayed
    assert 1 - 1 / one.gain == pytest.approx(truth, abs=NEAR)
    assert findings["launch_bound"].bound - REPLAY_MARGIN == pytest.approx(truth, abs=NEAR)


def test_a_pause_is_no_launch_bound_step(tmp_path: Path) -> None:
    """The device waits for the host, but cheaper launches would gain next to nothing."""
    program = training(host=6.0, device=40.0, operations=100, extra=reads_and_pauses)
    truth = saved(program, "launches")
    _, findings = found(tmp_path, program)
    assert truth < 0.03 < findings["host_stall"].bound
    assert "launch_bound" not in findings or findings["launch_bound"].bound - REPLAY_MARGIN < truth + NEAR


def test_ranks_that_are_late_in_turn_are_found(tmp_path: Path) -> None:
    program = training(host=25.0, device=12.0, operations=80, buckets=4, network=300.0, extra=late_in_turn)
    _, findings = found(tmp_path, program, num_ranks=2)
    truth = saved(program, "late_ranks", num_ranks=2)
    assert truth > 0.1
    assert findings["rank_skew"].bound - REPLAY_MARGIN == pytest.approx(truth, abs=NEAR)


@needs_traces
def test_a_capture_that_cannot_be_replayed_gives_a_range() -> None:
    """Its authors left events out."""
    analysis = analyse_traces([trace_file("hta_job128_rank0")])
    (breakdown,) = analysis.ranks[0].breakdowns
    assert breakdown.replay is not None
    assert breakdown.replay.refusal
    ranges = [str(finding.evidence["saves"]) for finding in analysis.findings if "saves" in finding.evidence]
    assert ranges
    assert all(text.startswith("between 0 and ") and "recorded event explains" in text for text in ranges)


def test_records_of_older_versions_have_no_replay(tmp_path: Path) -> None:
    analysis, _ = found(tmp_path, training(host=10.0, device=20.0, operations=40))
    breakdown = analysis.ranks[0].breakdowns[0]
    stored = msgspec.to_builtins(breakdown)
    assert msgspec.convert(stored, Breakdown) == breakdown
    del stored["replay"]
    assert msgspec.convert(stored, Breakdown).replay is None


def one_pause_late(rank: int, step: int, place: int) -> list[Do]:
    return [Do(kind="pause", host=80_000.0, cause="stalls", stays=10.0)] if (step, place) == (WARM_UP + 15, 10) else []


def pauses_after_the_replayed_steps(rank: int, step: int, place: int) -> list[Do]:
    return [Do(kind="pause", host=30_000.0, cause="stalls", stays=10.0)] if step >= WARM_UP + 3 and place == 10 else []


def reads_after_the_replayed_steps(rank: int, step: int, place: int) -> list[Do]:
    return [Do(kind="read", cause="synchronisation", stays=1.0)] if step >= WARM_UP + 10 and place % 2 == 0 else []


@pytest.mark.parametrize(
    ("extra", "num_steps", "operations", "rule"),
    [
        (one_pause_late, 30, 60, "host_stall"),
        (pauses_after_the_replayed_steps, 7, 3500, "host_stall"),
        (reads_after_the_replayed_steps, 30, 60, "synchronisation"),
    ],
)
def test_a_cause_beyond_the_replayed_steps_gives_a_range(
    extra: Extra, num_steps: int, operations: int, rule: str, tmp_path: Path
) -> None:
    """Only first steps are simulated: that a cause costs nothing in them says nothing of the window."""
    program = training(host=10.0, device=12.0, operations=operations, extra=extra)
    analysis = analyse_traces(write_traces(tmp_path, program, MACHINE, num_steps=num_steps, num_ranks=1))
    replayed = analysis.ranks[0].breakdowns[0].replay
    assert replayed is not None
    assert "the other steps differ" in replayed.refusal
    finding = next(finding for finding in analysis.findings if finding.rule == rule)
    assert str(finding.evidence["saves"]).startswith("between 0 and ")


def test_first_steps_like_the_others_speak_for_all(tmp_path: Path) -> None:
    program = training(host=10.0, device=60.0, operations=100, extra=reads_and_pauses)
    paths = write_traces(tmp_path, program, MACHINE, num_steps=30, num_ranks=1)
    finding = next(finding for finding in analyse_traces(paths).findings if finding.rule == "host_stall")
    assert str(finding.evidence["saves"]).endswith("replayed")


def test_a_cause_that_the_replayed_steps_lack_is_not_stated_as_none() -> None:
    """The breakdown shows it, the graph does not: the gain is unknown, not nothing."""
    assert saved_share(Replay(recorded_ns=100, step_time_ns=100, saved={"launches": 0.0}), "stalls") is None


@needs_traces
def test_a_step_that_waits_for_its_loader_blames_no_launches() -> None:
    """Beside its batches and stalls, launching costs less than 3 % of it."""
    findings = analyse_traces([trace_file("kineto_resnet50_v100_workers0")]).findings
    assert findings[0].rule == "input_bound"
    launches = next(finding for finding in findings if finding.rule == "launch_bound")
    assert launches.severity == "note"
    assert launches.evidence["expected"] < 0.03


@needs_traces
def test_a_step_that_waits_for_its_loader_is_not_named_launch_bound() -> None:
    """Batches come first, and launching costs no more than it does beside them."""
    findings = analyse_traces([trace_file("h200_resnet18_input_bound_w0")]).findings
    rules = {finding.rule: finding for finding in findings}
    assert findings[0].rule == "input_bound"
    launches = rules["launch_bound"]
    assert launches.message.startswith("apart from stalls and waits, ")
    assert launches.severity == "note"
    assert launches.evidence["expected"] < rules["input_bound"].evidence["expected"]
    assert "once input_bound is mended" in finding_gain(launches)


@needs_traces
def test_a_step_that_waits_for_launches_is_named_launch_bound() -> None:
    findings = {f.rule: f for f in analyse_traces([trace_file("h200_swin_t_launch_bound")]).findings}
    assert findings["launch_bound"].message.startswith("launch-bound")
    assert findings["launch_bound"].severity == "high"


@needs_traces
def test_a_gain_that_was_not_replayed_is_shown_as_a_range_and_why() -> None:
    analysis = analyse_traces([trace_file("hta_cuda_event_sync_a100")])
    stall, launches, *_ = get_findings_info(analysis)
    assert stall.gain == "between none and 8.32×, not replayed: a single step shows no steady state"
    assert launches.gain == "between none and 1.10×, not replayed, as above"
    assert launches.message == "apart from stalls and waits, launches take at most 9% of the step"
    page = " ".join(render_trace_page(analysis).split())
    assert f"Could gain {stall.gain}." in page


def test_a_stall_belongs_to_the_step_that_the_host_is_in(tmp_path: Path) -> None:
    """The host is steps ahead of the device when it stalls: the device still works on earlier ones."""

    def every_fifth(rank: int, step: int, place: int) -> list[Do]:
        long = Do(kind="pause", host=19_000.0, cause="stalls", stays=10.0)
        return [long] if place == 50 and step % 5 == 0 else []

    program = training(host=12.0, device=30.0, operations=100, extra=every_fifth)
    paths = write_traces(tmp_path, program, MACHINE, num_steps=10, num_ranks=1)
    stall = next(finding for finding in analyse_traces(paths).findings if finding.rule == "host_stall")
    assert stall.evidence["steps"] == "1 and 6"


@needs_traces
def test_a_bound_beyond_the_stated_gain_says_where_it_comes_from() -> None:
    """Launching costs 10 % beside the loader; a CUDA graph would let the device work while batches are made."""
    findings = {f.rule: f for f in analyse_traces([trace_file("h200_resnet18_input_bound_w0")]).findings}
    text = finding_gain(findings["launch_bound"])
    assert text.startswith("at most 1.41× (10.0% of the step, replayed; 27.")


@needs_traces
@pytest.mark.parametrize("name", ["hta_ddp_a100_rank0of2_nccl_args", "h200_resnet18_input_bound_w0"])
def test_stated_gains_are_shown_before_bounds(name: str) -> None:
    """The headline names a wait of which several findings speak: only the first of them is brought to the front."""
    shown = get_findings_info(analyse_traces([trace_file(name)]))
    stated = ["of the step" in advice.gain for advice in shown]
    assert stated == sorted(stated, reverse=True)


def stalls_beside_launches(rank: int, step: int, place: int) -> list[Do]:
    return [Do(kind="pause", host=2500.0, cause="stalls", stays=10.0)] if place == 60 else []


def test_what_others_have_to_precede_is_not_shown_first(tmp_path: Path) -> None:
    """The host is what the step waits for, mostly for launches, but stalls have to go first."""
    analysis, findings = found(tmp_path, training(host=45.0, device=12.0, operations=100, extra=stalls_beside_launches))
    assert findings["launch_bound"].message.startswith("apart from stalls")
    assert get_findings_info(analysis)[0].message == findings["host_stall"].message


def test_a_replayed_gain_is_shown_with_what_it_saves(tmp_path: Path) -> None:
    analysis, _ = found(tmp_path, training(host=25.0, device=10.0, operations=100))
    (advice,) = [advice for advice in get_findings_info(analysis) if advice.message.startswith("launch-bound")]
    assert re.fullmatch(r"at most [\d.]+× \([\d.]+% of the step, replayed\)", advice.gain)


def late_after_the_replayed_steps(rank: int, step: int, place: int) -> list[Do]:
    late = rank == 1 and step >= WARM_UP + 10 and place == 10
    return [Do(kind="pause", host=3000.0, cause="late_ranks", stays=10.0)] if late else []


def test_a_rank_that_is_late_beyond_the_replayed_steps_is_found(tmp_path: Path) -> None:
    program = training(
        host=25.0, device=12.0, operations=80, buckets=4, network=300.0, extra=late_after_the_replayed_steps
    )
    analysis = analyse_traces(write_traces(tmp_path, program, MACHINE, num_steps=30, num_ranks=2))
    assert analysis.replay is not None
    assert "the other steps differ" in analysis.replay.refusal
    skew = next(finding for finding in analysis.findings if finding.rule == "rank_skew")
    assert str(skew.evidence["saves"]).startswith("between 0 and ")


def pauses_and_allocates(rank: int, step: int, place: int) -> list[Do]:
    """A stall that paces the step, and memory that is allocated, which hardly costs anything."""
    long = Do(kind="pause", host=3000.0, cause="stalls", stays=10.0)
    memory = Do(kind="allocate", host=200.0, cause="allocation")
    return {30: [long], 60: [memory]}.get(place, [])


def test_launches_set_aside_come_before_what_saves_less(tmp_path: Path) -> None:
    """They follow the stall for which they are set aside, not every small gain."""
    program = training(host=30.0, device=14.0, operations=100, extra=pauses_and_allocates)
    truths = {cause: saved(program, cause) for cause in ("stalls", "launches", "allocation")}
    assert truths["launches"] > 3 * truths["allocation"] > 0.06
    _, findings = found(tmp_path, program)
    assert "aside" in findings["launch_bound"].evidence
    assert list(findings)[:3] == ["host_stall", "launch_bound", "allocation"]


def two_are_late(rank: int, step: int, place: int) -> list[Do]:
    late = Do(kind="pause", host=3000.0, cause="late_ranks", stays=10.0)
    return [late] if place == 10 and rank in (1, 4) else []


def test_a_group_of_late_ranks_is_named(tmp_path: Path) -> None:
    program = training(host=12.0, device=12.0, operations=60, buckets=4, network=200.0, extra=two_are_late)
    skew = found(tmp_path, program, num_ranks=6)[1]["rank_skew"]
    assert skew.evidence["late_ranks"] == "1 and 4"
    assert "(1 and 4 are late)" in skew.message
    assert skew.evidence["expected"] == pytest.approx(saved(program, "late_ranks", num_ranks=6), abs=NEAR)


def pauses_in_every_third_step(rank: int, step: int, place: int) -> list[Do]:
    long = Do(kind="pause", host=2500.0, cause="stalls", stays=10.0)
    return [long] if place == 60 and step % 3 == 0 else []


def test_launches_that_cost_more_than_stalls_in_few_steps_come_first(tmp_path: Path) -> None:
    """Steps without a stall are launch-bound, too."""
    program = training(host=25.0, device=12.0, operations=100, extra=pauses_in_every_third_step)
    both = step_time(program, MACHINE, without=frozenset({"stalls", "launches"}))
    whole = step_time(program, MACHINE)
    launching = (step_time(program, MACHINE, without=frozenset({"stalls"})) - both) / whole
    assert launching > 1.2 * saved(program, "stalls") > 0.2
    _, findings = found(tmp_path, program)
    assert list(findings)[:2] == ["launch_bound", "host_stall"]
    assert findings["launch_bound"].evidence["expected"] == pytest.approx(launching, abs=NEAR)
    assert findings["launch_bound"].severity == "high"


@pytest.mark.parametrize(("host", "first"), [(45.0, "launch_bound"), (12.5, "rank_skew")])
def test_launches_come_before_late_ranks_where_they_cost_all_ranks_more(
    host: float, first: str, tmp_path: Path
) -> None:
    """In one rank's own steps a wait for another rank looks like a long collective, beside which launches cost
    nothing.
    """
    program = training(host=host, device=12.0, operations=80, buckets=4, network=100.0, extra=late_in_turn)
    punctual = frozenset({"late_ranks"})
    left = [step_time(program, MACHINE, without=gone, num_ranks=2) for gone in (punctual, punctual | {"launches"})]
    truths = {
        "launch_bound": (left[0] - left[1]) / step_time(program, MACHINE, num_ranks=2),
        "rank_skew": saved(program, "late_ranks", num_ranks=2),
    }
    assert max(truths, key=lambda rule: truths[rule]) == first
    analysis, findings = found(tmp_path, program, num_ranks=2)
    assert analysis.findings[0].rule == first
    for rule, truth in truths.items():
        if rule in findings or truth > NEAR:
            assert findings[rule].evidence["expected"] == pytest.approx(truth, abs=NEAR)


def test_small_costs_of_launches_are_told(tmp_path: Path) -> None:
    """The device sets the pace; a CUDA graph would save the moments between its operations."""
    program = training(host=16.0, device=19.0, operations=120)
    truth = saved(program, "launches")
    assert 0.02 < truth < 0.03 + 0.005
    assert found(tmp_path, program)[1]["launch_bound"].evidence["expected"] == pytest.approx(truth, abs=0.01)


def forty_gaps(rank: int, step: int, place: int) -> list[Do]:
    return [Do(kind="pause", host=40 * 60.0, cause="stalls", stays=60.0)] if place in (20, 70) else []


def test_a_stall_of_forty_gaps_is_no_dispatch(tmp_path: Path) -> None:
    """On a slow host that is 2.4 ms: no operator takes so long to be dispatched."""
    program = training(host=57.0, device=12.0, operations=100, extra=forty_gaps)
    truth = saved(program, "stalls")
    assert truth > 0.3
    stall = found(tmp_path, program)[1]["host_stall"]
    assert stall.evidence["expected"] == pytest.approx(truth, abs=NEAR)


@pytest.mark.parametrize("every", [3, 10])
def test_a_stall_in_few_steps_costs_its_mean_share(every: int, tmp_path: Path) -> None:
    """A pause of three quarters of a step, in one of many steps, is a part of all of them."""

    def rarely(rank: int, step: int, place: int) -> list[Do]:
        long = Do(kind="pause", host=20_000.0, cause="stalls", stays=10.0)
        return [long] if place == 50 and (step - WARM_UP) % every == 1 else []

    program = training(host=25.0, device=12.0, operations=100, extra=rarely)
    truth = saved(program, "stalls")
    paths = write_traces(tmp_path, program, MACHINE, num_steps=10, num_ranks=1)
    findings = analyse_traces(paths, round(1000 * step_time(program, MACHINE))).findings
    stall = next(finding for finding in findings if finding.rule == "host_stall")
    assert stall.evidence["expected"] == pytest.approx(truth, abs=0.1)
    assert 0 <= stall.bound - REPLAY_MARGIN - stall.evidence["expected"] + 1e-3 < 0.01  # beside what is left open
    assert findings[0] == stall

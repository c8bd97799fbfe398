"""The recorded steps, simulated on their graph: unchanged they take what was recorded, without a cause what is true."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from counterfactuals.machine import Do, Machine, step_time, write_traces
from counterfactuals.programs import Pair, pairs, training
from trace_events import Event, copy, event, kernel, launched, operator, runtime, step, trace_of, write_trace
from traces import NAMES, needs_traces, trace_file

from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.replay.answers import LATE_RANKS, NO_LAUNCHES, SYNCHRONISATION, replay, replay_ranks
from steptune.tuner.profiling.replay.calibration import ALL, USUAL, at_level, cost_at, levels
from steptune.tuner.profiling.replay.chain import SYNC
from steptune.tuner.profiling.replay.graph import Graph, build_graph
from steptune.tuner.profiling.replay.scenarios import stalls, without_synchronisation
from steptune.tuner.profiling.replay.simulate import simulate, step_time_ns

CAPTURES = sorted((Path(__file__).parents[1] / "captures").glob("*.json.gz"))
SAMPLED = ("hta_job128_rank0", "hta_job128_rank1")
"""Their authors left events out."""
TOLERANCE = 0.05
"""Points of the step that an answer may miss the truth by, as shares."""
HIDDEN = {"host: 1 workers 1.6", "host: 6 workers 9.0", "even: 6 workers 9.0"}
"""A host that the profiler slows hardly waits for workers, or once in a window: the trace does not show their pace."""
SAMPLE = 3
"""One in so many pairs: `benchmarks/replay.py` asks all of them."""


def graph_of(path: Path) -> Graph:
    graph = build_graph(link(read_trace(path)))
    assert graph is not None
    return graph


@cache
def every_pair() -> dict[str, Pair]:
    return {pair.name + pair.cause: pair for pair in pairs("development")}


@needs_traces
@pytest.mark.parametrize("name", sorted(set(NAMES) - {*SAMPLED, "hta_cuda_event_sync_a100"}))
def test_real_steps_take_what_was_recorded(name: str) -> None:
    graph = graph_of(trace_file(name))
    assert step_time_ns(graph, usual_delays=True) == pytest.approx(graph.recorded_ns, rel=0.02)
    assert step_time_ns(graph) == pytest.approx(graph.recorded_ns, rel=0.02)


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_captured_steps_take_what_was_recorded(path: Path) -> None:
    graph = graph_of(path)
    assert step_time_ns(graph, usual_delays=True) == pytest.approx(graph.recorded_ns, rel=0.02)


@needs_traces
@pytest.mark.parametrize("name", SAMPLED)
def test_steps_with_events_left_out_are_refused(name: str) -> None:
    said = replay(graph_of(trace_file(name)))
    assert "no recorded event explains why" in said.refusal
    assert said.step_time_ns is None
    assert said.saved == {}


@pytest.mark.parametrize("name", [name for name in every_pair() if name.removesuffix("loader") not in HIDDEN][::SAMPLE])
def test_answers_are_true(name: str, tmp_path: Path) -> None:
    """Answers for a machine whose steps without the cause are known."""
    pair = every_pair()[name]
    options = {"num_ranks": pair.num_ranks, "seed": pair.seed}
    before = step_time(pair.program, pair.machine, **options)
    after = step_time(pair.program, pair.machine, without=frozenset({pair.cause}), **options)
    graphs = [
        graph_of(path)
        for path in write_traces(tmp_path, pair.program, pair.machine, num_steps=pair.num_steps, **options)
    ]
    if pair.cause == LATE_RANKS:
        said = replay_ranks(dict(enumerate(graphs)), 1000 * before)
    else:
        said = replay(graphs[0], 1000 * before, workers=bool(pair.machine.workers))
    assert said.refusal == ""
    assert said.saved.get(pair.cause, 0.0) == pytest.approx(1 - after / before, abs=TOLERANCE)


def test_a_synchronisation_costs_the_lead_that_it_takes(tmp_path: Path) -> None:
    """The device never idles in the call itself: it does so later, while the host catches up."""
    lead = training(
        host=15.0,
        device=18.0,
        operations=100,
        extra=lambda rank, number, place: [Do(kind="read", cause="synchronisation")] if place == 101 else [],
    )
    machine = Machine(noise=0.0, event_cost=0.0, kernel_cost=0.0)
    (path,) = write_traces(tmp_path, lead, machine, num_steps=5)
    truth = 1 - step_time(lead, machine, without=frozenset({"synchronisation"})) / step_time(lead, machine)
    assert replay(graph_of(path)).saved[SYNCHRONISATION] == pytest.approx(truth, abs=0.005)


@pytest.mark.parametrize("cost_us", [1.3, 4.7])
def test_the_profilers_cost_is_found(cost_us: float, tmp_path: Path) -> None:
    """Hosts differ: 0.7 to 5.2 us were seen."""
    program = training(host=20.0, device=4.0, operations=100)
    machine = Machine(noise=0.0, event_cost=cost_us, kernel_cost=0.0)
    (path,) = write_traces(tmp_path, program, machine, num_steps=4)
    graph, unprofiled_ns = graph_of(path), 1000 * step_time(program, machine)
    found = levels(lambda level: step_time_ns(at_level(graph, level)), unprofiled_ns)
    assert step_time_ns(at_level(graph, found.taken)) == pytest.approx(unprofiled_ns, rel=0.02)
    cost = cost_at(graph, found.taken)
    assert cost.event_ns == pytest.approx(1000 * cost_us, abs=300)
    assert cost.slowdown == 1


def test_events_cost_no_more_than_an_operator_that_holds_another_one_shows(tmp_path: Path) -> None:
    """Where the host took twice as long, but events are cheap, all that it did was slower."""
    program = training(host=20.0, device=4.0, operations=100)
    machine = Machine(noise=0.0, event_cost=0.5, kernel_cost=0.0)
    (path,) = write_traces(tmp_path, program, machine, num_steps=4)
    graph, unprofiled_ns = graph_of(path), 500 * step_time(program, machine)
    found = levels(lambda level: step_time_ns(at_level(graph, level)), unprofiled_ns)
    assert step_time_ns(at_level(graph, found.taken)) == pytest.approx(unprofiled_ns, rel=0.02)
    cost = cost_at(graph, found.taken)
    assert cost.event_ns == pytest.approx(2 * 1200, abs=10)  # 0.7 us of its own, and the cost of recording
    assert 1.2 < cost.slowdown < 2.0


def test_a_sleep_is_no_slower_under_the_profiler(tmp_path: Path) -> None:
    pause = training(
        host=20.0,
        device=4.0,
        operations=100,
        extra=lambda rank, number, place: [Do(kind="pause", host=3000.0, cause="stalls")] if place == 50 else [],
    )
    (path,) = write_traces(tmp_path, pause, Machine(noise=0.0, event_cost=0.5), num_steps=4)
    graph = graph_of(path)
    longest = int(graph.chain.gap.argmax())
    slower = at_level(graph, ALL)
    assert slower.chain.gap[longest] == pytest.approx(graph.chain.gap[longest], rel=0.01)
    assert np.median(slower.chain.gap) < 0.4 * np.median(graph.chain.gap)


def test_all_costs_agree_where_the_device_sets_the_pace(tmp_path: Path) -> None:
    program = training(host=12.0, device=60.0, operations=100)
    (path,) = write_traces(tmp_path, program, Machine(noise=0.0, kernel_cost=0.0), num_steps=4)
    graph = graph_of(path)
    found = levels(lambda level: step_time_ns(at_level(graph, level)), graph.recorded_ns)
    assert (found.least, found.taken, found.largest) == (0.0, USUAL, ALL)


def test_an_answer_says_how_far_the_profilers_cost_leaves_it_open(tmp_path: Path) -> None:
    """A host that is hardly faster than the device: a synchronisation costs what its pace afterwards makes of it."""
    program = training(
        host=15.0,
        device=18.0,
        operations=100,
        extra=lambda rank, number, place: [Do(kind="read", cause="synchronisation")] if place == 101 else [],
    )
    machine = Machine(noise=0.0, kernel_cost=0.0)
    (path,) = write_traces(tmp_path, program, machine, num_steps=5)
    said = replay(graph_of(path), 1000 * step_time(program, machine))
    assert said.uncertain[SYNCHRONISATION] > 0.001
    truth = 1 - step_time(program, machine, without=frozenset({"synchronisation"})) / step_time(program, machine)
    assert abs(said.saved[SYNCHRONISATION] - truth) <= said.uncertain[SYNCHRONISATION] + 0.005
    assert not replay(graph_of(path)).uncertain  # of the recorded steps themselves nothing is open


def test_a_call_that_sets_memory_never_waits(tmp_path: Path) -> None:
    """However long it takes: nothing of the host's is copied."""
    waits = {}
    for call in ("cudaMemsetAsync", "cudaMemcpyAsync"):
        events: list[Event] = []
        for number in range(3):
            begin = 1000 * number
            events += [
                step(number, begin, begin + 1000),
                *launched("gemm", begin + 100, begin + 110, begin + 130, 1 + number),
            ]
            events += [
                runtime(call, begin + 300, begin + 330, 11 + number),
                kernel("set", begin + 310, begin + 315, 11 + number),
            ]
        waits[call] = len(graph_of(write_trace(tmp_path / "trace.json", events)).chain.waits)
    assert waits == {"cudaMemsetAsync": 0, "cudaMemcpyAsync": 3}


def test_the_host_part_of_an_optimizer_is_no_stall(tmp_path: Path) -> None:
    """Outside it, the same silence is a stall."""
    found = {}
    for name in ("Optimizer.step#AdamW.step", "evaluate"):
        events: list[Event] = []
        for number in range(3):
            begin = 5000 * number
            events += [step(number, begin, begin + 5000), event("user_annotation", name, begin + 980, begin + 4450)]
            for place, at in enumerate((*range(100, 1000, 100), 4500)):
                events += launched("gemm", begin + at, begin + at + 10, begin + at + 30, 20 * number + place + 1)
        found[name] = len(stalls(graph_of(write_trace(tmp_path / "trace.json", events)).chain))
    assert found == {"Optimizer.step#AdamW.step": 0, "evaluate": 3}


def test_no_answer_is_longer_than_the_steps_are(tmp_path: Path) -> None:
    """Taking something away never makes the simulated steps longer."""
    for pair in list(every_pair().values())[:12]:
        (path,) = write_traces(tmp_path, pair.program, pair.machine, num_steps=3, seed=pair.seed)
        graph = graph_of(path)
        assert step_time_ns(without_synchronisation(graph)) <= step_time_ns(graph) * (1 + 1e-9)
        shorter = replace(graph, operations=replace(graph.operations, duration=0.7 * graph.operations.duration))
        assert step_time_ns(shorter) <= step_time_ns(graph) * (1 + 1e-9)


def test_work_that_was_launched_before_the_window_delays_the_first_operation(tmp_path: Path) -> None:
    """Else its delay would look like the latency of its launch, in every simulated pass again."""
    events = [
        kernel("earlier", -500, 900, 90),
        step(1, 0, 500),
        *launched("gemm", 10, 901, 1301, 1),
        step(2, 500, 1000),
        *launched("gemm", 510, 1302, 1702, 2),
    ]
    graph = build_graph(link(trace_of(tmp_path, events)))
    assert graph is not None
    assert graph.operations.latency.max() < 20_000
    assert step_time_ns(graph) == pytest.approx(501_000, rel=0.01)


def test_one_step_shows_no_steady_state(tmp_path: Path) -> None:
    events = [step(1, 0, 500), *launched("gemm", 10, 20, 400, 1), *launched("gemm", 40, 401, 480, 2)]
    graph = build_graph(link(trace_of(tmp_path, events)))
    assert graph is not None
    assert "single step" in replay(graph).refusal


def test_a_stream_that_waits_follows_the_last_operation_of_the_other(tmp_path: Path) -> None:
    """The copy on stream 99 is what the kernel waits for: twice as long a copy delays it."""
    events: list[Event] = []
    for number in range(3):
        at = 1000 * number
        events += [
            step(number, at, at + 1000),
            runtime("cudaMemcpyAsync", at + 10, at + 14, 10 * number + 1),
            copy("Memcpy HtoD (Pinned -> Device)", at + 20, at + 420, 10 * number + 1),
            runtime("cudaStreamWaitEvent", at + 20, at + 21),
            *launched("gemm", at + 25, at + 421, at + 700, 10 * number + 2),
            operator("aten::mm", at + 24, at + 30),
        ]
    graph = build_graph(link(trace_of(tmp_path, events)))
    assert graph is not None
    kernels = np.flatnonzero(graph.operations.stream != graph.operations.stream[0])
    assert {graph.operations.depends[number] for number in kernels.tolist()} == {(0,), (2,), (4,)}


def test_a_pageable_copy_keeps_the_host(tmp_path: Path) -> None:
    events: list[Event] = []
    for number in range(3):
        at = 1000 * number
        events += [
            step(number, at, at + 1000),
            *launched("gemm", at + 1, at + 10, at + 390, 10 * number + 1),
            event("cuda_runtime", "cudaMemcpyAsync", at + 10, at + 410, correlation=10 * number + 2),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", at + 392, at + 405, 1007, device=0, stream=7)
            | {"args": {"device": 0, "stream": 7, "correlation": 10 * number + 2, "bytes": 4}},
            *launched("gemm", at + 500, at + 510, at + 900, 10 * number + 3),
        ]
    graph = build_graph(link(trace_of(tmp_path, events)))
    assert graph is not None
    assert sorted(graph.chain.waits) == [1, 4, 7]
    assert not (graph.chain.kind == SYNC).any()
    assert replay(graph).saved["copies"] > 0.1


def test_ranks_with_different_collectives_are_refused(tmp_path: Path) -> None:
    program = training(host=15.0, device=18.0, operations=40, buckets=2, network=300.0)
    paths = write_traces(tmp_path, program, Machine(), num_steps=4, num_ranks=2)
    alone = training(host=15.0, device=18.0, operations=40)
    (other,) = write_traces(tmp_path / "..", alone, Machine(), num_steps=4)
    said = replay_ranks({0: graph_of(paths[0]), 1: graph_of(other)})
    assert "different numbers of steps or collectives" in said.refusal


def test_synchronisations_alone_are_refused_and_lose_nothing_else(tmp_path: Path) -> None:
    """The device records each of them, but launches no operation that could be replayed."""
    events = [step(number, 100 * number, 100 * number + 95) for number in range(1, 4)]
    for number in range(1, 4):
        start = 100 * number + 20
        events.append(runtime("cudaStreamSynchronize", start, start + 20, number))
        events.append(
            event("cuda_sync", "Stream Sync", start, start + 20, 1007, correlation=number, device=0, stream=7)
        )
        events.append(kernel("k", start + 30, start + 40))
    analysis = analyse_traces([write_trace(tmp_path / "trace.json", events)])
    (breakdown,) = analysis.ranks[0].breakdowns
    assert breakdown.device == "cuda:0"
    assert breakdown.replay is not None
    assert breakdown.replay.refusal == NO_LAUNCHES


def test_a_synchronisation_that_the_device_records_is_no_launch(tmp_path: Path) -> None:
    """Without it the host keeps its lead: the same steps as without the device's record."""
    events: list[Event] = []
    for number in range(1, 4):
        start = 1000 * number
        events.append(step(number, start, start + 990))
        for place in range(4):
            begin = start + 10 + 20 * place
            events += launched("k", begin, start + 15 + 150 * place, start + 165 + 150 * place, 10 * number + place)
        events.append(runtime("cudaStreamSynchronize", start + 100, start + 620, 10 * number + 9))
    recorded = [
        event(
            "cuda_sync", "Stream Sync", 1000 * n + 100, 1000 * n + 620, 1007, correlation=10 * n + 9, device=0, stream=7
        )
        for n in range(1, 4)
    ]
    plain = graph_of(write_trace(tmp_path / "plain.json", events))
    with_records = graph_of(write_trace(tmp_path / "records.json", events + recorded))
    assert (with_records.chain.kind == plain.chain.kind).all()
    assert with_records.chain.waits == plain.chain.waits
    assert (plain.chain.kind == SYNC).sum() == 3


@pytest.mark.parametrize(
    "name", ["host: read earlysynchronisation", "even: 2 workers 1.5loader", "device: readssynchronisation"]
)
def test_steps_that_end_early_take_what_all_passes_take(name: str, tmp_path: Path) -> None:
    """Ranks that meet run all passes, as they have to be in step."""
    pair = every_pair()[name]
    [path] = write_traces(tmp_path, pair.program, pair.machine, num_steps=pair.num_steps, seed=pair.seed)
    graph = graph_of(path)
    run = simulate(graph, [0] * len(graph.operations))
    with pytest.raises(StopIteration) as done:
        next(run)
    assert step_time_ns(graph) == pytest.approx(done.value.value, rel=1e-6)

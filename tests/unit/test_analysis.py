"""The analysis of one trace and of the traces of several ranks, from files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from trace_events import Event, event, launched, operator, runtime, step, write_trace
from traces import NAMES, needs_traces, trace_file

from steptune.tuner.profiling import analysis as analysis_module
from steptune.tuner.profiling.analysis import analyse_file, analyse_rank, analyse_traces, together
from steptune.tuner.profiling.breakdown import TOP_OPERATORS
from steptune.tuner.profiling.trace import TraceError
from steptune.tuner.trace_records import RankAnalysis, TraceAnalysis


def world(rank: int | None, size: int = 2) -> dict:
    return {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": size}}


def rank_events(arrives: float, ends: float) -> list[Event]:
    """A step of 100 us with a product and an all-reduce of 1000 floats between two ranks."""
    said = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float", "Group size": 2}
    said["Process Group Name"] = "0"
    link = {"External id": 5}
    return [
        step(1, 0, 100),
        operator("aten::mm", 0, 3),
        *launched("nvjet_sm90", 1, 5, 20, 1),
        event("cpu_op", "record_param_comms", 10, 14, **said, **link),
        runtime("cudaLaunchKernelExC", 11, 12, 2),
        event("kernel", "ncclDevKernel_AllReduce", arrives, ends, 20, correlation=2, device=0, stream=20, **link),
    ]


def test_one_trace_needs_no_rank_and_is_not_compared(tmp_path):
    analysis = analyse_traces([write_trace(tmp_path / "a.json", rank_events(30, 50))])
    (rank,) = analysis.ranks
    assert (rank.rank, rank.num_ranks, rank.file) == (0, 1, str(tmp_path / "a.json"))
    assert (analysis.waits, analysis.clock_offsets_ns, analysis.notes) == ((), {}, ())
    assert analysis.collectives == rank.collectives
    assert rank.breakdowns[0].categories["communication"] == 20_000
    assert [k.name for k in rank.kernels] == ["ncclDevKernel_AllReduce", "nvjet_sm90"]
    assert rank.tensor_core_share == 1.0
    assert set(rank.gaps) == set(rank.queues) == {"cuda:0"}


def test_ranks_are_compared_whatever_the_order_of_their_files(tmp_path):
    """Rank 1 arrives 20 us after rank 0. Its times are 7 us less, but their base is 5 us later."""
    base = 1_790_857_026_000_000_000
    files = [
        write_trace(tmp_path / "late.json", rank_events(43, 53), **world(1), baseTimeNanoseconds=base + 5_000),
        write_trace(tmp_path / "first.json", rank_events(30, 60), **world(0), baseTimeNanoseconds=base),
    ]
    for event_list in (files, files[::-1]):
        analysis = analyse_traces(event_list)
        assert [rank.rank for rank in analysis.ranks] == [0, 1]
        assert [rank.breakdowns[0].rank for rank in analysis.ranks] == [0, 1]
        assert analysis.clock_offsets_ns == {0: 0, 1: 2_000}
        assert [(wait.rank, wait.wait_ns) for wait in analysis.waits] == [(0, 20_000), (1, 0)]
        (stats,) = analysis.collectives
        assert (stats.latency_ns, stats.skew_ns, stats.message_bytes) == (10_000, 20_000, 4_000)


def test_a_rank_that_comes_late_is_named_before_what_its_peers_compute(tmp_path):
    """Half of each step is element-wise work; for a fifth of its step rank 0 waits for rank 1."""
    files = [(0, 30, 50), (1, 45, 50)]
    work = launched("vectorized_elementwise_kernel", 14, 51, 99, 7)
    results = [
        analyse_file(write_trace(tmp_path / f"{rank}.json", [*rank_events(a, b), *work], **world(rank)), None, 5)
        for rank, a, b in files
    ]
    found = together(results).findings
    assert found[0].rule == "rank_skew"
    assert any(finding.rule == "unfused" and finding.bound > found[0].bound for finding in found)
    assert len({finding.rule for finding in found}) == len(found), "each rule once"


def test_traces_that_do_not_say_their_rank_are_numbered_in_order(tmp_path):
    files = [
        write_trace(tmp_path / "x.json", rank_events(30, 50)),
        write_trace(tmp_path / "y.json", rank_events(30, 50), **world(0)),
    ]
    analysis = analyse_traces(files)
    assert [(rank.rank, rank.file) for rank in analysis.ranks] == [(0, str(files[1])), (1, str(files[0]))]
    assert analysis.ranks[1].breakdowns[0].rank == 1
    assert analysis.notes[0] == f"{files[0]} does not record its rank: it is treated as rank 1"


def test_missing_ranks_are_named(tmp_path):
    files = [write_trace(tmp_path / f"{rank}.json", rank_events(30, 50), **world(rank, 8)) for rank in (3, 5)]
    analysis = analyse_traces(files)
    assert [rank.rank for rank in analysis.ranks] == [3, 5]
    assert analysis.notes[0].startswith("traces of only 2 of 8 ranks were given")


def test_one_rank_twice_is_an_error_that_names_both_files(tmp_path):
    files = [write_trace(tmp_path / f"{name}.json", rank_events(30, 50), **world(1)) for name in "ab"]
    with pytest.raises(TraceError, match=r"rank 1 appears in two traces, .*a\.json and .*b\.json: give one trace per"):
        analyse_traces(files)


def test_ranks_of_different_runs_are_an_error(tmp_path):
    files = [write_trace(tmp_path / f"{n}.json", rank_events(30, 50), **world(n, 2 + n)) for n in (0, 1)]
    with pytest.raises(TraceError, match=r"different runs .*2 ranks.*3 ranks.*: analyse each run separately"):
        analyse_traces(files)


def test_no_files_are_an_error():
    with pytest.raises(TraceError, match="give at least one file"):
        analyse_traces([])


def test_a_bad_file_among_several_is_named_across_processes(tmp_path):
    good = write_trace(tmp_path / "good.json", rank_events(30, 50), **world(0))
    bad = tmp_path / "bad.json"
    bad.write_text("")
    with pytest.raises(TraceError, match=r"bad\.json: the file is empty"):
        analyse_traces([good, bad])


def test_a_script_without_a_main_guard_analyses_several_traces(tmp_path):
    files = [write_trace(tmp_path / f"{n}.json", rank_events(30, 50), **world(n)) for n in (0, 1)]
    script = tmp_path / "look.py"
    script.write_text(
        "import pathlib, steptune\n"
        f"found = steptune.analyse_traces([pathlib.Path(name) for name in {[str(file) for file in files]}])\n"
        "print(len(found.ranks))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.stderr) == ("2\n", "")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL, probably for lack of memory"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"killed by SIGSEGV$"),
        ("raise SystemExit('no such module')", "exited with status 1: no such module"),
    ],
)
def test_a_process_that_dies_is_told_from_one_that_lacks_memory(tmp_path, monkeypatch, program, said):
    files = [write_trace(tmp_path / f"{n}.json", rank_events(30, 50), **world(n)) for n in (0, 1)]
    monkeypatch.setattr(analysis_module, "_APART", program)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(TraceError, match=said):
        analyse_traces(files)


def test_the_variation_of_steps_is_that_of_a_sample(tmp_path):
    """Steps of 10, 20 and 30 us: mean 20, standard deviation 10 with n - 1."""
    path = write_trace(tmp_path / "a.json", [step(1, 0, 10), step(2, 10, 30), step(3, 30, 60)])
    assert analyse_rank(path).step_time_cv == pytest.approx(0.5)


def test_one_step_has_no_variation(tmp_path):
    assert analyse_rank(write_trace(tmp_path / "a.json", [step(1, 0, 10)])).step_time_cv is None


def test_the_unprofiled_step_reaches_the_breakdown(tmp_path):
    path = write_trace(tmp_path / "a.json", rank_events(30, 50))
    breakdown = analyse_rank(path, unprofiled_step_time_ns=80_000).breakdowns[0]
    assert sum(breakdown.rescaled.values()) == 80_000


def test_a_trace_of_a_cpu_has_everything_but_a_device(tmp_path):
    events = [
        step(1, 0, 100),
        event("cpu_op", "aten::mm", 10, 60, **{"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]}),
    ]
    analysis = analyse_rank(write_trace(tmp_path / "a.json", events))
    assert (analysis.gaps, analysis.queues, analysis.kernels, analysis.device_names) == ({}, {}, (), {})
    assert analysis.breakdowns[0].device == "cpu"
    (stats,) = analysis.operators
    assert (stats.device_ns, stats.flops) == (50_000, 1024)


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_real_traces_are_analysed_as_plain_data(name):
    """Contents of an analysis survive being stored, and the list of everything stays small."""
    path: Path = trace_file(name)
    analysis = analyse_rank(path, top=10)
    text = msgspec.json.encode(analysis)
    assert msgspec.json.decode(text, type=RankAnalysis) == analysis
    assert len(analysis.kernels) <= 10
    assert len(analysis.operators) <= 20
    assert all(len(stats.longest) <= 10 for stats in analysis.gaps.values())
    assert sum(k.total_ns for k in analysis.kernels) > 0


@needs_traces
def test_two_real_ranks_survive_being_stored():
    files = [trace_file(f"h200_vit_b_ddp2_split0_rank{rank}") for rank in (0, 1)]
    analysis = analyse_traces(files)
    assert [rank.rank for rank in analysis.ranks] == [0, 1]
    assert [list(rank.device_names) for rank in analysis.ranks] == [["cuda:0"], ["cuda:1"]]
    assert {rank.device_names[f"cuda:{rank.rank}"] for rank in analysis.ranks} == {"NVIDIA H200"}
    assert msgspec.json.decode(msgspec.json.encode(analysis), type=TraceAnalysis) == analysis
    assert json.loads(msgspec.json.encode(analysis))["clock_offsets_ns"]["0"] == 0


def test_short_kernels_of_ones_own_are_named_where_a_graph_replays_the_step(tmp_path):
    """Such a step records no operator: without the names of its kernels, a fused kernel that ran would look unused."""
    own = ["fcos3d_targets", "simota_choices", "_layer_norm_fwd_fused", "void mine::Scan<float>(float*, int)"]
    longer = [f"void at::native::elementwise_kernel<{number}>" for number in range(TOP_OPERATORS)]
    libraries = [
        "triton_poi_fused_add_0",
        "sm90_xmma_gemm_bf16",
        "nvjet_tst_128x64",
        "void at::native::short_kernel<1>",
    ]
    events = [step(1, 0, 10_000), runtime("cudaGraphLaunch", 1, 3, 1)]
    for number, name in enumerate([*longer, *libraries, *own]):
        start, length = 10 + 100 * number, 50 if name in longer else 1
        events.append(event("kernel", name, start, start + length, 20, correlation=1, device=0, stream=20))
    names = analyse_rank(write_trace(tmp_path / "a.json", events)).breakdowns[0].operators
    assert set(own) <= set(names)
    assert set(libraries).isdisjoint(names)

"""`analyze` as a user runs it: on a file, on ranks, on two runs, and on what is no trace."""

import gzip
import json
from pathlib import Path

import pytest
from analysed import loop_events, write_loop
from command import CONTROL
from trace_events import operator, step, write_trace
from traces import NAMES, needs_traces, trace_file


def order(text, *parts):
    """Asserts that these parts appear in this order."""
    places = [text.index(part) for part in parts]
    assert places == sorted(places), dict(zip(parts, places, strict=True))


def test_the_first_screen_says_what_limits_the_step_and_then_what_it_rests_on(steptune):
    write_loop(steptune.folder / "trace.json")
    ended = steptune("analyze", "trace.json")
    order(
        ended.out,
        "capture  good: ",
        "limited by input: the device waits",
        "gain: at most",
        "step breakdown",
        "compute by phase: ",
        "Gaps on cuda:0",
        "Kernels",
        "Operators",
        "3 steps of",
    )
    assert not CONTROL.search(ended.out)
    assert all(len(line) <= 80 for line in ended.out.splitlines())
    assert not ended.err


def test_json_is_the_whole_analysis(inside):
    write_loop(Path("trace.json"))
    [rank] = inside("analyze", "trace.json", "--json").json["ranks"]
    [breakdown] = rank["breakdowns"]
    assert sum(breakdown["categories"].values()) == breakdown["step_time_ns"] == 3_000_000
    assert breakdown["categories"]["data_wait"] == pytest.approx(3 * 400_000, rel=0.05)
    [timeline] = rank["timelines"]
    assert timeline["end_ns"][-1] == breakdown["step_time_ns"]


def test_the_step_without_the_profiler_rescales_the_breakdown(inside):
    write_loop(Path("trace.json"))
    out = inside("analyze", "trace.json", "--unprofiled-step-ms", "0.9", "--json").json
    [breakdown] = out["ranks"][0]["breakdowns"]
    assert sum(breakdown["rescaled"].values()) == 900_000
    assert "1.11 times as long" in inside("analyze", "trace.json", "--unprofiled-step-ms", "0.9").out


def test_top_bounds_every_list(inside):
    write_loop(Path("trace.json"))
    [rank] = inside("analyze", "trace.json", "--top", "1", "--json").json["ranks"]
    assert len(rank["kernels"]) == len(rank["operators"]) == 1
    assert len(rank["gaps"]["cuda:0"]["longest"]) == 1


def test_page_and_tracks_are_written_and_named(inside):
    write_loop(Path("trace.json"))
    ended = inside("analyze", "trace.json", "--html", "page.html", "--perfetto", "tracks.json.gz")
    assert "page.html" in ended.err
    assert "ui.perfetto.dev" in ended.err
    assert "limited by input" in Path("page.html").read_text()
    events = json.loads(gzip.decompress(Path("tracks.json.gz").read_bytes()))["traceEvents"]
    assert len(events) > len(loop_events())


def test_ranks_are_found_in_a_folder_and_by_a_pattern(inside):
    folder = Path("run")
    folder.mkdir()
    for rank in range(2):
        write_loop(folder / f"rank{rank}.json", rank=rank)
    (folder / "metrics.json").write_text('{"loss": 1}')
    expected = [0, 1]
    for names in (["run"], ["run/rank*.json"], ["run/rank1.json", "run/rank0.json"], ["run", "run/rank0.json"]):
        assert [rank["rank"] for rank in inside("analyze", *names, "--json").json["ranks"]] == expected
    out = inside("analyze", "run").out
    order(out, "2 ranks", "step breakdown", "Ranks", "Gaps on cuda:0 of rank")


def test_two_runs_are_compared_with_what_explains_the_difference(inside):
    write_loop(Path("slow.json"), wait_us=400)
    write_loop(Path("fast.json"), wait_us=100)
    out = inside("analyze", "slow.json", "--compare", "fast.json").out
    order(out, "as fast", "from slow.json (3 steps)", "to   fast.json", "waiting for data", "Gaps, by cause")
    both = inside("analyze", "slow.json", "--compare", "fast.json", "--json", "--html", "page.html").json
    changes = {d["name"]: d for d in both["comparison"]["categories"]}
    assert changes["data_wait"]["after_ns"] - changes["data_wait"]["before_ns"] == pytest.approx(-300_000, rel=0.02)
    assert changes["data_wait"]["high_ns"] < 0
    assert both["comparison"]["gaps"][0]["category"] in ("data_wait", "host")
    assert "Changes between the traces" in Path("page.html").read_text()


def test_compare_says_of_two_traces_what_analyze_does(inside):
    write_loop(Path("slow.json"), wait_us=400)
    write_loop(Path("fast.json"), wait_us=100)
    assert (
        inside("compare", "slow.json", "fast.json").out == inside("analyze", "slow.json", "--compare", "fast.json").out
    )
    changes = {d["name"]: d for d in inside("compare", "slow.json", "fast.json", "--json").json["categories"]}
    assert changes["data_wait"]["high_ns"] < 0


def test_compare_takes_two_of_one_kind_that_exist(inside):
    write_loop(Path("trace.json"))
    assert "compare two traces or two trials" in inside("compare", "trace.json", "last:1", status=2).error
    assert "does not exist" in inside("compare", "trace.json", "missing.json", status=2).error
    assert "there is no study yet" in inside("compare", "last:baseline", "last:2", status=2).error
    assert "there is no trial 'nonsense'" in inside("compare", "nonsense", "nonsense", status=2).error


def test_a_run_of_one_step_is_compared_without_interval(inside):
    write_loop(Path("one.json"), num_steps=1)
    write_loop(Path("other.json"), num_steps=1)
    assert "each side has one step: no interval" in inside("analyze", "one.json", "--compare", "other.json").out


def test_a_capture_that_lost_device_work_gets_no_verdict(inside):
    """Launches are there, kernels are not: that the device idles is not known."""
    events = [e for e in loop_events() if e["cat"] != "kernel"]
    write_trace(Path("trace.json"), events)
    out = inside("analyze", "trace.json").out
    order(out, "capture  bad: ", "of the launches have no recorded device work", "no verdict", "unknown")
    assert out.startswith("capture  bad: ")
    assert "limited by" not in out
    assert "waiting for data" not in out.split("Gaps on")[0]


def test_a_trace_without_steps_or_device_is_analysed_and_says_so(inside):
    write_trace(Path("trace.json"), [operator("aten::mm", 10, 60), operator("aten::add", 70, 90)])
    out = inside("analyze", "trace.json").out
    assert "no step is marked" in out
    assert "matmuls" in out


def test_a_trace_that_ends_in_the_middle_says_so(inside):
    write_trace(Path("whole.json"), [step(0, 0, 1000), *loop_events()])
    Path("cut.json").write_bytes(Path("whole.json").read_bytes()[:-400])
    out = inside("analyze", "cut.json").out
    assert "is truncated or damaged" in " ".join(out.split())
    assert "no verdict" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.json"], ["nowhere.json does not exist", "give a trace of torch.profiler"]),
        (["nowhere*.json"], ["nowhere*.json matches no file"]),
        (["empty_folder"], ["empty_folder holds no file that ends in .json or .json.gz"]),
        (["no_traces"], ["no_traces holds 2 JSON files, but no trace"]),
        (["empty.json"], ["empty.json: the file is empty"]),
        (["text.json"], ["text.json: it is not a trace", "not JSON"]),
        (["no_traces/metrics.json"], ['no list "traceEvents"']),
        (["rank0.json", "copy_of_rank0.json"], ["rank 0 appears in two traces", "copy_of_rank0.json"]),
        (["rank0.json", "--compare", "nowhere.json"], ["nowhere.json does not exist"]),
        (["rank0.json", "--html", "nowhere/page.html"], ["nowhere/page.html cannot be written"]),
        (["rank0.json", "--perfetto", "rank0.json"], ["rank0.json is one of the input traces: write to another file"]),
        (["rank0.json", "--html", "empty_folder"], ["empty_folder cannot be written"]),
        (
            ["rank0.json", "--unprofiled-step-ms", "-1"],
            ["--unprofiled-step-ms must be from 0.001 to 8.64e+07 ms, got -1", "give the time of one step"],
        ),
        (["rank0.json", "--unprofiled-step-ms", "nan"], ["8.64e+07 ms, got nan"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_analysed_is_refused(inside, arguments, said):
    Path("empty_folder").mkdir()
    Path("no_traces").mkdir()
    Path("no_traces/metrics.json").write_text('{"loss": 1}')
    Path("no_traces/damaged.json.gz").write_bytes(b"\x1f\x8b\x08 not really")
    Path("empty.json").write_bytes(b"")
    Path("text.json").write_text("what a trace is not")
    write_loop(Path("rank0.json"), rank=0)
    write_loop(Path("copy_of_rank0.json"), rank=0)
    before = Path("rank0.json").read_bytes()
    ended = inside("analyze", *arguments, status=2)
    assert not ended.out
    for part in said:
        assert part in ended.error
    assert Path("rank0.json").read_bytes() == before


def test_without_a_trace_the_usage_is_shown(inside):
    ended = inside("analyze", status=2)
    assert "TRACE" in ended.err
    assert not ended.out


def test_the_command_needs_no_torch(steptune):
    """Traces are analysed on laptops too: nothing of the analysis imports it, not even late."""
    write_loop(steptune.folder / "trace.json")
    options = ("--html", "page.html", "--perfetto", "tracks.json", "--compare", "trace.json")
    ended = steptune("analyze", "trace.json", *options, variables={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = {line.rpartition("|")[2].strip() for line in ended.err.splitlines() if line.startswith("import time:")}
    assert "steptune.tuner.profiling.analysis" in imported
    assert "torch" not in imported


@needs_traces
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("h200_resnet18_input_bound_w0", "limited by input"),
        ("h200_swin_t_launch_bound", "limited by the host"),
        ("h200_resnet50_cuda_graph", "limited by compute"),
        ("h200_vit_b_ddp2_split0_rank0", "limited by compute"),
        ("hta_ddp_a100_rank0of2_nccl_args", "limited by the host"),
        ("hta_cuda_event_sync_a100", "limited by stalls in the only step"),
        ("kineto_resnet50_v100_workers0", "limited by input"),
        ("hta_job128_rank0", "limited by"),
        ("hta_job128_rank1", "limited by"),
    ],
)
def test_of_a_real_trace_the_first_screen_names_the_limit(inside, name, limit):
    out = inside("analyze", str(trace_file(name))).out
    first_screen = "\n".join(out.splitlines()[:31])
    assert limit in first_screen
    assert "capture  good" in first_screen
    assert "step breakdown" in first_screen


@needs_traces
def test_real_ranks_of_one_run_are_compared(inside):
    ranks = [str(trace_file(name)) for name in NAMES if name.startswith("h200_vit_b_ddp2")]
    out = inside("analyze", *ranks).out
    order(out, "2 ranks", "Ranks", "Collectives")
    assert "all_reduce" in out


def test_two_results_cannot_be_one_file(inside):
    write_loop(Path("trace.json"))
    ended = inside("analyze", "trace.json", "--html", "out", "--perfetto", "out", status=2)
    assert "--html and --perfetto both name out: write them to different files" in ended.err


def test_steps_that_take_no_time_are_refused(inside):
    write_trace(Path("trace.json"), [step(0, 0, 0), operator("aten::mm", 0, 0)])
    assert "the steps have zero length" in inside("analyze", "trace.json", status=2).err


def test_tracks_are_not_put_into_a_cut_file(inside):
    write_loop(Path("whole.json"))
    packed = gzip.compress(Path("whole.json").read_bytes())
    Path("cut.json.gz").write_bytes(packed[: len(packed) * 3 // 4])
    assert "is truncated or damaged" in inside("analyze", "cut.json.gz", "--perfetto", "tracks.json", status=2).err
    assert not Path("tracks.json").exists()
    assert "incomplete" in inside("analyze", "cut.json.gz").out

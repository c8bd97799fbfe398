"""First statements of the analysis of a trace, its figures' data, and the page: it claims nothing of a bad capture."""

from __future__ import annotations

import json
import re

import pytest
from analysed import make_analysis, make_breakdown, make_gaps, make_kernel, make_rank, write_loop
from msgspec.structs import replace
from trace_events import operator, step, write_trace

from steptune.dashboards import units
from steptune.dashboards.communication import get_groups_info
from steptune.dashboards.rank_groups import grouped_ranks
from steptune.dashboards.trace_figures import plot_memory_classes
from steptune.dashboards.trace_info import (
    get_findings_info,
    get_late_ns,
    get_memory_classes,
    get_phases_info,
    get_ranks_info,
    get_steps_info,
    get_trace_breakdown_info,
    get_trace_headline,
    get_variation_info,
    mean_step_ns,
)
from steptune.dashboards.trace_page import render_trace_page, trace_context
from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.profiling.comparison import compare
from steptune.tuner.profiling.rank_comparison import main_rank
from steptune.tuner.records import CaptureQuality, CollectiveStats, Finding, GapSite
from steptune.tuner.trace_records import MemoryClass, MemoryStats, ProcessGroup, RankWait, TraceAnalysis

MATMUL, HOST, DATA = "compute_matmul", "host", "data_wait"
HOSTILE = "</script><img src=x onerror=alert(1)><b>"
BAD = CaptureQuality(num_events=10, num_steps=1, problems=("12 % of the launches have no recorded device work",))
FINDING = Finding(
    rule="input_bound",
    severity="high",
    message="input-bound",
    advice="load ahead",
    strategies=("data_loading",),
    bound=0.5,
)


def of_steps(*steps, **fields):
    return make_analysis(make_rank(make_breakdown(list(steps), **fields)))


@pytest.fixture
def looped(tmp_path) -> TraceAnalysis:
    return analyse_traces([write_loop(tmp_path / "trace.json")])


def embedded_figures(page):
    pattern = r'data-figure="([\w-]+)">.*?class="plot-data">(.*?)</script>'
    return {name: json.loads(text) for name, text in re.findall(pattern, page, flags=re.DOTALL)}


def without_scripts(page):
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("step_ns", "said"),
    [
        ({DATA: 60, MATMUL: 40}, "limited by input: the device waits for data for 60 % of the step"),
        ({HOST: 60, MATMUL: 40}, "limited by the host: the device waits for launches for 60 % of the step"),
        ({"communication": 30, MATMUL: 70}, "limited by communication, exposed for 30 % of the step"),
        (
            {"queued": 30, MATMUL: 70},
            "limited by synchronisation: work waits for other work, or for the host, for 30 % of the step",
        ),
        ({"optimizer": 40, MATMUL: 60}, "limited by the optimizer: 40 % of the step"),
        ({DATA: 10, MATMUL: 90}, "limited by compute: 90 % of the step"),
    ],
)
def test_the_headline_says_what_limits_the_step(step_ns, said):
    headline = get_trace_headline(of_steps(step_ns))
    assert said in headline.title
    assert headline.trusted
    assert headline.quality[0].startswith("good: ")


def test_of_a_bad_capture_no_verdict_is_given_and_idle_time_is_unknown():
    analysis = of_steps({HOST: 99, MATMUL: 1}, quality=BAD)
    headline = get_trace_headline(analysis)
    assert "no verdict" in headline.title
    assert "limited by" not in headline.title
    assert headline.quality[0] == "bad: 12 % of the launches have no recorded device work"
    assert mean_step_ns(analysis) == {MATMUL: 1, "unknown": 99}
    page = render_trace_page(analysis)
    assert "Python and other host work" not in without_scripts(page).split("<h2>Timeline</h2>")[0]


def test_of_several_devices_of_a_process_the_headline_speaks_of_the_one_that_computes_most():
    """They share the step: a device that idles beside one that computes makes no step that half idles."""
    breakdowns = (make_breakdown([{HOST: 90, MATMUL: 10}]), make_breakdown([{MATMUL: 100}], device="cuda:1"))
    rank = replace(make_rank(breakdowns[0]), breakdowns=breakdowns)
    headline = get_trace_headline(make_analysis(rank))
    assert "limited by compute: 100 % of the step" in headline.title
    assert headline.what.endswith("figures: the busiest device of each process (cuda:1)")
    assert mean_step_ns(make_analysis(rank)) == {MATMUL: 100}
    assert "figures" not in get_trace_headline(of_steps({MATMUL: 1})).what


def test_what_is_bad_of_another_device_is_said_but_takes_no_verdict():
    breakdowns = (make_breakdown([{MATMUL: 10}]), make_breakdown([{HOST: 10}], device="cuda:1", quality=BAD))
    headline = get_trace_headline(make_analysis(replace(make_rank(breakdowns[0]), breakdowns=breakdowns)))
    assert headline.trusted
    assert "cuda:1: 12 % of the launches have no recorded device work" in headline.quality


def test_several_problems_of_a_capture_are_one_finding_with_the_advice_for_each():
    bad = [replace(FINDING, rule="bad_capture", bound=0.0, advice=advice) for advice in ("one", "two", "one")]
    [found] = get_findings_info(replace(of_steps({MATMUL: 1}, quality=BAD), findings=tuple(bad)))
    assert (found.message, found.advice) == ("no verdict without a better capture", "one; two")


def test_a_step_that_waits_for_a_late_rank_is_not_limited_by_the_network():
    ranks = [
        make_rank(make_breakdown([{"communication": 60, MATMUL: 40}])),
        make_rank(make_breakdown([{MATMUL: 100}], rank=1)),
    ]
    waits = tuple(RankWait(rank=n, wait_ns=50 - 50 * n, late_share=n, exposed_ns=50 - 50 * n) for n in range(2))
    analysis = make_analysis(*ranks, waits=waits)
    assert get_late_ns(analysis) == 25
    assert "waiting for them takes 25 % of the step, mostly for rank 1" in get_trace_headline(analysis).title
    fair = make_analysis(*ranks, waits=tuple(replace(wait, exposed_ns=0) for wait in waits))
    assert "limited by communication, exposed for 30 % of the step" in get_trace_headline(fair).title


def test_advice_begins_with_what_the_headline_names():
    """Even where something else could gain more at best: the first screen has to be of one piece."""
    findings = (replace(FINDING, rule="unfused", bound=0.45), replace(FINDING, rule="launch_bound", bound=0.4))
    analysis = replace(of_steps({HOST: 40, "compute_elementwise": 45, MATMUL: 15}), findings=findings)
    first, second = (replace(finding, message=finding.rule) for finding in findings)
    said = [advice.message for advice in get_findings_info(replace(analysis, findings=(first, second)))]
    assert said == ["launch_bound", "unfused"]


def test_of_several_ranks_a_finding_says_whose_it_is():
    finding = replace(FINDING, evidence={"of_rank": 3})
    [said] = get_findings_info(replace(of_steps({MATMUL: 1}), findings=(finding,)))
    assert said.message == "rank 3: input-bound"


def test_phases_are_of_the_step_that_the_table_shows():
    """Without the profiler, compute takes 40 of 50 ns: the phases share the 40, not the profiled 80."""
    phases = {"forward": 20, "backward": 60}
    analysis = of_steps({MATMUL: 80, HOST: 120}, rescaled={MATMUL: 40, HOST: 10}, phases=phases)
    rows = {row.phase: (row.time_ns, row.share) for row in get_phases_info(analysis).itertuples()}
    assert rows == {"forward": (10, 0.2), "backward": (30, 0.6)}


def test_a_wait_per_step_is_over_the_steps_that_were_compared():
    ranks = [make_rank(make_breakdown([{MATMUL: 100}] * 4)), make_rank(make_breakdown([{MATMUL: 100}] * 3, rank=1))]
    waits = (RankWait(rank=0, wait_ns=60, late_share=0, step_share=0.75), RankWait(rank=1, wait_ns=0, late_share=1))
    info = get_ranks_info(make_analysis(*ranks, waits=waits))
    assert list(info["wait_ns"]) == [20, 0]


def test_nothing_stands_out_only_where_nothing_does():
    assert get_trace_headline(of_steps({MATMUL: 9, HOST: 1})).nothing_stands_out
    assert not get_trace_headline(of_steps({MATMUL: 5, DATA: 5})).nothing_stands_out
    assert not get_trace_headline(replace(of_steps({MATMUL: 1}), findings=(FINDING,))).nothing_stands_out


def test_the_mean_over_ranks_sums_to_the_mean_step():
    ranks = [make_rank(make_breakdown([{MATMUL: 10, HOST: 30}])), make_rank(make_breakdown([{MATMUL: 20}], rank=1))]
    info = get_trace_breakdown_info(make_analysis(*ranks))
    assert list(info["category"]) == [MATMUL, HOST]
    assert list(info["time_ns"]) == [15, 15]
    assert info["share"].sum() == pytest.approx(1)


def test_steps_and_phases_are_those_of_the_breakdown(looped):
    [breakdown] = looped.ranks[0].breakdowns
    steps = get_steps_info(looped)
    assert steps["ms"].sum() == pytest.approx(breakdown.step_time_ns / 1e6)
    assert set(steps["step"]) == {1, 2, 3}
    assert set(get_steps_info(looped, top=2)["step"]) == {1, 2}
    phases = dict(zip(get_phases_info(looped)["phase"], get_phases_info(looped)["time_ns"], strict=True))
    assert phases == {name: value / 3 for name, value in breakdown.phases.items() if value}
    [row] = get_variation_info(looped).itertuples()
    assert row.min_ns <= row.median_ns <= row.max_ns


def test_the_rank_that_waits_least_is_the_straggler_and_the_one_that_is_shown():
    ranks = [make_rank(make_breakdown([{MATMUL: 1000}], rank=number)) for number in range(3)]
    waits = tuple(RankWait(rank=n, wait_ns=w, late_share=s) for n, w, s in [(0, 200, 0.0), (1, 0, 1.0), (2, 190, 0.0)])
    analysis = make_analysis(*ranks, waits=waits)
    assert list(get_ranks_info(analysis)["straggler"]) == [False, True, False]
    assert main_rank(analysis).rank == 1
    even = make_analysis(*ranks, waits=tuple(replace(wait, wait_ns=190) for wait in waits))
    assert not get_ranks_info(even)["straggler"].any()


def test_the_page_loads_nothing_and_shows_every_figure(looped):
    memory = MemoryStats(
        device="cuda:0",
        peak_allocated_bytes=2 << 20,
        peak_reserved_bytes=4 << 20,
        total_memory_bytes=8 << 30,
        timeline=((0, 1 << 20, 4 << 20), (1000, 2 << 20, 4 << 20)),
    )
    looped = replace(looped, ranks=(replace(looped.ranks[0], memory=(memory,)),), findings=(FINDING,))
    page = render_trace_page(looped)
    before_scripts = without_scripts(page)
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", before_scripts)
    assert "default-src 'none'" in before_scripts
    figures = embedded_figures(page)
    assert set(figures) == {"steps", "by_stack", "gaps", "treemap", "kernels", "queue", "memory-0"}
    for said in ("waiting for data", "input-bound", "load ahead", "2.00 MiB allocated", "launches a step"):
        assert said in before_scripts


def test_memory_is_shown_by_class_of_tensor(looped):
    memory = MemoryStats(
        device="cuda:0",
        peak_allocated_bytes=3 << 20,
        peak_reserved_bytes=4 << 20,
        total_memory_bytes=8 << 30,
        timeline=((0, 1 << 20, 4 << 20),),
        classes=(
            MemoryClass(name="parameters", peak_bytes=1 << 20, at_peak_bytes=1 << 20),
            MemoryClass(name="activations", peak_bytes=2 << 20, at_peak_bytes=2 << 20),
            MemoryClass(name="temporary", peak_bytes=1 << 20, at_peak_bytes=0),
        ),
        class_timeline=((0, 1 << 20, 0, 0), (1000, 1 << 20, 2 << 20, 0), (2000, 1 << 20, 0, 1 << 20)),
    )
    page = render_trace_page(replace(looped, ranks=(replace(looped.ranks[0], memory=(memory,)),)))
    table = without_scripts(page).partition("Memory of cuda:0 by class of tensor")[2].partition("</table>")[0]
    assert re.findall(
        r"<tr><td>(.*?)</td><td class=\"number\">(.*?)</td><td class=\"number\">(.*?)</td></tr>", table
    ) == [
        ("parameters", "1.00 MiB", "1.00 MiB"),
        ("activations", "2.00 MiB", "2.00 MiB"),
        ("temporary", "0 MiB", "1.00 MiB"),
    ]
    series = plot_memory_classes(memory).data
    assert [(one["name"], list(one["y"])) for one in series] == [
        ("parameters", [1, 1, 1]),
        ("activations", [0, 2, 0]),
        ("temporary", [0, 0, 1]),
    ]
    said = get_memory_classes(memory)
    assert said == "peak memory of cuda:0, 3.00 MiB: activations 2.00 MiB, parameters 1.00 MiB"


def test_process_groups_of_one_kind_are_one_row():
    """64 ranks, sharded within hosts of 8 and replicated between them: 8 groups of either kind."""

    def called(name: str, group: str, count: int, exposed_ns: int) -> CollectiveStats:
        return CollectiveStats(
            name=name,
            group=group,
            group_size=8,
            message_bytes=1 << 20,
            dtype="",
            count=count,
            total_ns=exposed_ns + 400,
            exposed_ns=exposed_ns,
        )

    shards = [called("allgather", f"shards {n}", 6, 1000) for n in range(8)]
    shards += [called("reducescatter", f"shards {n}", 2, 200) for n in range(8)]
    replicas = [called("allreduce", f"replicas {n}", 2, 4000) for n in range(8)]
    rank = make_rank(make_breakdown([{MATMUL: 1}, {MATMUL: 1}]))
    groups = [ProcessGroup(name=f"shards {n}", ranks=tuple(range(8 * n, 8 * n + 8)), num_hosts=1) for n in range(8)]
    groups += [ProcessGroup(name=f"replicas {n}", ranks=tuple(range(n, 64, 8)), num_hosts=8) for n in range(8)]
    analysis = replace(make_analysis(replace(rank, groups=tuple(groups))), collectives=(*shards, *replicas))
    assert [tuple(row) for row in get_groups_info(analysis)] == [
        (8, 8, "across 8 hosts", "allreduce", 1, 1 << 20, 2000, 200),
        (8, 8, "within a host", "allgather, reducescatter", 4, 4 << 20, 600, 400),
    ]
    page = without_scripts(render_trace_page(analysis))
    assert "<td>8 groups of 8 ranks across 8 hosts</td><td>allreduce</td>" in page
    assert get_groups_info(replace(analysis, collectives=replicas[:1])) == []


def test_names_are_text_wherever_they_appear():
    rank = make_rank(
        make_breakdown([{MATMUL: 1}, {MATMUL: 1}]),
        file=HOSTILE,
        kernels=(make_kernel(HOSTILE, 1, 10),),
        gaps={"cuda:0": make_gaps(GapSite(category=HOST, kernel_after=HOSTILE, count=1, total_ns=5))},
    )
    analysis = replace(make_analysis(rank), findings=(replace(FINDING, evidence={"gap": HOSTILE}),))
    other = make_analysis(make_rank(make_breakdown([{MATMUL: 1}, {MATMUL: 1}])))
    page = render_trace_page(analysis, compare(analysis, other, labels=(HOSTILE, "b")))
    assert HOSTILE not in page
    assert "<img" not in without_scripts(page)
    assert "<img" not in "".join(re.findall(r'class="plot-data">(.*?)</script>', page, flags=re.DOTALL))


def test_a_comparison_has_its_own_section():
    before, after = of_steps({HOST: 3000}, {HOST: 3010}), of_steps({HOST: 1000}, {HOST: 1010})
    page = render_trace_page(before, compare(before, after, labels=("old.json", "new.json")))
    assert "Changes between the traces" in page
    assert "old.json" in page
    assert "−2.00 µs" in page
    assert "Changes between the traces" not in render_trace_page(before)


@pytest.mark.parametrize("kind", ["cpu", "two ranks", "one step"])
def test_every_kind_of_trace_has_a_page(tmp_path, kind):
    if kind == "cpu":
        events = [step(0, 0, 100), operator("aten::mm", 10, 60), step(1, 100, 200), operator("aten::mm", 110, 160)]
        files = [write_trace(tmp_path / "cpu.json", events)]
    elif kind == "two ranks":
        files = [write_loop(tmp_path / f"rank{n}.json", rank=n) for n in range(2)]
    else:
        files = [write_loop(tmp_path / "one.json", num_steps=1)]
    analysis = analyse_traces(files)
    context = trace_context(analysis, None)
    assert bool(context["ranks"]) == (kind == "two ranks")
    page = render_trace_page(analysis)
    assert "a step, limited by" in page
    assert embedded_figures(page)
    assert "timeline-data" in page


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "0 ns"),
        (640, "640 ns"),
        (999.6, "1.00 µs"),
        (12_345, "12.3 µs"),
        (4_560_000, "4.56 ms"),
        (1.23e9, "1.23 s"),
        (-2_000, "-2.00 µs"),
    ],
)
def test_times_are_in_the_unit_that_fits(time_ns, text):
    assert units.short_time(time_ns) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (7.66e12, "FLOP", "7.66 TFLOP/s"),
        (5.9e8, "FLOP", "590 MFLOP/s"),
        (2.1e12, "B", "2,100 GB/s"),
        (1.22e8, "B", "122 MB/s"),
    ],
)
def test_rates_are_in_the_unit_that_fits(value, unit, text):
    assert units.per_second(value, unit) == text


def test_kernel_names_keep_what_tells_them_apart():
    name = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::sqrt_kernel_cuda(at::TensorIteratorBase&)::"
        "{lambda()#2}::operator()() const::{lambda()#2}::operator()() const::{lambda(float)#1}, "
        "std::array<char*, 2ul> >(int, std::array<char*, 2ul>)"
    )
    assert units.kernel_name(name) == "vectorized_elementwise_kernel<4, sqrt_kernel_cuda, array<char*, 2ul> >"
    assert units.kernel_name("Memcpy HtoD (Pinned -> Device)") == "Memcpy HtoD (Pinned -> Device)"
    assert units.kernel_name("(anonymous)") == "(anonymous)"
    assert units.place_name("void at::native::f<int>(int): 3.5 ms in 30 runs") == "f<int>: 3.5 ms in 30 runs"
    assert units.place_name("2 ms before aten::mm (train.py(3))") == "2 ms before aten::mm (train.py(3))"


def many_ranks(num_ranks: int, late: tuple[int, ...] = ()) -> TraceAnalysis:
    """Ranks of which some come late, and the second half computes less."""
    ranks = [
        make_rank(
            make_breakdown(
                [{MATMUL: 900 if n < num_ranks // 2 else 500, HOST: 100 if n < num_ranks // 2 else 500}], rank=n
            )
        )
        for n in range(num_ranks)
    ]
    waits = tuple(
        RankWait(rank=n, wait_ns=0 if n in late else 300, late_share=float(n in late)) for n in range(num_ranks)
    )
    return make_analysis(*ranks, waits=waits)


@pytest.mark.parametrize("num_ranks", [64, 1000])
def test_many_ranks_are_rows_of_groups(num_ranks):
    analysis = many_ranks(num_ranks, late=(5, 6, 9))
    rows = grouped_ranks(get_ranks_info(analysis))
    half = num_ranks // 2
    assert list(rows["rank"]) == [
        f"0–4, 7–8, 10–{half - 1} ({half - 3})",
        "5–6, 9 (3)",
        f"{half}–{num_ranks - 1} ({half})",
    ]
    assert list(rows["straggler"]) == [False, True, False]
    assert list(rows["compute"]) == pytest.approx([0.9, 0.9, 0.5])
    page = render_trace_page(analysis)
    assert page.count("keeps up") == 2
    assert page.count("straggler: the others wait for it") == 1


def test_few_ranks_are_rows_of_their_own():
    info = get_ranks_info(many_ranks(16, late=(5,)))
    assert grouped_ranks(info) is info


def test_ranks_whose_waits_are_not_known_are_grouped_too():
    analysis = replace(many_ranks(40), waits=())
    assert list(grouped_ranks(get_ranks_info(analysis))["rank"]) == ["0–19 (20)", "20–39 (20)"]


def test_tables_have_more_rows_than_a_figure_has_bars():
    kernels = tuple(make_kernel(f"kernel number {number}", 1, 10) for number in range(60))
    rank = make_rank(make_breakdown([{MATMUL: 1000}]), kernels=kernels)
    page = render_trace_page(make_analysis(rank))
    assert without_scripts(page).count("kernel number") >= 60
    assert len(embedded_figures(page)["kernels"]["data"][0]["y"]) == 20

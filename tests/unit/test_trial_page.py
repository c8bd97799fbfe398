"""The page of a trial: what its figures show, what it says of what it lacks, and that both fit the records."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re

import msgspec
import pytest
from analysed import make_analysis, make_breakdown, make_rank, write_loop
from builders import (
    failed_result,
    sample_compilation,
    sample_guard,
    sample_reading,
    sample_result,
    sample_study,
    sample_trial,
    sample_window,
)
from msgspec.structs import replace
from traces import needs_traces, trace_file

from steptune.dashboards import units
from steptune.dashboards.communication import get_communication_info, plot_bandwidth, plot_waits
from steptune.dashboards.compilation import get_compilation_info
from steptune.dashboards.guard import get_guard_info, plot_guard
from steptune.dashboards.lanes import get_long_gaps_info, get_timeline_info, step_edges_ns
from steptune.dashboards.launch_queue import get_queue_info, plot_queue
from steptune.dashboards.site import STANDALONE, Site
from steptune.dashboards.templating import render
from steptune.dashboards.trace_info import get_ranks_info
from steptune.dashboards.trace_page import trace_context
from steptune.dashboards.treemap import get_treemap_info, plot_treemap
from steptune.dashboards.trial_headline import get_trial_headline
from steptune.dashboards.trial_page import profile_of, render_profile, trial_context
from steptune.dashboards.windows import get_spread, get_windows_info, plot_windows
from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.profiling.lanes import FULL_CELLS
from steptune.tuner.records import (
    Attempt,
    CollectiveStats,
    Compilation,
    Decision,
    Failure,
    FailureKind,
    GuardVerdict,
    Phase,
    Purpose,
    SampleUnit,
    TrialState,
)
from steptune.tuner.trace_records import LaneTile, OperatorStats, QueueStats, RankWait
from steptune.tuner.trial_figures import TrialFigures, TrialView, figures_of

MATMUL = "compute_matmul"
HOSTILE = "</script><img src=x onerror=alert(1)><b>"
MIB = 1 << 20


class Source:
    """One trial, and what was kept of it."""

    def __init__(self, trial, *, analysis=None, files=None, decisions=(), study=None):
        self._trial = trial
        self._analysis = analysis
        self._files = files or {}
        self._decisions = list(decisions)
        self._study = study or sample_study(study_id=trial.study_id)

    def get_trial(self, trial_id):
        assert trial_id == self._trial.trial_id
        return view_of(self._trial)

    def get_study(self, study_id):
        return self._study

    def trials(self, study_id):
        return [self._trial]

    def decisions(self, study_id):
        return self._decisions

    def recommendation(self, study_id):
        return None

    def trial_profile(self, trial):
        return (
            None
            if trial.result is None
            else render_profile(trial.result, self._analysis, "/lanes" if self._analysis else "")
        )

    def trial_files(self, trial_id):
        return self._files


def trial_with(result, **fields):
    state = TrialState.COMPLETED if result.failure is None else TrialState.FAILED
    return replace(sample_trial(), trial_id=result.trial_id, result=result, state=state, **fields)


def view_of(trial):
    result = trial.result
    return TrialView(trial, TrialFigures(None, None, 0, None) if result is None else figures_of(result, []))


def page_of(trial, site=None, **kept):
    source = Source(trial, **kept)
    return render("trial.html", site or Site(), **trial_context(source, trial.trial_id))


def text_of(page):
    page = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def looped(tmp_path, num_ranks=1):
    return analyse_traces(
        [write_loop(tmp_path / f"rank{n}.json", rank=n, num_ranks=num_ranks) for n in range(num_ranks)]
    )


# --- the step timeline ---------------------------------------------------------------------------


def held_by(timeline):
    return msgspec.json.decode(gzip.decompress(base64.b64decode(timeline.packed)), type=LaneTile)


def test_a_file_holds_every_event_of_its_timeline(tmp_path):
    analysis = looped(tmp_path)
    timeline = get_timeline_info(analysis)
    assert held_by(timeline).lanes == analysis.ranks[0].lanes
    assert timeline.step_edges_ns == (0, 1_000_000, 2_000_000, 3_000_000)
    assert not timeline.merged


def test_more_events_than_a_file_has_room_for_are_merged_and_it_says_so(tmp_path):
    timeline = get_timeline_info(looped(tmp_path), max_cells=12)
    assert timeline.merged
    assert max(max(lane.count) for lane in held_by(timeline).lanes) > 1
    assert "one file cannot hold all events" in text_of(render_page(timeline, tmp_path))


def render_page(timeline, tmp_path):
    analysis = looped(tmp_path)
    trace = trace_context(analysis, timeline)
    return render("trial_profile.html", Site(), trace=trace, figures={}, peaks=())


def test_a_page_of_the_service_asks_for_tiles(tmp_path):
    analysis = looped(tmp_path)
    result = sample_result(breakdowns=analysis.ranks[0].breakdowns)
    page = render_profile(result, analysis, "/api/v1/trials/x")
    settings = json.loads(re.search(r'class="timeline-info">(.*?)</script>', page)[1])
    assert settings["path"] == "/api/v1/trials/x"
    assert "timeline-data" not in page
    assert {"title", "colour", "text"} == set(settings["kinds"]["data_wait"])


def test_no_timeline_of_no_lanes(tmp_path):
    analysis = looped(tmp_path)
    assert get_timeline_info(replace(analysis, ranks=(replace(analysis.ranks[0], lanes=()),))) is None
    result = sample_result(breakdowns=analysis.ranks[0].breakdowns)
    assert "This profile has no timeline" in render_profile(result, analysis)


def test_gaps_lead_to_their_remedy_and_remedies_to_their_gap(tmp_path):
    analysis = looped(tmp_path)
    trace = trace_context(analysis, get_timeline_info(analysis))
    number = trace["finding_of_category"]["data_wait"]
    assert "data_wait" in trace["findings"][number].categories
    assert trace["long_gaps"][trace["gap_of_finding"][number]].category == "data_wait"
    page = render_page(get_timeline_info(analysis), tmp_path)
    assert f'href="#finding-{number + 1}"' in page
    assert f'id="finding-{number + 1}"' in page


def test_the_longest_gaps_lead_to_their_place(tmp_path):
    [rank] = looped(tmp_path).ranks
    gaps = get_long_gaps_info(rank)
    lengths = [gap.length_ns for gap in gaps]
    assert lengths == sorted(lengths, reverse=True)
    for gap in gaps:
        assert gap.end_ns - gap.start_ns == gap.length_ns
        assert 0 <= gap.start_ns < gap.end_ns <= step_edges_ns(rank)[-1]
    assert gaps[0].category == "data_wait"


def test_names_in_the_timeline_are_text(tmp_path):
    analysis = looped(tmp_path)
    [rank] = analysis.ranks
    lanes = tuple(replace(lane, names=tuple(HOSTILE for _ in lane.names), label=HOSTILE) for lane in rank.lanes)
    page = render_page(get_timeline_info(replace(analysis, ranks=(replace(rank, lanes=lanes),))), tmp_path)
    assert "<img" not in page


@needs_traces
@pytest.mark.parametrize(
    "name", ["h200_swin_t_launch_bound", "kineto_resnet50_v100_workers0", "h200_resnet50_cuda_graph"]
)
def test_the_timeline_of_a_real_trace_is_small_and_whole(name):
    timeline = get_timeline_info(analyse_traces([trace_file(name)], max_cells=FULL_CELLS))
    assert not timeline.merged
    assert timeline.num_left_out == 0
    assert len(timeline.packed) < 1_000_000


@needs_traces
def test_the_ranks_of_a_real_run_share_a_timeline():
    analysis = analyse_traces([trace_file(f"h200_vit_b_ddp2_split0_rank{rank}") for rank in range(2)])
    devices = [lane for lane in held_by(get_timeline_info(analysis)).lanes if lane.kind == "device"]
    assert {lane.label.split()[1] for lane in devices} == {"0", "1"}
    first, second = (lane.start_ns[0] for lane in devices)
    assert abs(first - second) < 50e6, "steps of one run begin within milliseconds of each other"


# --- work and queue -----------------------------------------------------------------------------


def test_areas_of_the_treemap_are_the_times_of_the_kernels(tmp_path):
    [rank] = looped(tmp_path).ranks
    info = get_treemap_info(rank)
    assert sum(area.ms for area in info) == pytest.approx(sum(kernel.total_ns for kernel in rank.kernels) / 3 / 1e6)
    [tree] = plot_treemap(info).data
    values = dict(zip(tree.ids, tree["values"], strict=True))
    inside = {}
    for name, parent, value in zip(tree.ids, tree.parents, tree["values"], strict=True):
        if parent:
            inside[parent] = inside.get(parent, 0) + value
        assert (parent == "all") == name.startswith("category ")
    assert inside == pytest.approx({name: value for name, value in values.items() if not name.startswith("kernel ")})


def test_on_a_cpu_operators_take_the_place_of_kernels():
    operators = [("aten::mm", "float[2]", 30), ("aten::mm", "float[4]", 10), ("aten::custom", "", 5)]
    stats = tuple(OperatorStats(name=n, shapes=s, count=2, device_ns=ns, host_ns=ns) for n, s, ns in operators)
    info = get_treemap_info(make_rank(make_breakdown([{MATMUL: 45}], device="cpu"), operators=stats))
    assert [(area.name, area.category) for area in info] == [("aten::mm", MATMUL), ("aten::custom", "compute_other")]
    assert [area.ms * 1e6 for area in info] == pytest.approx([40, 5])
    assert [area.num_runs for area in info] == [4, 2]


def test_the_queue_is_a_line_a_stream():
    queue = QueueStats(
        stream=7,
        num_launches=2,
        mean_depth=0.5,
        max_depth=2,
        empty_share=0.5,
        median_delay_ns=1,
        timeline=((0, 1), (9, 0)),
    )
    rank = make_rank(make_breakdown([{MATMUL: 10}]), queues={"cuda:0": (queue, replace(queue, stream=20))})
    info = get_queue_info(rank)
    assert list(info.itertuples(index=False, name=None))[:2] == [("stream 7", 0.0, 1), ("stream 7", 9e-6, 0)]
    assert [line.name for line in plot_queue(info).data] == ["stream 7", "stream 20"]


# --- communication ------------------------------------------------------------------------------


def all_reduce(**fields):
    given = {"message_bytes": 25 * MIB, "count": 4, "total_ns": 8_000_000, "exposed_ns": 2_000_000, **fields}
    return CollectiveStats(name="all_reduce", group="0", group_size=2, dtype="float", **given)


def test_communication_is_split_into_exposed_and_hidden_per_step():
    rank = make_rank(make_breakdown([{MATMUL: 10_000_000}] * 2))
    collectives = (all_reduce(message_bytes=MIB, total_ns=1, exposed_ns=1), all_reduce(bus_bytes_per_s=2e11, skew_ns=9))
    info = get_communication_info(make_analysis(rank, collectives=collectives))
    first, second = info.itertuples()
    assert (first.exposed_ms, first.hidden_ms, first.count, first.skew_ns) == (1.0, 3.0, 2.0, 9.0)
    assert math.isnan(second.bus_bytes_per_s)
    [marks] = plot_bandwidth(info).data
    assert (list(marks.x), list(marks.y)) == ([25.0], [200.0])


def test_waits_are_shown_by_rank_and_the_straggler_stands_out():
    ranks = [make_rank(make_breakdown([{MATMUL: 1_000_000}], rank=n)) for n in range(3)]
    waits = tuple(RankWait(rank=n, wait_ns=w, late_share=0.5) for n, w in [(0, 200_000), (1, 0), (2, 190_000)])
    [bars] = plot_waits(get_ranks_info(make_analysis(*ranks, waits=waits))).data
    assert list(bars.x) == pytest.approx([0.2, 0, 0.19])
    colours = list(bars.marker.color)
    assert colours[0] == colours[2] != colours[1]


# --- windows and guard ---------------------------------------------------------------------------


def test_void_windows_have_their_reason_and_are_drawn_as_no_measurement():
    windows = (
        sample_window(0, duration_ns=10_000_000, num_steps=10),
        sample_window(1, duration_ns=50_000_000, num_steps=10, void="others used 40 % of the cores"),
        sample_window(2, duration_ns=12_000_000, num_steps=10),
    )
    result = sample_result(windows=windows)
    info = get_windows_info(result)
    assert list(info["step_ms"]) == [1.0, 5.0, 1.2]
    assert list(info["void"]) == ["", "others used 40 % of the cores", ""]
    spread = get_spread(result)
    figures = figures_of(result, [])
    assert (figures.num_windows, spread.num_void) == (2, 1)
    assert figures.step_time_ns / 1e6 - spread.restart_ms == pytest.approx(1.1, rel=0.01)
    [clean] = plot_windows(info).data
    assert list(clean.x) == [1, 3], "a void window measured nothing"
    html = page_of(trial_with(result))
    assert "others used 40 % of the cores" in html
    assert "5.000" not in html


def test_rate_and_step_are_those_of_the_stored_summary():
    """They are computed once, when the trial completes: REST and lists have the same."""
    trial = trial_with(sample_result())
    stored = TrialFigures(step_time_ns=7.25e6, units_per_s=4320.0, num_windows=5, gain=None)
    headline = get_trial_headline(TrialView(trial, stored), SampleUnit.SAMPLE)
    assert headline.title == "4,320 samples/s"
    step = fact(headline, "Step")
    assert step.value == "7.25 ms"
    assert "5 windows" in step.note


def test_no_spread_without_a_clean_window():
    assert get_spread(sample_result(windows=(sample_window(0, void="x"),))) is None


def test_guard_curves_stand_side_by_side_as_far_as_each_goes():
    guard = GuardVerdict(passed=False, num_steps=3, losses=(2.0, math.nan), reference_losses=(2.5, 1.5, 1.0))
    info = get_guard_info(guard)
    assert list(info["reference"]) == [2.5, 1.5, 1.0]
    assert info["difference"][0] == -0.5
    assert info["difference"][1:].isna().all()
    reference, own = plot_guard(info).data
    assert (list(reference.y), list(own.y)) == ([2.5, 1.5, 1.0], [2.0, None, None])


# --- what the headline says -----------------------------------------------------------------------


def fact(headline, name):
    [found] = [fact for fact in headline.facts if fact.name == name]
    return found


def headline_of(result, **fields):
    return get_trial_headline(view_of(trial_with(result, **fields)), SampleUnit.SAMPLE)


def test_a_measured_trial_says_its_rate_and_what_the_study_made_of_it():
    result = sample_result(contended=False)
    decision = Decision(
        sequence=1, stage="move", verdict="accepted", reason="faster", trial_ids=(result.trial_id,), measured_gain=0.25
    )
    headline = get_trial_headline(view_of(trial_with(result)), SampleUnit.SAMPLE, [decision])
    assert headline.tone == "good"
    assert headline.title.endswith("samples/s")
    assert headline.sentence == "Accepted: faster."
    assert fact(headline, "Search estimate").value == "this run: 1.25×"
    other = get_trial_headline(
        view_of(trial_with(result)), SampleUnit.SAMPLE, [replace(decision, trial_ids=("another",))]
    )
    assert "1.25" not in str(other)


def test_a_run_on_a_busy_machine_states_no_estimate():
    result = sample_result()
    busy = replace(result, windows=tuple(replace(w, foreign_cpu_share=0.43) for w in result.windows))
    decision = Decision(
        sequence=1, stage="move", verdict="accepted", reason="-", trial_ids=(result.trial_id,), measured_gain=13.34
    )
    headline = get_trial_headline(view_of(trial_with(busy)), SampleUnit.SAMPLE, [decision])
    assert "14.3" not in str(headline)
    assert fact(headline, "Search estimate").note == "other programs used 43 % of the cores"


def test_a_failed_trial_says_what_went_wrong_and_where():
    failure = Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.WARM_UP, message="needs 9 GiB", rank=3, signal=9)
    headline = headline_of(failed_result(failure=failure))
    assert (headline.tone, headline.title) == ("warning", "Out of memory during the warm-up")
    for said in ("needs 9 GiB", "rank 3", "Signal 9"):
        assert said in headline.sentence


def test_runs_before_the_last_one_are_listed_with_how_they_ended():
    failure = Failure(kind=FailureKind.CRASH, phase=Phase.MEASURE, message="killed by SIGKILL", signal=9)
    attempt = Attempt(failure=failure, began_at=sample_trial().started_at, duration_ns=1)
    (fact,) = [f for f in headline_of(sample_result(repeated=(attempt,))).facts if f.name == "Repeated"]
    assert (fact.value, fact.note) == ("1 earlier run", "killed by SIGKILL (during the measurement)")


def test_a_rejected_trial_has_no_rate_in_its_headline():
    headline = headline_of(sample_result(guard=sample_guard(passed=False)))
    assert "training differs from the reference" in headline.title
    assert headline.tone == "warning"


def test_trials_without_a_result_say_so():
    running = replace(sample_trial(), state=TrialState.RUNNING, result=None)
    assert get_trial_headline(view_of(running), SampleUnit.SAMPLE).title == "Running"
    assert get_trial_headline(view_of(replace(running, state=TrialState.LOST)), SampleUnit.SAMPLE).title == "Lost"


def test_every_failure_and_phase_has_words():
    for kind in FailureKind:
        for phase in Phase:
            assert headline_of(failed_result(failure=Failure(kind=kind, phase=phase, message="m"))).title


# --- the profile -----------------------------------------------------------------------------------


def test_the_breakdown_of_the_result_replaces_that_of_the_kept_analysis(tmp_path):
    """The search saw it: with the epoch's restart in it, for one."""
    kept = looped(tmp_path)
    result = sample_result(breakdowns=(make_breakdown([{MATMUL: 9}]),))
    assert profile_of(result, kept).ranks[0].breakdowns == result.breakdowns
    assert profile_of(result, kept).findings == result.findings


def test_without_a_kept_analysis_the_record_speaks():
    result = sample_result()
    analysis = profile_of(result, None)
    assert analysis.ranks[0].kernels == result.profile.kernels
    assert analysis.collectives == result.profile.collectives
    assert profile_of(sample_result(breakdowns=(), profile=None), None) is None


# --- the page ---------------------------------------------------------------------------------------


def test_a_complete_trial_has_every_figure(tmp_path):
    analysis = looped(tmp_path)
    result = sample_result(breakdowns=analysis.ranks[0].breakdowns)
    page = page_of(trial_with(result), analysis=analysis, files={"trace": 5 * MIB, "log": 10})
    for name in ("steps", "gaps", "treemap", "kernels", "queue", "windows", "guard"):
        assert f'data-figure="{name}"' in page
    for said in ("Open in Perfetto", "Download the trace", "The longest gaps", "Zoom in", "Log"):
        assert said in text_of(page)


def test_the_traces_of_all_ranks_are_offered(tmp_path):
    analysis = looped(tmp_path)
    result = sample_result(breakdowns=analysis.ranks[0].breakdowns)
    kept = {"trace": MIB, **{f"trace.{rank}": MIB for rank in (10, 1, 2)}}
    page = page_of(trial_with(result), analysis=analysis, files=kept)
    assert "Traces of further ranks: rank 1 , rank 2 , rank 10" in text_of(page)
    assert "/trace?rank=10" in page


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (
            trial_with(failed_result(breakdowns=(), profile=None)),
            "The trial has no profile: it ended before profiling.",
        ),
        (replace(sample_trial(), state=TrialState.RUNNING, result=None), "The trial has no profile yet."),
        (replace(sample_trial(), state=TrialState.LOST, result=None), "The trial has no profile."),
        (
            trial_with(
                sample_result(breakdowns=(), profile=None, findings=(), purpose=Purpose.REPLICATE),
                purpose=Purpose.REPLICATE,
            ),
            "trials for the purpose “replicate” need no profile",
        ),
    ],
)
def test_what_a_trial_lacks_is_said_in_a_line(trial, said):
    page = page_of(trial)
    assert said in text_of(page)
    assert 'class="timeline"' not in page


def test_a_failed_trial_shows_its_traceback():
    failure = Failure(
        kind=FailureKind.WORKLOAD_ERROR, phase=Phase.BUILD, message="no photos", traceback="File x.py, line 3"
    )
    said = text_of(page_of(trial_with(failed_result(failure=failure)), files={"log": 3}))
    for part in ("no photos", "File x.py, line 3", "during the build"):
        assert part in said


def test_a_cpu_trial_says_what_a_cpu_has_not():
    result = sample_result(
        breakdowns=(make_breakdown([{MATMUL: 9}], device="cpu"),), profile=None, memory=sample_result().memory[:1]
    )
    said = text_of(page_of(trial_with(result)))
    assert "A CPU has no launch queue" in said
    assert "No communication: there is one rank." in said


def test_inside_a_file_nothing_links_to_the_service(tmp_path):
    analysis = looped(tmp_path)
    result = sample_result(breakdowns=analysis.ranks[0].breakdowns)
    page = page_of(trial_with(result), STANDALONE, analysis=analysis, files={"trace": MIB, "log": 1})
    page = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert "/api/v1" not in page


def test_names_are_text_on_the_page(tmp_path):
    failure = Failure(kind=FailureKind.CRASH, phase=Phase.MEASURE, message=HOSTILE, traceback=HOSTILE)
    page = page_of(trial_with(failed_result(failure=failure)), study=sample_study(workload=HOSTILE))
    assert HOSTILE not in page
    assert "<img" not in page


@needs_traces
def test_the_page_of_a_real_profile_is_below_a_megabyte_compressed():
    import gzip

    analysis = analyse_traces([trace_file("h200_swin_t_launch_bound")], top=60)
    result = sample_result(breakdowns=analysis.ranks[0].breakdowns)
    page = page_of(trial_with(result), analysis=analysis)
    assert len(gzip.compress(page.encode(), 5)) < 1_000_000
    assert units.short_time(get_long_gaps_info(analysis.ranks[0])[0].length_ns) in text_of(page)


class TestCompilation:
    def test_what_happened_is_listed_with_reason_and_line(self):
        rows = get_compilation_info(sample_compilation())
        assert [(row.what, row.times) for row in rows] == [
            ("graph break", 2),
            ("compiled again", 7),
            ("no CUDA graph", 3),
        ]
        assert rows[1].place == "forward (/home/me/train.py, line 12)"
        page = text_of(page_of(trial_with(sample_result())))
        for text in (
            "call to print",
            "layer == 3",
            "mutated inputs",
            "compilation given up 1 time",
            "4 graphs compiled after the warm-up",
        ):
            assert text in page

    def test_nothing_is_said_of_a_trial_that_compiled_nothing(self):
        assert get_compilation_info(None) == []
        page = page_of(trial_with(sample_result(compilation=None)))
        assert "Compilation: " not in page

    def test_a_clean_compilation_says_so(self):
        compilation = Compilation(num_graphs=1, seconds=3.0)
        page = page_of(trial_with(sample_result(compilation=compilation)))
        assert f"1 graph, no graph break, 0 recompilations, {units.duration(3.0)} of compilation" in page
        assert "no recompilation and no graph break" in page


# --- the state of the device ---------------------------------------------------------------------


def device_fact(result):
    facts = get_trial_headline(view_of(trial_with(result)), SampleUnit.SAMPLE).facts
    return next((fact for fact in facts if fact.name == "Device state"), None)


def test_the_device_s_state_is_that_of_the_last_window_with_what_held_it_down():
    fact = device_fact(sample_result(windows=(sample_window(0, device=sample_reading()),), unmeasured=()))
    assert fact.value == "1755 MHz, 650 W, 61 °C"
    assert fact.note == "clock limited by: power cap"


def test_what_could_not_be_read_of_a_device_is_said():
    result = sample_result(windows=(sample_window(0),), unmeasured=("power of the device: Not Supported",))
    fact = device_fact(result)
    assert (fact.value, fact.note) == ("not measured", "not measured: power of the device: Not Supported")


def test_a_trial_without_a_device_says_nothing_of_one():
    assert device_fact(sample_result(windows=(sample_window(0),), unmeasured=())) is None


def test_a_trial_whose_windows_are_all_void_says_why():
    window = sample_window(0, void="the device was slowed down by heat for 30% of the window (at 88 °C)")
    headline = get_trial_headline(view_of(trial_with(sample_result(windows=(window,)))), SampleUnit.SAMPLE)
    assert headline.title == "Not measured: no valid timing window"
    assert headline.sentence.endswith("because the device was slowed down by heat for 30% of the window (at 88 °C).")

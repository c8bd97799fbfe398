"""Step windows, adjusted to the device."""

import gzip
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_events import MAIN, OTHER, Event, event, kernel, launched, note, operator, runtime, step, trace_of
from traces import needs_traces, trace_file

from steptune.tuner.profiling.launches import find_launches
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.steps import StepWindows, find_steps
from steptune.tuner.profiling.trace import Kind, Trace

CAPTURES = Path(__file__).parents[1] / "captures"


def steps_of(trace: Trace) -> StepWindows:
    return find_steps(trace, find_launches(trace))


def windows(directory: Path, events: list[Event]) -> list[tuple[float, float]]:
    """In microseconds after the first event."""
    return list(pairwise((steps_of(trace_of(directory, events)).boundaries / 1000).tolist()))


class TestWithoutMarks:
    """Traces of loops that never call `prof.step()`."""

    def test_a_step_reaches_from_one_update_to_the_next(self, tmp_path: Path) -> None:
        """Time before the first update and after the last one is no whole step."""
        events = [
            operator("aten::mm", 0, 8),
            *(note("Optimizer.step#SGD.step", start, start + 2) for start in (10, 20, 31, 40)),
            operator("aten::eval", 50, 90),
        ]
        assert windows(tmp_path, events) == [(12, 22), (22, 33), (33, 42)]

    def test_the_ranges_that_cut_it_are_named(self, tmp_path: Path) -> None:
        events = [note("Optimizer.step#SGD.step", start, start + 2) for start in (10, 20, 30)]
        assert steps_of(trace_of(tmp_path, events)).cut_by == "Optimizer.step#SGD.step"

    def test_marks_come_before_updates(self, tmp_path: Path) -> None:
        events = [*(note("Optimizer.step#SGD.step", start, start + 2) for start in (3, 8, 13)), step(0, 0, 20)]
        assert windows(tmp_path, events) == [(0, 20)]

    def test_two_updates_do_not_show_two_steps(self, tmp_path: Path) -> None:
        events = [note("Optimizer.step#SGD.step", start, start + 2) for start in (10, 20)]
        assert not steps_of(trace_of(tmp_path, events)).marked

    def test_of_two_optimizers_the_slow_one_makes_the_steps(self, tmp_path: Path) -> None:
        """A critic is updated three times before its generator is."""
        events = [operator("aten::zeros", 0, 1)]
        for begin in (0, 100, 200):
            events += [note("Optimizer.step#RMSprop.step", begin + at, begin + at + 5) for at in (10, 30, 50)]
            events.append(note("Optimizer.step#Adam.step", begin + 80, begin + 90))
        assert windows(tmp_path, events) == [(90, 190), (190, 290)]

    def test_two_optimizers_of_one_class_make_one_step(self, tmp_path: Path) -> None:
        events = [operator("aten::zeros", 0, 1)]
        for begin in (0, 100, 200, 300):
            events += [operator("aten::mm", begin + at, begin + at + 1) for at in (1, 3, 5, 7, 9)]
            events.append(note("Optimizer.step#Adam.step", begin + 20, begin + 30))
            events += [operator("aten::add", begin + at, begin + at + 1) for at in range(40, 60, 2)]
            events.append(note("Optimizer.step#Adam.step", begin + 80, begin + 90))
        assert windows(tmp_path, events) == [(90, 190), (190, 290), (290, 390)]

    def test_work_of_the_device_lengthens_the_step_that_launched_it(self, tmp_path: Path) -> None:
        events = [operator("aten::zeros", 0, 1)]
        for number, begin in enumerate((0, 100, 200, 300)):
            events.append(note("Optimizer.step#Adam.step", begin, begin + 10))
            events += launched("gemm", begin + 20, begin + 60, begin + 115, number + 1)
        assert windows(tmp_path, events) == [(10, 115), (115, 215), (215, 315)]

    @pytest.mark.parametrize(
        "name", ["h100_detailed", "h100_item_in_the_loop", "h200_input_bound", "h200_launch_bound"]
    )
    def test_real_steps_last_as_long_as_with_marks(self, tmp_path: Path, name: str) -> None:
        """Steps of a real capture differ by some percent; the same ones are not compared, as each begins elsewhere."""
        content = gzip.decompress((CAPTURES / f"{name}.json.gz").read_bytes())
        unmarked = tmp_path / "unmarked.json"
        unmarked.write_bytes(content.replace(b"ProfilerStep#", b"Nothing "))
        marked, cut = (steps_of(read_trace(path)) for path in (CAPTURES / f"{name}.json.gz", unmarked))
        assert (cut.marked, len(cut)) == (True, len(marked) - 1)
        means = [float(np.diff(steps.boundaries).mean()) for steps in (marked, cut)]
        assert means[1] == pytest.approx(means[0], rel=0.06)


class TestCpu:
    def test_windows_begin_with_the_first_step_and_reach_to_the_next(self, tmp_path: Path) -> None:
        """The time between two annotations belongs to the earlier step: windows tile."""
        events = [
            operator("before", 0, 5),
            step(3, 10, 20),
            step(4, 22, 30),
            step(5, 31, 45),
            operator("after", 50, 60),
        ]
        assert windows(tmp_path, events) == [(10, 22), (22, 31), (31, 45)]

    def test_a_partial_last_step_ends_where_its_annotation_does(self, tmp_path: Path) -> None:
        assert windows(tmp_path, [step(0, 0, 10), step(1, 10, 11)]) == [(0, 10), (10, 11)]

    def test_without_annotations_there_is_one_window_over_everything(self, tmp_path: Path) -> None:
        trace = trace_of(tmp_path, [operator("a", 3, 5), operator("b", 7, 13)])
        steps = steps_of(trace)
        assert (steps.span, len(steps), steps.marked) == ((0, 10_000), 1, False)

    def test_steps_belong_to_the_thread_that_marks_them(self, tmp_path: Path) -> None:
        trace = trace_of(tmp_path, [operator("other", 0, 50, OTHER), step(0, 10, 20)])
        steps = steps_of(trace)
        assert (trace.threads[steps.thread], steps.marked) == (("100", str(MAIN)), True)

    def test_names_that_only_resemble_a_step_are_none(self, tmp_path: Path) -> None:
        events = [note("ProfilerStep#", 0, 50), note("my ProfilerStep#1", 0, 50), step(7, 10, 20)]
        assert windows(tmp_path, events) == [(10, 20)]

    def test_steps_of_another_thread_are_not_mixed_in(self, tmp_path: Path) -> None:
        other = event("user_annotation", "ProfilerStep#0", 5, 95, OTHER)
        assert windows(tmp_path, [step(0, 0, 10), other, step(1, 10, 20)]) == [(0, 10), (10, 20)]

    def test_old_traces_mark_steps_as_operators(self, tmp_path: Path) -> None:
        events = [event("Operator", "ProfilerStep#1", 0, 10), event("Operator", "ProfilerStep#2", 10, 30)]
        assert windows(tmp_path, events) == [(0, 10), (10, 30)]


class TestWhichMarks:
    def test_the_thread_whose_marks_launch_the_work_runs_the_steps(self, tmp_path: Path) -> None:
        """An evaluation thread may mark steps of its own, and earlier."""
        other = [event("user_annotation", f"ProfilerStep#{n}", 10 * n, 10 * n + 10, OTHER) for n in range(3)]
        events = [*other, step(0, 100, 150), *launched("k", 110, 115, 120, 1), step(1, 150, 200)]
        assert windows(tmp_path, [*events, *launched("k", 160, 165, 170, 2)]) == [(100, 150), (150, 200)]

    def test_marks_around_others_and_without_length_are_no_steps(self, tmp_path: Path) -> None:
        events = [step(50, 0, 100), step(0, 0, 40), step(1, 40, 40), step(1, 40, 100)]
        trace = trace_of(tmp_path, events)
        assert windows(tmp_path, events) == [(0, 40), (40, 100)]
        assert steps_of(trace).num_ignored == 2


class TestDevice:
    def test_a_step_lasts_until_its_own_device_work_has_ended(self, tmp_path: Path) -> None:
        """The host runs ahead: the CPU's part of step 0 ends at 10, its kernel at 25."""
        events = [
            step(0, 0, 10),
            *launched("k", 5, 8, 25, 1),
            step(1, 10, 20),
            *launched("k", 15, 25, 40, 2),
        ]
        assert windows(tmp_path, events) == [(0, 25), (25, 40)]

    def test_work_launched_from_another_thread_belongs_to_the_step(self, tmp_path: Path) -> None:
        """Autograd launches the backward pass from a thread of its own."""
        events = [step(0, 0, 10), *launched("backward", 5, 8, 30, 1, thread=OTHER)]
        assert windows(tmp_path, events) == [(0, 30)]

    def test_work_launched_outside_any_step_moves_no_boundary(self, tmp_path: Path) -> None:
        events = [
            *launched("warm-up", 0, 2, 500, 1),
            step(0, 10, 20),
            *launched("k", 12, 13, 18, 2),
            *launched("later", 25, 26, 900, 3),
        ]
        assert windows(tmp_path, events) == [(10, 20)]

    def test_work_without_a_launch_moves_no_boundary(self, tmp_path: Path) -> None:
        assert windows(tmp_path, [step(0, 0, 10), kernel("k", 5, 99, 1)]) == [(0, 10)]

    def test_a_replayed_graph_belongs_to_the_step_that_replayed_it(self, tmp_path: Path) -> None:
        events = [step(0, 0, 10), runtime("cudaGraphLaunch", 1, 2, 9)]
        events += [kernel("k", 20 + 10 * number, 28 + 10 * number, 9) for number in range(3)]
        assert windows(tmp_path, events) == [(0, 48)]

    def test_a_last_step_that_was_cut_off_is_left_out(self, tmp_path: Path) -> None:
        """It launched less than four fifths of what the others did."""
        events = [step(0, 0, 10), step(1, 10, 20), step(2, 20, 30)]
        for number, call in enumerate([1, 3, 11, 13, 21]):
            events += launched("k", call, call + 2, call + 3, number)
        steps = steps_of(trace_of(tmp_path, events))
        assert (steps.boundaries.tolist(), steps.num_dropped) == ([0, 10_000, 20_000], 1)
        complete = steps_of(trace_of(tmp_path, [*events, *launched("k", 23, 25, 26, 9)]))
        assert (len(complete), complete.num_dropped) == (3, 0)

    def test_the_first_step_begins_where_earlier_work_has_ended(self, tmp_path: Path) -> None:
        """The device still does what was launched before: that is not this step's."""
        events = [*launched("warm-up", 0, 2, 14, 1), step(0, 10, 20), *launched("k", 12, 15, 25, 2)]
        assert windows(tmp_path, events) == [(14, 25)]

    def test_where_own_work_begins_first_so_does_the_step(self, tmp_path: Path) -> None:
        events = [*launched("warm-up", 0, 2, 16, 1), step(0, 10, 20), *launched("k", 12, 15, 25, 2)]
        assert windows(tmp_path, events) == [(10, 25)]

    def test_waits_are_no_work_to_wait_for(self, tmp_path: Path) -> None:
        wait = event("cuda_sync", "Stream Sync", 5, 90, 1007, correlation=1, device=0, stream=7)
        assert windows(tmp_path, [step(0, 0, 10), *launched("k", 1, 2, 3, 1), wait]) == [(0, 10)]

    @given(st.data())
    def test_windows_tile_whatever_the_trace(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        events = []
        for number in range(data.draw(st.integers(1, 4))):
            start = data.draw(st.integers(0, 100))
            events.append(step(number, start, start + data.draw(st.integers(0, 60))))
        for number in range(data.draw(st.integers(0, 6))):
            call = data.draw(st.integers(0, 150))
            begin = call + data.draw(st.integers(0, 50))
            events += launched("k", call, begin, begin + data.draw(st.integers(0, 50)), number)
        trace = trace_of(tmp_path_factory.getbasetemp(), events)
        steps = steps_of(trace)
        assert (np.diff(steps.boundaries) >= 0).all()
        assert 1 <= len(steps) <= len(trace.host_rows(r"^ProfilerStep#", Kind.ANNOTATION))


@needs_traces
def test_a_graph_s_steps_last_as_long_as_the_device_needs() -> None:
    """The annotations of the graph capture are 0.8 ms apart, its steps take 8.9 ms without the profiler."""
    steps = steps_of(read_trace(trace_file("h200_resnet50_cuda_graph")))
    assert len(steps) == 5
    lengths = np.diff(steps.boundaries)
    assert ((lengths[1:] > 8.8e6) & (lengths[1:] < 9.4e6)).all()

"""Time of each `nn.Module`, forward and backward, in traces that have call stacks."""

from pathlib import Path

import pytest
from trace_events import MAIN, OTHER, Event, event, launched, operator, step, trace_of, write_trace

from steptune.dashboards.trace_page import render_trace_page
from steptune.tuner.profiling.analysis import analyse_file, analyse_rank, analyse_trace, analyse_traces
from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.details import DetailsFile, matched, read_details
from steptune.tuner.profiling.launches import find_launches
from steptune.tuner.profiling.modules import find_modules
from steptune.tuner.profiling.operator_calls import operator_calls
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.source_lines import is_user_frame


def frame(name: str, start: float, end: float) -> Event:
    return event("python_function", name, start, end)


def numbered(name: str, start: float, end: float, sequence: int, forward_thread: int, thread: int = MAIN) -> Event:
    args = {"Sequence number": sequence, "Fwd thread id": forward_thread}
    return event("cpu_op", name, start, end, thread, **args)


def training() -> list[Event]:
    """Two layers in a model: 30 and 20 us of kernels forward, 60 and 40 backward on another thread, 10 of an update."""
    return [
        step(0, 0, 1000),
        frame("nn.Module: Net_0", 10, 200),
        frame("net.py(7): forward", 11, 199),
        frame("nn.Module: Linear_0", 20, 100),
        numbered("aten::linear", 25, 90, 4, 0),
        numbered("aten::addmm", 30, 85, 5, 0),
        *launched("gemm", 40, 50, 80, 1),
        frame("nn.Module: Linear_1", 110, 190),
        numbered("aten::addmm", 120, 180, 6, 0),
        *launched("gemm", 130, 140, 160, 2),
        numbered("autograd::engine::evaluate_function: AddmmBackward0", 300, 400, 6, 1, OTHER),
        numbered("AddmmBackward0", 310, 390, 6, 1, OTHER),
        operator("aten::mm", 320, 380, OTHER),
        *launched("gemm", 330, 340, 380, 3, OTHER),
        numbered("autograd::engine::evaluate_function: AddmmBackward0", 410, 500, 5, 1, OTHER),
        operator("aten::mm", 420, 490, OTHER),
        *launched("gemm", 430, 440, 500, 4, OTHER),
        operator("aten::_fused_sgd_", 600, 700),
        *launched("multi_tensor_apply", 610, 620, 630, 5),
    ]


def test_time_goes_to_the_module_and_those_around_it(tmp_path: Path) -> None:
    analysis = analyse_rank(write_trace(tmp_path / "trace.json", training()))
    found = {one.name: (one.count, one.forward_ns, one.backward_ns, one.own_ns) for one in analysis.modules}
    assert found == {
        "Net_0": (1, 50_000, 100_000, 0),
        "Net_0.Linear_0": (1, 30_000, 60_000, 90_000),
        "Net_0.Linear_1": (1, 20_000, 40_000, 60_000),
    }
    assert next(iter(found)) == "Net_0"


def test_a_module_says_what_its_own_operators_run(tmp_path: Path) -> None:
    modules = {m.name: m for m in analyse_trace(trace_of(tmp_path, training()), "net.json")[0].modules}
    first = modules["Net_0.Linear_0"]
    assert (first.num_launches, first.kernels) == (2, ("gemm",))
    # Without shapes neither bytes nor types are known; the model itself runs nothing.
    assert (first.num_bytes, first.dtypes) == (None, ())
    assert (modules["Net_0"].num_launches, modules["Net_0"].kernels) == (0, ())


def test_gaps_and_operators_name_the_module_and_the_line(tmp_path: Path) -> None:
    analysis = analyse_rank(write_trace(tmp_path / "trace.json", training()))
    longest = max(analysis.gaps["cuda:0"].longest, key=lambda gap: gap.length_ns * (gap.operator_after == "aten::mm"))
    assert longest.module == "Net_0.Linear_1 (backward)"
    assert longest.source == "net.py(7): forward"
    modules = {one.name: one.module for one in analysis.operators}
    assert modules["aten::addmm"] == "Net_0.Linear_0"
    assert modules["aten::_fused_sgd_"] == ""


def test_a_gradient_inside_of_another_keeps_its_own_module(tmp_path: Path) -> None:
    """An operator belongs to the nearest one around it that has a number."""
    trace = trace_of(tmp_path, training())
    calls = operator_calls(trace, find_launches(trace), trace.span)
    modules = find_modules(trace, calls)
    rows = [row for row in range(len(trace.host)) if trace.names[trace.host.name[row]] == "aten::mm"]
    assert [modules.name(row) for row in rows] == ["Net_0.Linear_1 (backward)", "Net_0.Linear_0 (backward)"]


def test_without_call_stacks_there_are_no_modules(tmp_path: Path) -> None:
    events = [one for one in training() if one["cat"] != "python_function"]
    analysis = analyse_rank(write_trace(tmp_path / "trace.json", events))
    assert analysis.modules == ()
    assert all(not gap.module for gap in analysis.gaps["cuda:0"].longest)


def test_the_page_has_a_table_of_modules(tmp_path: Path) -> None:
    page = render_trace_page(analyse_traces([write_trace(tmp_path / "trace.json", training())]))
    assert "Net_0.Linear_1" in page
    assert "Time of each module's operators on the device per step" in page


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_modules_of_a_real_capture_of_a_cpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Sequential(torch.nn.Linear(64, 8)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as recorder:
        model(torch.randn(256, 64)).sum().backward()
    path = tmp_path / "trace.json"
    recorder.export_chrome_trace(str(path))
    modules = {one.name.rpartition(".")[2]: one for one in analyse_rank(path).modules}
    assert len(modules) == 4
    assert all(one.forward_ns > 0 and one.backward_ns > 0 for one in modules.values())
    outer = next(one for one in modules.values() if "." not in one.name)
    assert outer.forward_ns >= sum(one.forward_ns for name, one in modules.items() if name.startswith("Linear"))


class TestSecondWindow:
    """A window with stacks and shapes says where the operators of another one are."""

    def measured(self, folder: Path) -> Path:
        """Two steps without stacks, whose first operator is called once more in the second."""
        events: list[Event] = []
        for number in range(2):
            shift = number * 1000
            for one in training():
                if one["cat"] == "python_function":
                    continue
                args = {
                    key: value for key, value in one["args"].items() if key not in ("Sequence number", "Fwd thread id")
                }
                args |= {"correlation": args["correlation"] + 100 * number} if args.get("correlation", -1) >= 0 else {}
                name = f"ProfilerStep#{number}" if one["name"].startswith("ProfilerStep") else one["name"]
                events.append({**one, "name": name, "ts": one["ts"] + shift, "args": args})
        return write_trace(folder / "measured.json", [*events, operator("aten::_fused_sgd_", 1750, 1760)])

    def detailed(self, folder: Path) -> DetailsFile:
        shapes = {"Input Dims": [[8], [4, 16], [16, 8]], "Input type": ["float", "float", "float"]}
        events = [one for one in training() if one["cat"] in ("python_function", "cpu_op")]
        events = [{**one, "args": {**one["args"], **shapes}} if one["name"] == "aten::addmm" else one for one in events]
        return DetailsFile(path=write_trace(folder / "details.json", events), num_steps=1)

    def test_modules_lines_and_shapes_come_from_it(self, tmp_path: Path) -> None:
        analysis = analyse_file(self.measured(tmp_path), None, 20, self.detailed(tmp_path)).analysis
        found = {one.name: (one.count, one.forward_ns, one.backward_ns) for one in analysis.modules}
        assert found["Net_0"] == (2, 100_000, 200_000)
        assert found["Net_0.Linear_1"] == (2, 40_000, 80_000)
        addmm = next(one for one in analysis.operators if one.name == "aten::addmm")
        assert (addmm.shapes, addmm.source) == ("float[8], float[4, 16], float[16, 8]", "net.py(7): forward")
        assert addmm.flops == 2 * 2 * 2 * 4 * 16 * 8

    def test_no_time_is_taken_from_it(self, tmp_path: Path) -> None:
        path = self.measured(tmp_path)
        alone = analyse_file(path, None, 20).analysis
        joined = analyse_file(path, None, 20, self.detailed(tmp_path)).analysis
        assert joined.breakdowns[0].categories == alone.breakdowns[0].categories
        assert joined.first_step_ns == alone.first_step_ns

    def test_an_operator_that_is_called_more_often_is_not_matched(self, tmp_path: Path) -> None:
        details = read_details(self.detailed(tmp_path))
        trace = read_trace(self.measured(tmp_path))
        match = matched(trace, link(trace).steps, details)
        rows = [row for row in range(len(trace.host)) if trace.names[trace.host.name[row]] == "aten::_fused_sgd_"]
        assert [match[row] >= 0 for row in rows] == [True, False, False]


def test_a_finding_names_the_operator_its_line_and_its_module(tmp_path: Path) -> None:
    """Ampere's kernels of FP32 products use no tensor cores; the operator says where they come from."""
    events = [{**one, "name": "ampere_sgemm_128x64"} if one["name"] == "gemm" else one for one in training()]
    types = {"Input Dims": [[8], [4, 16], [16, 8]], "Input type": ["float", "float", "float"]}
    events = [{**one, "args": {**one["args"], **types}} if one["name"] == "aten::addmm" else one for one in events]
    device = [{"id": 0, "name": "NVIDIA A100", "computeMajor": 8, "computeMinor": 0}]
    analysis = analyse_rank(write_trace(tmp_path / "trace.json", events, deviceProperties=device))
    finding = next(one for one in analysis.findings if one.rule == "idle_tensor_cores")
    assert finding.evidence["at_1"] == "aten::mm: 0.1 ms in 2 calls (net.py(7): forward, Net_0.Linear_1 (backward))"


def test_several_ranks_have_their_details(tmp_path: Path) -> None:
    """Traces of several ranks are read in processes of their own."""
    window = TestSecondWindow()
    paths = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        paths.append(window.measured(folder))
    details = {path: window.detailed(path.parent) for path in paths}
    analysis = analyse_traces(paths, details=details)
    assert [bool(rank.modules) for rank in analysis.ranks] == [True, True]


@pytest.mark.parametrize(
    ("name", "is_users"),
    [
        ("train.py(54): main", True),
        ("multiprocessing_train.py(12): main", True),
        ("threading_utils/pool.py(12): work", True),
        ("profile.py(3): main", True),
        ("/home/me/copy.py(3): main", True),
        ("copy.py(128): deepcopy", False),
        ("json/decoder.py(337): decode", False),
        ("threading.py(975): _bootstrap", False),
        ("torch/nn/modules/linear.py(116): forward", False),
        ("/opt/env/lib/python3.11/site-packages/apex/amp.py(3): step", False),
        ("transformers/trainer.py(2500): training_step", False),
        ("steptune/tuner/trials/stepper.py(80): step", False),
        ("<string>(1): <module>", False),
    ],
)
def test_a_path_says_whether_a_frame_is_the_users(name: str, is_users: bool) -> None:
    """torch.profiler cuts off folders from which Python imports, so that installed packages begin with their name."""
    assert is_user_frame(name) == is_users


def test_what_is_computed_again_for_a_gradient_is_of_its_own_module(tmp_path: Path) -> None:
    """Checkpoints of activations: the frames of the second time stand inside of the gradient, and below no model."""
    again = [
        step(0, 0, 1000),
        frame("nn.Module: Net_0", 10, 200),
        frame("nn.Module: Block_0", 12, 195),
        frame("nn.Module: Linear_0", 20, 100),
        numbered("aten::addmm", 30, 85, 5, 0),
        *launched("gemm", 40, 50, 80, 1),
        frame("nn.Module: Linear_1", 110, 190),
        numbered("aten::addmm", 120, 180, 6, 0),
        *launched("gemm", 130, 140, 160, 2),
        numbered("autograd::engine::evaluate_function: AddmmBackward0", 300, 600, 6, 1),
        frame("nn.Module: Block_0", 302, 395),
        frame("nn.Module: Linear_0", 304, 340),
        numbered("aten::addmm", 306, 338, 7, 0),
        *launched("gemm", 310, 320, 350, 3),
        frame("nn.Module: Linear_1", 350, 390),
        numbered("aten::addmm", 352, 388, 8, 0),
        *launched("gemm", 360, 370, 390, 4),
        operator("aten::mm", 420, 580),
        *launched("gemm", 430, 440, 500, 5),
        numbered("autograd::engine::evaluate_function: AddmmBackward0", 700, 800, 5, 1),
        operator("aten::mm", 710, 790),
        *launched("gemm", 720, 730, 800, 6),
    ]
    analysis = analyse_rank(write_trace(tmp_path / "trace.json", again))
    found = {one.name: (one.forward_ns, one.backward_ns, one.own_ns) for one in analysis.modules}
    assert found == {
        "Net_0": (50_000, 180_000, 0),
        "Net_0.Block_0": (50_000, 180_000, 0),
        "Net_0.Block_0.Linear_0": (30_000, 100_000, 130_000),
        "Net_0.Block_0.Linear_1": (20_000, 80_000, 100_000),
    }

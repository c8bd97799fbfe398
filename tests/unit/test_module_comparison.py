"""Modules of two runs, and the cause of a change."""

import pytest
from analysed import make_analysis, make_breakdown, make_rank

from steptune.dashboards.trace_page import render_trace_page
from steptune.tuner.profiling.comparison import compare
from steptune.tuner.records import Breakdown
from steptune.tuner.trace_records import ModuleDifference, ModuleStats, TraceAnalysis

TWO_STEPS: Breakdown = make_breakdown([{"compute_matmul": 1000}] * 2)


def module(**fields) -> ModuleStats:
    known = {
        "name": "Net_0.Linear_0",
        "count": 2,
        "forward_ns": 400,
        "backward_ns": 600,
        "own_ns": 1000,
        "num_launches": 8,
        "kernels": ("gemm", "add"),
        "num_bytes": 100.0,
        "dtypes": ("float",),
    }
    return ModuleStats(**(known | fields))


def run(*modules: ModuleStats) -> TraceAnalysis:
    return make_analysis(make_rank(TWO_STEPS, modules=modules))


def difference(**fields) -> ModuleDifference:
    [found] = compare(run(module()), run(module(own_ns=400, **fields))).modules
    return found


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({}, "the same kernels take a different time"),
        ({"num_launches": 4}, "2 launches a step instead of 4"),
        ({"kernels": ("gemm_fused",)}, "other kernels: gemm_fused instead of gemm, add"),
        ({"num_bytes": 50.0}, "moves 0.50 times the bytes"),
        ({"num_bytes": None}, "the same kernels take a different time"),
        (
            {"dtypes": ("bfloat16",), "num_bytes": 50.0},
            "computes matmuls in bfloat16 instead of float; moves 0.50 times the bytes",
        ),
    ],
)
def test_a_change_has_its_cause(fields, cause):
    found = difference(**fields)
    assert (found.before_ns, found.after_ns, found.change_ns, found.cause) == (500, 200, -300, cause)


def test_modules_of_one_side_are_named():
    before, after = run(module(), module(name="Net_0.Old_0")), run(module(), module(name="Net_0.New_0", own_ns=10))
    causes = {found.name: found.cause for found in compare(before, after).modules}
    assert causes == {"Net_0.Old_0": "not there after", "Net_0.New_0": "not there before"}


def test_without_call_stacks_on_both_sides_there_is_nothing_to_say():
    assert compare(run(module()), run()).modules == ()


def test_the_page_shows_them():
    compared = compare(run(module()), run(module(own_ns=400, num_launches=4)))
    page = render_trace_page(run(module()), compared)
    assert "2 launches a step instead of 4" in page

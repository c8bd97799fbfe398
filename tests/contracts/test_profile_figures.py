"""Every figure in the tables of a trace's page is that of its record, and the terminal's is the same."""

from __future__ import annotations

import io
import re
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from steptune.dashboards.trace_info import get_findings_info
from steptune.dashboards.trace_page import render_trace_page
from steptune.service.cli.trace_summary import print_analysis
from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.records import Breakdown
from steptune.tuner.trace_records import RankAnalysis, TraceAnalysis

CAPTURES = Path(__file__).parents[1] / "captures"
NAMES = ("h100_detailed", "h200_launch_bound", "h200_input_bound")
SCALES = {"ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9, "%": 0.01, "": 1.0}
ROUNDING = 0.006
"""Three significant digits."""
LEAST_SHARE = 0.0006
"""Shares have one decimal place below ten percent."""


@pytest.fixture(scope="module", params=NAMES)
def analysis(request: pytest.FixtureRequest) -> TraceAnalysis:
    return analyse_traces([CAPTURES / f"{request.param}.json.gz"], top=60)


@pytest.fixture(scope="module")
def tables(analysis: TraceAnalysis) -> dict[tuple[str, ...], list[list[str]]]:
    """Rows of cells by the headings of their table."""
    page = without_scripts(analysis)
    found = {}
    for table in re.findall(r"<table.*?</table>", page, re.DOTALL):
        rows = [
            re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        ]
        headings = tuple(map(text_of, re.findall(r'<th scope="col"[^>]*>(.*?)</th>', table, re.DOTALL)))
        found[headings] = [[text_of(cell) for cell in row] for row in rows if row]
    return found


def without_scripts(analysis: TraceAnalysis) -> str:
    return re.sub(r"<(script|style).*?</\1>", "", render_trace_page(analysis), flags=re.DOTALL)


def page_of(analysis: TraceAnalysis) -> str:
    return text_of(without_scripts(analysis))


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html))).strip()


def number_of(text: str) -> float:
    """The number that a cell shows, in nanoseconds, or as a share."""
    found = re.fullmatch(r"([\d,.]+) ?(ns|µs|ms|s|%|)", text)
    assert found, f"{text!r} is no figure"
    return float(found[1].replace(",", "")) * SCALES[found[2]]


def table(tables: dict[tuple[str, ...], list[list[str]]], *headings: str) -> list[list[str]]:
    """The table whose headings begin like this."""
    return next(rows for found, rows in tables.items() if found[: len(headings)] == headings)


def assert_shown(cell: str, value: float, least: float = 0.0) -> None:
    assert number_of(cell) == pytest.approx(value, rel=ROUNDING, abs=least), cell


def only(analysis: TraceAnalysis) -> tuple[RankAnalysis, Breakdown]:
    return analysis.ranks[0], analysis.ranks[0].breakdowns[0]


def test_categories(analysis, tables):
    _, breakdown = only(analysis)
    rows = table(tables, "Category", "per step", "share")
    *rows, total = rows
    times = [number_of(row[1]) for row in rows]
    assert_shown(total[1], sum(breakdown.per_step_ns.values()))
    largest = sorted(breakdown.per_step_ns.values(), reverse=True)
    for shown, time in zip(sorted(times, reverse=True), largest, strict=False):
        assert shown == pytest.approx(time, rel=ROUNDING)
    step_ns = sum(breakdown.per_step_ns.values())
    for time, row in zip(times, rows, strict=True):
        assert_shown(row[2], time / step_ns, least=0.006)
    assert sum(times) == pytest.approx(step_ns, rel=ROUNDING)


def test_kernels(analysis, tables):
    rank, breakdown = only(analysis)
    rows = table(tables, "per step", "share", "runs a step", "mean", "occupancy", "Kernel")
    assert len(rows) == len(rank.kernels)
    for row, kernel in zip(rows, rank.kernels, strict=True):
        assert_shown(row[0], kernel.total_ns / breakdown.num_steps)
        assert_shown(row[1], kernel.share, least=LEAST_SHARE)
        assert_shown(row[2], kernel.count / breakdown.num_steps, least=0.005)
        assert_shown(row[3], kernel.mean_ns)


def test_operators(analysis, tables):
    rank, breakdown = only(analysis)
    rows = table(tables, "Operator", "device, per step", "host", "calls")
    for row, operator in zip(rows, rank.operators, strict=True):
        assert row[0].startswith(operator.name)
        assert_shown(row[1], operator.device_ns / breakdown.num_steps)
        assert_shown(row[2], operator.host_ns / breakdown.num_steps)
        assert_shown(row[3], operator.count / breakdown.num_steps, least=0.005)


def test_modules(analysis, tables):
    rank, breakdown = only(analysis)
    rows = table(tables, "Module", "forward", "backward", "own", "calls") if rank.modules else []
    for row, module in zip(rows, rank.modules, strict=True):
        assert_shown(row[1], module.forward_ns / breakdown.num_steps)
        assert_shown(row[2], module.backward_ns / breakdown.num_steps)
        assert_shown(row[3], module.own_ns / breakdown.num_steps)


def test_what_ifs(analysis, tables):
    rank, _ = only(analysis)
    rows = table(tables, "step time", "if", "gain")
    printed = terminal(analysis)
    for row, what_if in zip(rows, rank.what_ifs, strict=True):
        assert_shown(row[0], what_if.step_time_ns)
        assert row[1] == f"{what_if.scenario} ({'replayed' if what_if.replayed else 'at best'})"
        assert float(row[2].removesuffix("×")) == pytest.approx(what_if.gain, rel=ROUNDING)
        assert re.search(rf"{re.escape(row[0])} +{re.escape(what_if.scenario)}.* {re.escape(row[2])}", printed)


def test_findings_save_what_their_records_say(analysis):
    shown, printed = page_of(analysis), terminal(analysis)
    assert analysis.findings
    for finding, advice in zip(analysis.findings, get_findings_info(analysis), strict=True):
        assert finding.message in shown
        assert finding.message in printed
        if "expected" in finding.evidence:
            assert f"{finding.evidence['expected']:.1%}" in advice.gain.replace(" %", "%")
        assert advice.gain in printed


def test_the_terminal_has_the_times_of_the_page(analysis, tables):
    printed = terminal(analysis)
    for row in table(tables, "per step", "share", "runs a step", "mean", "occupancy", "Kernel")[:5]:
        assert re.search(rf"{re.escape(row[0])} +{re.escape(row[1])} ", printed), row
    for row in table(tables, "Operator", "device, per step", "host", "calls")[:5]:
        assert re.search(rf"{re.escape(row[1])} +{re.escape(row[2])} ", printed), row


def terminal(analysis: TraceAnalysis) -> str:
    console = Console(width=300, record=True, file=io.StringIO())
    print_analysis(console, analysis, 60)
    return console.export_text()

"""The analysis of a trace as one HTML file: it loads nothing, so it can be mailed, archived and read offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dashboards import theme, units
from dashboards.templating import templates
from dashboards.trace_figures import plot_gaps, plot_kernels, plot_memory, plot_steps, plot_timelines
from dashboards.trace_info import (
    device_label,
    get_findings_info,
    get_gaps_info,
    get_late_ns,
    get_overlapped_info,
    get_phases_info,
    get_ranks_info,
    get_steps_info,
    get_trace_breakdown_info,
    get_trace_headline,
    get_variation_info,
    is_rescaled,
    main_rank,
)
from tuner.trace_records import Comparison, RankAnalysis, Timeline, TraceAnalysis

MAX_STEPS = 24
"""Bars of the figure of steps; what is beyond them is in the summary."""


def render_trace_page(analysis: TraceAnalysis, comparison: Comparison | None = None, *, top: int = 20) -> str:
    """One self-contained HTML page."""
    template = templates().get_template("trace.html")
    return template.render(plotly_js=get_plotlyjs(), **trace_context(analysis, comparison, top=top))


def trace_context(analysis: TraceAnalysis, comparison: Comparison | None = None, *, top: int = 20) -> dict[str, Any]:
    """Everything that the template shows, as data."""
    rank = main_rank(analysis)
    kernels = get_kernels_info(rank, top)
    return {
        "headline": get_trace_headline(analysis),
        "names": [Path(r.file).name for r in analysis.ranks],
        "findings": get_findings_info(analysis),
        "breakdown": list(get_trace_breakdown_info(analysis).itertuples()),
        "phases": list(get_phases_info(analysis).itertuples()),
        "overlapped": get_overlapped_info(analysis),
        "late_ns": get_late_ns(analysis),
        "over": f", over its {len(rank.breakdowns)} devices" if len(rank.breakdowns) > 1 else "",
        "beside": ", as profiled" if is_rescaled(analysis) else "",
        "ranks": list(get_ranks_info(analysis).itertuples()) if len(analysis.ranks) > 1 else [],
        "variation": list(get_variation_info(analysis).itertuples()),
        "rank": rank,
        "on_device": any(breakdown.device != "cpu" for breakdown in rank.breakdowns),
        "several": len(analysis.ranks) > 1,
        "num_steps": rank.breakdowns[0].num_steps,
        "kernels": list(kernels.itertuples()),
        "operators": rank.operators[:top],
        "collectives": (analysis.collectives or rank.collectives)[:top],
        "comparison": comparison,
        "colour": theme.category_colour,
        "title": theme.category_title,
        "figures": _figures(analysis, rank, kernels),
    }


def get_kernels_info(rank: RankAnalysis, top: int) -> pd.DataFrame:
    """Kernels with the most time: `name`, `short`, `category`, `count` and `ms` per step, `share`, `mean_ns`."""
    num_steps = rank.breakdowns[0].num_steps
    rows = [
        (
            k.name,
            units.kernel_name(k.name),
            k.category,
            k.count / num_steps,
            k.total_ns / num_steps / 1e6,
            k.share,
            k.mean_ns,
            k.occupancy,
        )
        for k in rank.kernels[:top]
    ]
    columns = ["name", "short", "category", "count", "ms", "share", "mean_ns", "occupancy"]
    return pd.DataFrame(rows, columns=columns)


def labelled_timelines(analysis: TraceAnalysis) -> dict[str, Timeline]:
    """By device, with the rank where there are several."""
    return {device_label(analysis, timeline): timeline for rank in analysis.ranks for timeline in rank.timelines}


def _figures(analysis: TraceAnalysis, rank: RankAnalysis, kernels: pd.DataFrame) -> dict[str, str]:
    """By the id of the element that shows it; only those that have something to show."""
    figures: dict[str, go.Figure] = {}
    steps = get_steps_info(analysis)
    if len(steps):
        bars = steps.groupby(["device", "step"], sort=False).ngroup()
        figures["steps-figure"] = plot_steps(steps[bars < MAX_STEPS])
    timelines = labelled_timelines(analysis)
    if timelines:
        figures["timeline-figure"] = plot_timelines(timelines)
    gaps = get_gaps_info(analysis)
    if len(gaps):
        figures["gaps-figure"] = plot_gaps(gaps)
    if len(kernels):
        figures["kernels-figure"] = plot_kernels(kernels)
    for number, memory in enumerate(rank.memory):
        if memory.timeline:
            figures[f"memory-figure-{number}"] = plot_memory(memory)
    return {name: figure.to_json() for name, figure in figures.items()}

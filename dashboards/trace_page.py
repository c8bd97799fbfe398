"""The analysis of a trace as one HTML file: it loads nothing, so it can be mailed, archived and read offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptune.dashboards import units
from steptune.dashboards.communication import (
    get_communication_info,
    get_groups_info,
    plot_bandwidth,
    plot_exposure,
    plot_waits,
)
from steptune.dashboards.figures import Figure
from steptune.dashboards.flame import get_module_bars, get_stack_bars, plot_flame
from steptune.dashboards.lanes import TimelineInfo, get_long_gaps_info, get_timeline_info
from steptune.dashboards.launch_queue import get_queue_info, plot_queue
from steptune.dashboards.rank_groups import grouped_ranks, grouped_variation
from steptune.dashboards.roofline import get_roofline_info
from steptune.dashboards.site import STANDALONE
from steptune.dashboards.templating import figures_json, render
from steptune.dashboards.trace_figures import plot_gaps, plot_kernels, plot_memory, plot_memory_classes, plot_steps
from steptune.dashboards.trace_info import (
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
)
from steptune.dashboards.treemap import get_treemap_info, plot_treemap
from steptune.tuner.profiling.rank_comparison import main_rank
from steptune.tuner.trace_records import Comparison, RankAnalysis, TraceAnalysis

if TYPE_CHECKING:
    import pandas as pd


SCRIPTS = ("lanes.js", "perfetto.js")
TOP = 20
"""Maximum number of bars in a figure."""
MAX_ROWS = 500
"""Maximum number of rows in a searchable table."""
MAX_STEPS = 24
"""Maximum number of bars in the figure of steps. Steps beyond it are included only in the summary."""


def render_trace_page(analysis: TraceAnalysis, comparison: Comparison | None = None) -> str:
    """Render the analysis of a trace as one self-contained HTML page."""
    trace = trace_context(analysis, get_timeline_info(analysis))
    names = [Path(rank.file).name for rank in analysis.ranks]
    return render(
        "trace.html",
        STANDALONE,
        title=", ".join(names),
        names=names,
        comparison=comparison,
        scripts=SCRIPTS,
        trace=trace,
        peaks=(),
        figures=figures_json(trace_figures(analysis)),
    )


def trace_context(analysis: TraceAnalysis, timeline: TimelineInfo | None, *, top: int = MAX_ROWS) -> dict[str, Any]:
    """Return the data of `trace_sections.html`.

    Args:
        timeline: Timeline of the lanes; None where no lanes were kept.
    """
    rank = main_rank(analysis)
    findings, gaps = get_findings_info(analysis), get_long_gaps_info(rank)
    return {
        "headline": get_trace_headline(analysis),
        "findings": findings,
        "breakdown": list(get_trace_breakdown_info(analysis).itertuples()),
        "phases": list(get_phases_info(analysis).itertuples()),
        "overlapped": get_overlapped_info(analysis),
        "late_ns": get_late_ns(analysis),
        "over": f", over its {len(rank.breakdowns)} devices" if len(rank.breakdowns) > 1 else "",
        "beside": ", as profiled" if is_rescaled(analysis) else "",
        "ranks": list(grouped_ranks(get_ranks_info(analysis)).itertuples()) if len(analysis.ranks) > 1 else [],
        "variation": list(grouped_variation(get_variation_info(analysis)).itertuples()),
        "rank": rank,
        "on_device": any(breakdown.device != "cpu" for breakdown in rank.breakdowns),
        "several": len(analysis.ranks) > 1,
        "num_ranks": max(rank.num_ranks, len(analysis.ranks)),
        "num_steps": rank.breakdowns[0].num_steps,
        "timeline": timeline,
        "long_gaps": gaps,
        "finding_of_category": {
            category: number for number, one in reversed([*enumerate(findings)]) for category in one.categories
        },
        "gap_of_finding": {
            number: place
            for number, one in enumerate(findings)
            for place, gap in reversed([*enumerate(gaps)])
            if gap.category in one.categories
        },
        "kernels": list(get_kernels_info(rank, top).itertuples()),
        "operators": rank.operators[:top],
        "modules": rank.modules[:top],
        "roofline": get_roofline_info(rank.roofline, rank.breakdowns, top),
        "collectives": list(get_communication_info(analysis)[:top].itertuples()),
        "groups": get_groups_info(analysis),
    }


def trace_figures(analysis: TraceAnalysis, *, top: int = TOP) -> dict[str, Figure]:
    """Return the figures by name; figures without data are left out."""
    rank = main_rank(analysis)
    flames = {"by_module": get_module_bars(rank), "by_stack": get_stack_bars(rank)}
    figures = {name: plot_flame(bars) for name, bars in flames.items() if bars}
    steps = get_steps_info(analysis, top=MAX_STEPS)
    if len(steps):
        figures["steps"] = plot_steps(steps)
    areas = get_treemap_info(rank)
    if areas:
        figures["treemap"] = plot_treemap(areas)
    collectives = get_communication_info(analysis)
    for name, info, plot in (
        ("gaps", get_gaps_info(analysis), plot_gaps),
        ("kernels", get_kernels_info(rank, top), plot_kernels),
        ("queue", get_queue_info(rank), plot_queue),
        ("exposure", collectives[:top], plot_exposure),
    ):
        if len(info):
            figures[name] = plot(info)
    if collectives["bus_bytes_per_s"].notna().any():
        figures["bandwidth"] = plot_bandwidth(collectives)
    if analysis.waits:
        figures["waits"] = plot_waits(grouped_ranks(get_ranks_info(analysis)))
    for number, memory in enumerate(rank.memory):
        if memory.timeline:
            figures[f"memory-{number}"] = plot_memory_classes(memory) if memory.classes else plot_memory(memory)
    return figures


def get_kernels_info(rank: RankAnalysis, top: int) -> pd.DataFrame:
    """Return the kernels with the most time: `name`, `short`, `category`, `count` and `ms` per step, `share`,
    `mean_ns`.
    """
    import pandas as pd

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

"""Figures of a trace's analysis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.tuner.trace_records import MemoryStats

if TYPE_CHECKING:
    import pandas as pd


MEMORY_COLOURS = ("#1f6fd1", "#cc4b1c", "#8457c2", "#2f9e6e", "#d9a514", theme.MUTED)
"""Colours of the classes of tensors, in their order."""


def plot_steps(info: pd.DataFrame) -> Figure:
    """Draw each step of each device as a horizontal bar, stacked by category."""
    several = info["device"].nunique() > 1
    parts: dict[str, tuple[list[str], list[float]]] = {}
    bars: dict[str, None] = {}
    for device, step, category, ms in zip(info["device"], info["step"], info["category"], info["ms"], strict=True):
        label = f"{device}, step {step}" if several else f"step {step}"
        bars[label] = None
        labels, lengths = parts.setdefault(category, ([], []))
        labels.append(label)
        lengths.append(ms)
    figure = theme.new_figure(height=90 + 26 * len(bars), barmode="stack", bargap=0.25)
    order = {i.category.value: number for number, i in enumerate(theme.categories_in_order())}
    for category in sorted(parts, key=lambda name: (order.get(name, len(order)), name)):
        labels, lengths = parts[category]
        figure.add_bar(
            name=theme.plain(theme.category_title(category)),
            orientation="h",
            y=labels,
            x=lengths,
            marker={"color": theme.category_colour(category), "line": {"width": 0}},
            hovertemplate="%{fullData.name}<br><b>%{x:.3f} ms</b><extra>%{y}</extra>",
            showlegend=False,
        )
    figure.update_xaxes(title={"text": "milliseconds, as profiled"})
    figure.update_yaxes(
        autorange="reversed", showgrid=False, ticklabelstandoff=8, categoryorder="array", categoryarray=list(bars)
    )
    return figure


def plot_gaps(info: pd.DataFrame) -> Figure:
    """Draw the time per step that is spent in gaps, one bar for each range of gap lengths, with the number of gaps."""
    several = info["device"].nunique() > 1
    figure = theme.new_figure(height=260, barmode="group", bargap=0.3, showlegend=several)
    for number, (device, rows) in enumerate(info.groupby("device", sort=False)):
        figure.add_bar(
            name=theme.plain(str(device)),
            x=[length.replace(" us", " µs") for length in rows["length"]],
            y=list(rows["ms"]),
            text=["" if several else _count(count) for count in rows["count"]],
            textposition="outside",
            cliponaxis=False,
            customdata=[_count(count) for count in rows["count"]],
            marker={"color": (theme.NEUTRAL, theme.GOOD, theme.BAD, theme.MUTED)[number % 4]},
            hovertemplate="%{x}<br><b>%{y:.3f} ms</b> in %{customdata} a step<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title={"text": "gap length"}, showgrid=False)
    figure.update_yaxes(title={"text": "ms per step"}, rangemode="tozero")
    figure.update_layout(margin={"t": 24})
    return figure


def _count(per_step: float) -> str:
    if per_step == 0:
        return ""
    return units.counted(round(per_step), "gap") if per_step >= 0.95 else "under 1 gap"


def plot_memory(memory: MemoryStats) -> Figure:
    """Plot allocated and reserved memory over time."""
    figure = theme.new_figure(height=260)
    times = [time / 1e6 for time, _, _ in memory.timeline]
    for name, column, colour in (("reserved", 2, theme.MUTED), ("allocated", 1, theme.GOOD)):
        # A CPU's allocator reserves nothing.
        if not any(point[column] for point in memory.timeline):
            continue
        figure.add_scatter(
            name=name,
            x=times,
            y=[point[column] / (1 << 20) for point in memory.timeline],
            mode="lines",
            line={"color": colour, "width": 1.5, "shape": "hv"},
            hovertemplate="%{x:.2f} ms: %{y:,.1f} MiB<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title={"text": "milliseconds"})
    figure.update_yaxes(title={"text": "MiB"}, rangemode="tozero")
    return figure


def plot_memory_classes(memory: MemoryStats) -> Figure:
    """Plot the memory of each class of tensors over time, stacked."""
    figure = theme.new_figure(height=260)
    for place, (one, colour) in enumerate(zip(memory.classes, MEMORY_COLOURS, strict=False), 1):
        if one.peak_bytes:
            figure.add_scatter(
                name=one.name,
                x=[point[0] / 1e6 for point in memory.class_timeline],
                y=[point[place] / (1 << 20) for point in memory.class_timeline],
                mode="lines",
                line={"color": colour, "width": 0.5, "shape": "hv"},
                stackgroup="classes",
                hovertemplate="%{x:.2f} ms: %{y:,.1f} MiB<extra>%{fullData.name}</extra>",
            )
    figure.update_xaxes(title={"text": "milliseconds, in a window that recorded every allocation"})
    figure.update_yaxes(title={"text": "MiB"}, rangemode="tozero")
    return figure


def plot_kernels(info: pd.DataFrame) -> Figure:
    """Draw one bar per kernel: its time per step, in the colour of its category."""
    figure = theme.new_figure(height=70 + 24 * len(info), bargap=0.25)
    # Numbers keep names apart that are the same once shortened.
    names = [f"{n}. {theme.plain(_shortened(name))}" for n, name in enumerate(info["short"], 1)]
    figure.add_bar(
        orientation="h",
        y=names,
        x=list(info["ms"]),
        marker={"color": [theme.category_colour(category) for category in info["category"]]},
        customdata=[
            (theme.wrapped(str(name), 90), theme.plain(theme.category_title(category)), f"{count:,.1f}")
            for name, category, count in zip(info["name"], info["category"], info["count"], strict=True)
        ],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br><b>%{x:.3f} ms</b> in %{customdata[2]} runs a step"
        "<extra></extra>",
    )
    figure.update_xaxes(title={"text": "ms per step"})
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=6, tickfont={"size": 11})
    return figure


def _shortened(name: str, width: int = 56) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"

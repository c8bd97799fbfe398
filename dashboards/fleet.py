"""Summary of all studies: the bottlenecks before and after tuning, and the gains of each strategy by bottleneck."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import bdtr

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.templating import figures_json
from steptune.tuner.records import Verdict

NOT_RUN = "not run yet"
FASTER = Verdict.FASTER.value
MIN_STUDIES = 3
"""Minimum number of studies for a reliable median; medians of fewer studies are shown pale."""


class FleetStudies(NamedTuple):
    """Studies with the same hardware, verdict and bottlenecks (None where unknown), counted together. Several instances
    may agree in these; their counts add up.
    """

    hardware: str | None
    verdict: str | None
    bottleneck_before: str | None
    bottleneck_after: str | None
    num_studies: int
    device_seconds: float
    """Total device seconds of the group's studies."""
    gains: tuple[float, ...]
    """Proven gains of the group's studies, as ratios of speeds."""


class FleetParts(NamedTuple):
    """Use of one strategy in the answered studies with a given bottleneck: how often it was tried, and its gains where
    the answer includes it.
    """

    strategy: str
    bottleneck: str | None
    num_studies: int
    num_tried: int
    gains: tuple[float, ...]


class HardwareRow(NamedTuple):
    """Studies on one kind of hardware."""

    hardware: str
    num_studies: int
    num_answers: int
    num_faster: int
    gain: float
    """Median gain of the studies with a proven gain; NaN where there are none."""
    low: float
    high: float
    """Upper end of the 95 % interval of the median; NaN below six studies."""
    num_gains: int
    limit: str
    """Bottleneck that most of the studies had before tuning; empty where unknown."""
    device_hours: float


class LimitRow(NamedTuple):
    """Number of answered studies on one kind of hardware that had a given bottleneck before and after tuning."""

    hardware: str
    bottleneck: str
    num_before: int
    num_after: int


class StrategyRow(NamedTuple):
    """A strategy in the studies that had a given bottleneck before tuning."""

    strategy: str
    bottleneck: str
    num_studies: int
    num_tried: int
    num_parts: int
    """Number of answers that include the strategy."""
    gain: float
    """Median contribution of the strategy in the answers that include it; NaN if there are none."""
    low: float
    high: float
    """Upper end of the 95 % interval of the median; NaN below six answers."""


def get_hardware_info(studies: Iterable[FleetStudies]) -> list[HardwareRow]:
    """Return one row for each kind of hardware, the most used first."""
    by_hardware: dict[str, list[FleetStudies]] = {}
    for group in studies:
        by_hardware.setdefault(group.hardware or NOT_RUN, []).append(group)
    rows = [_hardware_row(hardware, groups) for hardware, groups in by_hardware.items()]
    return sorted(rows, key=lambda row: (-row.num_studies, row.hardware))


def _hardware_row(hardware: str, groups: Sequence[FleetStudies]) -> HardwareRow:
    limits: Counter[str] = Counter()
    for group in groups:
        if group.bottleneck_before:
            limits[group.bottleneck_before] += group.num_studies
    gains = _gains_of_faster(groups)
    gain, low, high = median_interval(gains)
    return HardwareRow(
        hardware,
        num_studies=sum(group.num_studies for group in groups),
        num_answers=sum(group.num_studies for group in groups if group.verdict is not None),
        num_faster=sum(group.num_studies for group in groups if group.verdict == FASTER),
        gain=gain,
        low=low,
        high=high,
        num_gains=len(gains),
        limit=min(limits, key=lambda name: (-limits[name], name), default=""),
        device_hours=sum(group.device_seconds for group in groups) / 3600,
    )


def _gains_of_faster(groups: Iterable[FleetStudies]) -> list[float]:
    return [gain for group in groups if group.verdict == FASTER for gain in group.gains]


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Return the median and its confidence interval. The interval is made of order statistics, which assume no
    distribution, and is NaN for too few values.

    The interval is that of the k-th smallest and k-th largest value, with the largest k for which it holds (Hollander,
    Wolfe and Chicken, "Nonparametric Statistical Methods", section 3.6).
    """
    ordered = sorted(values)
    below = bdtr(np.arange(len(ordered)), len(ordered), 0.5)  # that at most so many lie below the true median
    rank = int((below <= (1 - level) / 2).sum())
    middle = statistics.median(ordered) if ordered else math.nan
    return (middle, ordered[rank - 1], ordered[-rank]) if rank else (middle, math.nan, math.nan)


def get_limits_info(studies: Iterable[FleetStudies]) -> list[LimitRow]:
    """Return one row for each kind of hardware and bottleneck."""
    counts: dict[tuple[str, str], list[int]] = {}
    for group in studies:
        for place, bottleneck in enumerate((group.bottleneck_before, group.bottleneck_after)):
            if bottleneck:
                counts.setdefault((group.hardware or NOT_RUN, bottleneck), [0, 0])[place] += group.num_studies
    order = {name: number for number, name in enumerate(theme.BOTTLENECK_COLOURS)}
    rows = [LimitRow(*key, *found) for key, found in counts.items()]
    return sorted(rows, key=lambda row: (row.hardware, order.get(row.bottleneck, len(order)), row.bottleneck))


def get_strategies_info(parts: Iterable[FleetParts]) -> list[StrategyRow]:
    """Return one row for each strategy and bottleneck; strategies included in the most answers come first."""
    cells: dict[tuple[str, str], list[FleetParts]] = {}
    for part in parts:
        cells.setdefault((part.strategy, part.bottleneck or "unknown"), []).append(part)
    rows = []
    for cell, found in cells.items():
        gains = [gain for part in found for gain in part.gains]
        num_studies, num_tried = sum(part.num_studies for part in found), sum(part.num_tried for part in found)
        rows.append(StrategyRow(*cell, num_studies, num_tried, len(gains), *median_interval(gains)))
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row.strategy] += row.num_parts
    return sorted(rows, key=lambda row: (-totals[row.strategy], row.strategy, row.bottleneck))


def plot_limits(info: Sequence[LimitRow]) -> Figure:
    """Draw two bars for each kind of hardware, on one scale: the shares of its studies by bottleneck, before and after
    tuning.
    """
    labels = {row.hardware: _bar_label(row.hardware) for row in info}
    totals: dict[str, tuple[int, int]] = {}
    for row in info:
        before, after = totals.get(row.hardware, (0, 0))
        totals[row.hardware] = before + row.num_before, after + row.num_after
    figure = theme.new_figure(height=130 + 74 * len(labels), barmode="stack", bargap=0.25)
    for bottleneck in dict.fromkeys(row.bottleneck for row in info):
        colour = theme.BOTTLENECK_COLOURS.get(bottleneck, theme.MUTED)
        names, whens, shares, texts, hovers = [], [], [], [], []
        for row in (row for row in info if row.bottleneck == bottleneck):
            for when, count, total in zip(
                ("before", "after"), (row.num_before, row.num_after), totals[row.hardware], strict=True
            ):
                share = count / total if total else 0.0
                names.append(labels[row.hardware])
                whens.append(when)
                shares.append(100 * share)
                texts.append(str(count) if share >= 0.06 else "")
                hovers.append(f"{units.counted(count, 'study', 'studies')}, {units.percent(share)}")
        figure.add_bar(
            name=theme.plain(bottleneck),
            orientation="h",
            y=[names, whens],
            x=shares,
            text=texts,
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": theme.text_colour_on(colour), "size": 12},
            marker={"color": colour, "line": {"color": "#ffffff", "width": 1}},
            customdata=hovers,
            hovertemplate="%{fullData.name}<br><b>%{customdata}</b><extra></extra>",
        )
    figure.update_xaxes(title={"text": "share of studies with an answer"}, ticksuffix=" %", range=[0, 100])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def _bar_label(hardware: str) -> str:
    return theme.plain(hardware if len(hardware) <= 34 else f"{hardware[:33]}…")


def plot_strategies(info: Sequence[StrategyRow]) -> Figure:
    """Draw a heat map: the median gain of each strategy by the bottleneck of the step."""
    strategies = list(dict.fromkeys(row.strategy for row in info if _num_parts(info, row.strategy)))
    seen = {row.bottleneck for row in info}
    bottlenecks = [name for name in theme.BOTTLENECK_COLOURS if name in seen]
    bottlenecks += sorted(seen - set(bottlenecks))
    cells = {(row.strategy, row.bottleneck): row for row in info}
    gains, texts, hovers = [], [], []
    for strategy in strategies:
        found = [cells.get((strategy, bottleneck)) for bottleneck in bottlenecks]
        gains.append([cell.gain if cell and cell.num_parts else None for cell in found])
        texts.append([units.ratio(cell.gain) if cell and cell.num_parts else "" for cell in found])
        hovers.append([_cell_hover(cell) for cell in found])
    figure = theme.new_figure(height=110 + 30 * max(1, len(strategies)))
    figure.add_heatmap(
        x=[theme.plain(name) for name in bottlenecks],
        y=[theme.plain(units.words(name)) for name in strategies],
        z=gains,
        text=texts,
        texttemplate="%{text}",
        customdata=hovers,
        hovertemplate="%{y}, limited by %{x}<br>%{customdata}<extra></extra>",
        colorscale=[[0, "#e8f0fa"], [1, "#1256b2"]],
        zmin=1.0,
        zmax=max(1.5, *(gain for row in gains for gain in row if gain is not None), 1.5),
        showscale=False,
        xgap=2,
        ygap=2,
    )
    figure.update_xaxes(side="top", showgrid=False, title={"text": "bottleneck before tuning"})
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=8)
    return figure


def _num_parts(info: Iterable[StrategyRow], strategy: str) -> int:
    return sum(row.num_parts for row in info if row.strategy == strategy)


def _cell_hover(cell: StrategyRow | None) -> str:
    if cell is None:
        return "never tried there"
    tried = units.counted(cell.num_studies, "study", "studies")
    if not cell.num_parts:
        return f"tried in {tried}, but never part of a recommendation"
    interval = "" if math.isnan(cell.low) else f", 95 % interval {units.ratio_range(cell.low, cell.high)}"
    return f"<b>{units.ratio(cell.gain)}</b> median of {cell.num_parts}{interval}, tried in {tried}"


def fleet_context(studies: Sequence[FleetStudies], parts: Sequence[FleetParts]) -> dict[str, Any]:
    """Return the context of the template `fleet.html`."""
    hardware, limits, strategies = get_hardware_info(studies), get_limits_info(studies), get_strategies_info(parts)
    figures = {}
    if limits:
        figures["limits"] = plot_limits(limits)
    if any(row.num_parts for row in strategies):
        figures["strategies"] = plot_strategies(strategies)
    return {
        "num_studies": sum(row.num_studies for row in hardware),
        "num_answers": sum(row.num_answers for row in hardware),
        "num_faster": sum(row.num_faster for row in hardware),
        "median_gain": median_interval(gains := _gains_of_faster(studies)),
        "num_gains": len(gains),
        "device_hours": sum(row.device_hours for row in hardware),
        "hardware": hardware,
        "limits": limits,
        "strategies": strategies,
        "colours": theme.BOTTLENECK_COLOURS,
        "muted": theme.MUTED,
        "not_run": NOT_RUN,
        "min_studies": MIN_STUDIES,
        "figures": figures_json(figures),
    }

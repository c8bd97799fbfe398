"""All studies together: what limits the steps of our users, and which strategies pay where."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.frames import rows_of
from steptune.dashboards.templating import figures_json
from steptune.tuner.records import Verdict

NOT_RUN = "not run yet"
FASTER = Verdict.FASTER.value
MIN_STUDIES = 3
"""With fewer answers a median says little: such cells are shown pale."""


class FleetStudies(NamedTuple):
    """Studies that have all this in common; None where it is not known."""

    hardware: str | None
    verdict: str | None
    bottleneck_before: str | None
    bottleneck_after: str | None
    num_studies: int
    device_seconds: float
    """Of all of them."""
    gains: tuple[float, ...]
    """Those that are proven."""


class FleetParts(NamedTuple):
    """A strategy in the studies with an answer that had one bottleneck: how often tried, its gains in answers."""

    strategy: str
    bottleneck: str | None
    num_studies: int
    num_tried: int
    gains: tuple[float, ...]


HARDWARE_COLUMNS = (
    "hardware",
    "num_studies",
    "num_answers",
    "num_faster",
    "gain",
    "low",
    "high",
    "limit",
    "device_hours",
)
LIMIT_COLUMNS = ("hardware", "bottleneck", "num_before", "num_after")
PART_COLUMNS = ("strategy", "bottleneck", "num_studies", "num_tried", "num_parts", "gain")


def get_hardware_info(studies: Iterable[FleetStudies]) -> pd.DataFrame:
    """One row a kind of hardware, the most used first: studies, those with an answer, those found faster; the median
    gain of these with its quartiles `low` and `high`; what limits most of them; the device hours they took.
    """
    by_hardware: dict[str, list[FleetStudies]] = {}
    for group in studies:
        by_hardware.setdefault(group.hardware or NOT_RUN, []).append(group)
    rows: list[tuple[Any, ...]] = []
    for hardware, groups in by_hardware.items():
        limits: Counter[str] = Counter()
        for group in groups:
            if group.bottleneck_before:
                limits[group.bottleneck_before] += group.num_studies
        rows.append(
            (
                hardware,
                sum(group.num_studies for group in groups),
                sum(group.num_studies for group in groups if group.verdict is not None),
                sum(group.num_studies for group in groups if group.verdict == FASTER),
                *_quantiles(_gains_of_faster(groups), 0.5, 0.25, 0.75),
                min(limits, key=lambda name: (-limits[name], name), default=""),
                sum(group.device_seconds for group in groups) / 3600,
            )
        )
    rows.sort(key=lambda row: (-row[1], row[0]))
    return pd.DataFrame(rows, columns=list(HARDWARE_COLUMNS))


def _gains_of_faster(groups: Iterable[FleetStudies]) -> list[float]:
    return [gain for group in groups if group.verdict == FASTER for gain in group.gains]


def _quantiles(values: Sequence[float], *shares: float) -> list[float]:
    """NaN where there are no values."""
    return [float(value) for value in np.quantile(values, shares)] if len(values) else [math.nan] * len(shares)


def get_limits_info(studies: Iterable[FleetStudies]) -> pd.DataFrame:
    """One row for each kind of hardware and bottleneck: how many studies with an answer had it before, and after."""
    counts: dict[tuple[str, str], list[int]] = {}
    for group in studies:
        for place, bottleneck in enumerate((group.bottleneck_before, group.bottleneck_after)):
            if bottleneck:
                counts.setdefault((group.hardware or NOT_RUN, bottleneck), [0, 0])[place] += group.num_studies
    order = {name: number for number, name in enumerate(theme.BOTTLENECK_COLOURS)}
    rows: list[tuple[Any, ...]] = [(*key, *found) for key, found in counts.items()]
    rows.sort(key=lambda row: (row[0], order.get(row[1], len(order)), row[1]))
    return pd.DataFrame(rows, columns=list(LIMIT_COLUMNS))


def get_strategies_info(parts: Iterable[FleetParts]) -> pd.DataFrame:
    """One row for each strategy and bottleneck: studies in which it was tried and how often, answers that it is part
    of, and the median of what it gains there (NaN where it is part of none). What pays most often comes first.
    """
    rows: list[tuple[Any, ...]] = [
        (
            part.strategy,
            part.bottleneck or "unknown",
            part.num_studies,
            part.num_tried,
            len(part.gains),
            *_quantiles(part.gains, 0.5),
        )
        for part in parts
    ]
    totals: Counter[str] = Counter()
    for strategy, _, _, _, num_parts, _ in rows:
        totals[strategy] += num_parts
    rows.sort(key=lambda row: (-totals[row[0]], row[0], row[1]))
    return pd.DataFrame(rows, columns=list(PART_COLUMNS))


def plot_limits(info: pd.DataFrame) -> Figure:
    """Of each kind of hardware two bars on one scale: what limits its studies before and after, in shares."""
    hardware = list(dict.fromkeys(info["hardware"]))
    figure = theme.new_figure(height=130 + 74 * len(hardware), barmode="stack", bargap=0.25)
    totals = info.groupby("hardware")[["num_before", "num_after"]].sum()
    labels = {name: theme.plain(name if len(name) <= 34 else f"{name[:33]}…") for name in hardware}
    for bottleneck in dict.fromkeys(info["bottleneck"]):
        rows = info[info["bottleneck"] == bottleneck]
        colour = theme.BOTTLENECK_COLOURS.get(bottleneck, theme.MUTED)
        names, whens, shares, texts, hovers = [], [], [], [], []
        for row in rows_of(rows):
            for when, column in (("before", "num_before"), ("after", "num_after")):
                count, total = getattr(row, column), totals.loc[row.hardware, column]
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


def plot_strategies(info: pd.DataFrame) -> Figure:
    """A table of cells: what a strategy gains (median) where a bottleneck limits the step."""
    strategies = [name for name in dict.fromkeys(info["strategy"]) if info[info["strategy"] == name]["num_parts"].sum()]
    bottlenecks = [name for name in theme.BOTTLENECK_COLOURS if name in set(info["bottleneck"])]
    bottlenecks += sorted(set(info["bottleneck"]) - set(bottlenecks))
    cells = {(row.strategy, row.bottleneck): row for row in rows_of(info)}
    gains, texts, hovers = [], [], []
    for strategy in strategies:
        found = [cells.get((strategy, bottleneck)) for bottleneck in bottlenecks]
        gains.append([_shown_gain(cell) for cell in found])
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
    figure.update_xaxes(side="top", showgrid=False, title={"text": "what limits the step before"})
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=8)
    return figure


def _shown_gain(cell: Any) -> float | None:
    return float(cell.gain) if cell is not None and cell.num_parts else None


def _cell_hover(cell: Any) -> str:
    if cell is None:
        return "never tried there"
    tried = units.counted(cell.num_studies, "study", "studies")
    if not cell.num_parts:
        return f"tried in {tried}, part of no answer"
    return f"<b>{units.ratio(cell.gain)}</b> median of {cell.num_parts}, tried in {tried}"


def fleet_context(studies: list[FleetStudies], parts: list[FleetParts]) -> dict[str, Any]:
    """What the template `fleet.html` shows."""
    hardware, limits, strategies = get_hardware_info(studies), get_limits_info(studies), get_strategies_info(parts)
    figures = {}
    if len(limits):
        figures["limits"] = plot_limits(limits)
    if strategies["num_parts"].sum():
        figures["strategies"] = plot_strategies(strategies)
    return {
        "num_studies": int(hardware["num_studies"].sum()),
        "num_answers": int(hardware["num_answers"].sum()),
        "num_faster": int(hardware["num_faster"].sum()),
        "median_gain": _quantiles(_gains_of_faster(studies), 0.5)[0],
        "device_hours": float(hardware["device_hours"].sum()),
        "hardware": rows_of(hardware),
        "limits": rows_of(limits),
        "strategies": rows_of(strategies),
        "colours": theme.BOTTLENECK_COLOURS,
        "muted": theme.MUTED,
        "not_run": NOT_RUN,
        "min_studies": MIN_STUDIES,
        "figures": figures_json(figures),
    }

"""All studies together: what limits the steps of our users, and which strategies pay where."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from steptune.dashboards import theme, units
from steptune.dashboards.frames import rows_of
from steptune.dashboards.templating import figures_json

NOT_RUN = "not run yet"
MIN_STUDIES = 3
"""With fewer answers a median says little: such cells are shown pale."""


class FleetStudy(NamedTuple):
    """A study as the overview needs it; None where something is not known."""

    hardware: str | None
    state: str
    verdict: str | None
    gain: float | None
    bottleneck_before: str | None
    bottleneck_after: str | None
    tuning_s: float | None
    device_seconds: float | None


class FleetPart(NamedTuple):
    """A strategy in a study with an answer: how often it was tried there, and its own gain, None where it is no part of
    the answer.
    """

    strategy: str
    bottleneck: str | None
    num_tried: int
    gain: float | None


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


def get_hardware_info(studies: Iterable[FleetStudy]) -> pd.DataFrame:
    """One row a kind of hardware, the most used first: studies, those with an answer, those found faster; the median
    gain of these with its quartiles `low` and `high`; what limits most of them; the device hours they took.
    """
    frame = pd.DataFrame(list(studies), columns=list(FleetStudy._fields))
    frame["hardware"] = frame["hardware"].fillna(NOT_RUN)
    rows: list[tuple[Any, ...]] = []
    for hardware, group in frame.groupby("hardware"):
        gains = group.loc[group["verdict"] == "faster", "gain"].dropna().astype(float)
        limits = group["bottleneck_before"].dropna()
        rows.append(
            (
                hardware,
                len(group),
                int(group["verdict"].notna().sum()),
                int((group["verdict"] == "faster").sum()),
                *((gains.quantile(q) if len(gains) else math.nan) for q in (0.5, 0.25, 0.75)),
                limits.mode().iloc[0] if len(limits) else "",
                float(group["device_seconds"].fillna(group["tuning_s"]).fillna(0.0).astype(float).sum()) / 3600,
            )
        )
    rows.sort(key=lambda row: (-row[1], row[0]))
    return pd.DataFrame(rows, columns=list(HARDWARE_COLUMNS))


def get_limits_info(studies: Iterable[FleetStudy]) -> pd.DataFrame:
    """One row for each kind of hardware and bottleneck: how many studies with an answer had it before, and after."""
    counts: dict[tuple[str, str], list[int]] = {}
    for study in studies:
        for place, bottleneck in enumerate((study.bottleneck_before, study.bottleneck_after)):
            if bottleneck:
                counts.setdefault((study.hardware or NOT_RUN, bottleneck), [0, 0])[place] += 1
    order = {name: number for number, name in enumerate(theme.BOTTLENECK_COLOURS)}
    rows: list[tuple[Any, ...]] = [(*key, *found) for key, found in counts.items()]
    rows.sort(key=lambda row: (row[0], order.get(row[1], len(order)), row[1]))
    return pd.DataFrame(rows, columns=list(LIMIT_COLUMNS))


def get_strategies_info(parts: Iterable[FleetPart]) -> pd.DataFrame:
    """One row for each strategy and bottleneck: studies in which it was tried and how often, answers that it is part
    of, and the median of what it gains there (NaN where it is part of none). What pays most often comes first.
    """
    frame = pd.DataFrame(list(parts), columns=list(FleetPart._fields))
    frame["bottleneck"] = frame["bottleneck"].fillna("unknown")
    rows = [
        (
            strategy,
            bottleneck,
            len(group),
            int(group["num_tried"].sum()),
            int(group["gain"].notna().sum()),
            group["gain"].astype(float).median(),
        )
        for (strategy, bottleneck), group in frame.groupby(["strategy", "bottleneck"])
    ]
    info = pd.DataFrame(rows, columns=list(PART_COLUMNS))
    totals = info.groupby("strategy")["num_parts"].sum()
    return info.assign(total=info["strategy"].map(totals)).sort_values(
        ["total", "strategy", "bottleneck"], ascending=[False, True, True], ignore_index=True
    )[list(PART_COLUMNS)]


def plot_limits(info: pd.DataFrame) -> go.Figure:
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


def plot_strategies(info: pd.DataFrame) -> go.Figure:
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


def fleet_context(studies: list[FleetStudy], parts: list[FleetPart]) -> dict[str, Any]:
    """What the template `fleet.html` shows."""
    hardware, limits, strategies = get_hardware_info(studies), get_limits_info(studies), get_strategies_info(parts)
    figures = {}
    if len(limits):
        figures["limits"] = plot_limits(limits)
    if strategies["num_parts"].sum():
        figures["strategies"] = plot_strategies(strategies)
    gains = pd.Series([s.gain for s in studies if s.verdict == "faster" and s.gain is not None], dtype=float)
    return {
        "num_studies": len(studies),
        "num_answers": sum(1 for s in studies if s.verdict is not None),
        "num_faster": sum(1 for s in studies if s.verdict == "faster"),
        "median_gain": float(gains.median()) if len(gains) else math.nan,
        "device_hours": float(hardware["device_hours"].sum()) if len(hardware) else 0.0,
        "hardware": rows_of(hardware),
        "limits": rows_of(limits),
        "strategies": rows_of(strategies),
        "colours": theme.BOTTLENECK_COLOURS,
        "muted": theme.MUTED,
        "not_run": NOT_RUN,
        "min_studies": MIN_STUDIES,
        "figures": figures_json(figures),
    }

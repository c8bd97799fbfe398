"""Where the time of a step goes, before and after."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pandas as pd

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.sources import TrialSource
from steptune.dashboards.starts import RECOMMENDED, TODAY, leading_candidate, reference_results, results
from steptune.tuner.records import Recommendation, TrialResult

COLUMNS = ("configuration", "category", "group", "title", "ms_per_step", "share")
LABELLED_SHARE = 0.05
"""Segments below this part of the longest bar have no room for a number."""


def get_breakdown_info(source: TrialSource, study_id: str) -> pd.DataFrame:
    """Milliseconds per step by category, for today's settings and what stands beside them.

    One row for each configuration and category that takes time: `configuration` ("today", then
    "recommended" or "best so far"), `category`, `group`, `title`, `ms_per_step`, `share`. Several
    profiled starts and ranks are averaged, so the categories still sum to the mean step. Empty before
    anything was profiled.
    """
    recommendation, study = source.recommendation(study_id), source.get_study(study_id)
    if recommendation is not None and recommendation.shares_before and study.facts is not None:
        return _confirmed(recommendation, study.facts.units_per_batch)
    trials = source.trials(study_id)
    configurations: list[tuple[str, Sequence[TrialResult]]] = [(TODAY, reference_results(trials))]
    leading = leading_candidate(source, study_id)
    if leading is not None:
        name, candidate = leading
        configurations.append((name, [r for r in results(trials) if r.candidate == candidate and r.ok]))
    rows = [row for name, starts in configurations for row in _rows(name, mean_step_ms(starts))]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _confirmed(recommendation: Recommendation, units_per_batch: float) -> pd.DataFrame:
    """Shares of the profiles, on the step times that belong to the stated rates.

    A profile's own step was measured at another moment; on one scale with another it would mislead.
    """
    r = recommendation
    before = {name: share * 1e3 * units_per_batch / r.baseline_units_per_s for name, share in r.shares_before.items()}
    after = {name: share * 1e3 * units_per_batch / r.units_per_s for name, share in r.shares_after.items()}
    steps = [(TODAY, before)]
    if after and not r.candidate.is_baseline:
        steps.append((RECOMMENDED, after))
    return pd.DataFrame([row for label, step in steps for row in _rows(label, step)], columns=list(COLUMNS))


def mean_step_ms(starts: Sequence[TrialResult]) -> dict[str, float]:
    """Milliseconds per step by category, averaged over starts and ranks; empty if none was profiled."""
    steps = [breakdown.per_step_ns for result in starts for breakdown in result.breakdowns]
    names = {name for step in steps for name in step}
    return {name: statistics.fmean(step.get(name, 0.0) for step in steps) / 1e6 for name in names}


def _rows(configuration: str, step_ms: dict[str, float]) -> list[tuple[str, str, str, str, float, float]]:
    known = [info.category.value for info in theme.categories_in_order()]
    names = [name for name in known if name in step_ms] + sorted(set(step_ms) - set(known))
    total = sum(step_ms.values())
    return [
        (
            configuration,
            name,
            theme.category_group(name),
            theme.category_title(name),
            step_ms[name],
            step_ms[name] / total,
        )
        for name in names
        if step_ms[name] > 0
    ]


def get_comparison_info(info: pd.DataFrame) -> pd.DataFrame:
    """The same figures side by side: one row a category, one column of ms a configuration, the order
    of the bars kept. A category that takes no time in one of them is 0 there.
    """
    wide = info.pivot_table(index="category", columns="configuration", values="ms_per_step", sort=False, fill_value=0.0)
    wide = wide[list(dict.fromkeys(info["configuration"]))]
    order = {i.category.value: number for number, i in enumerate(theme.categories_in_order())}
    return wide.loc[sorted(wide.index, key=lambda name: order.get(name, len(order)))]


def plot_breakdown(info: pd.DataFrame) -> Figure:
    """Stacked horizontal bars on one scale, a configuration each."""
    configurations = list(dict.fromkeys(info["configuration"]))
    totals = info.groupby("configuration")["ms_per_step"].sum()
    figure = theme.new_figure(
        height=150 + 62 * len(configurations), barmode="stack", bargap=0.28, uniformtext={"mode": "hide", "minsize": 10}
    )
    for category in get_comparison_info(info).index if len(info) else []:
        rows = info[info["category"] == category]
        colour = theme.category_colour(category)
        figure.add_bar(
            name=theme.plain(theme.category_title(category)),
            orientation="h",
            y=list(rows["configuration"]),
            x=list(rows["ms_per_step"]),
            text=[units.significant(v) if v > LABELLED_SHARE * totals.max() else "" for v in rows["ms_per_step"]],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": theme.text_colour_on(colour), "size": 12},
            marker={
                "color": colour,
                "line": {"color": "#ffffff", "width": 1},
                "pattern": {"shape": "/" if category == "unknown" else "", "fgcolor": "#8a8f98", "size": 5},
            },
            customdata=[
                (units.milliseconds(ms), units.percent(share))
                for ms, share in zip(rows["ms_per_step"], rows["share"], strict=True)
            ],
            hovertemplate="%{fullData.name}<br><b>%{customdata[0]}</b> per step, %{customdata[1]}<extra>%{y}</extra>",
        )
    figure.update_xaxes(
        title={"text": "milliseconds per step"}, range=[0, 1.03 * float(totals.max() or 1) if len(totals) else 1]
    )
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        ticklabelstandoff=8,
        tickvals=configurations,
        ticktext=[f"{name}<br><b>{units.milliseconds(totals[name])}</b>" for name in configurations],
    )
    return figure

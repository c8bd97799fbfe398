"""Breakdown of a step, before and after tuning."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.sources import TrialSource
from steptune.dashboards.starts import (
    NEAREST,
    RECOMMENDED,
    TODAY,
    leading_candidate,
    reference_name,
    reference_results,
    results,
)
from steptune.tuner.records import Recommendation, TrialResult, Verdict

UNTRUSTED = "unknown"
"""Name that stands for the bottleneck if the profile cannot be trusted."""
LABELLED_SHARE = 0.05
"""Minimum length of a segment that is labelled with its number, as a share of the longest bar."""


class CategoryTime(NamedTuple):
    """The time of one category in the step of one configuration."""

    configuration: str
    category: str
    group: str
    title: str
    ms_per_step: float
    share: float


class CategoryTimes(NamedTuple):
    """Milliseconds per step of one category, one value for each configuration; 0 where it takes no time."""

    category: str
    values_ms: tuple[float, ...]


def get_breakdown_info(source: TrialSource, study_id: str) -> list[CategoryTime]:
    """Return milliseconds per step by category, for today's settings and for the configuration compared with them.

    One row for each configuration ("today", then "recommended" or "best so far") and category that takes time. Several
    profiled runs and ranks are averaged, so the categories still sum to the mean step. Empty before anything was
    profiled; a profile that cannot be trusted counts as none.
    """
    recommendation, study = source.recommendation(study_id), source.get_study(study_id)
    if recommendation is not None and recommendation.shares_before and study.facts is not None:
        if recommendation.bottleneck_before == UNTRUSTED:  # by an older version, which kept such shares
            return []
        return _confirmed(recommendation, study.facts.units_per_batch)
    trials = source.trials(study_id)
    configurations: list[tuple[str, Sequence[TrialResult]]] = [
        (reference_name(source, study_id), reference_results(trials))
    ]
    leading = leading_candidate(source, study_id)
    if leading is not None:
        name, candidate = leading
        configurations.append((name, [r for r in results(trials) if r.candidate == candidate and r.ok]))
    return [row for name, starts in configurations for row in _rows(name, mean_step_ms(starts))]


def _confirmed(recommendation: Recommendation, units_per_batch: float) -> list[CategoryTime]:
    """Return milliseconds per step by category: each category's share of the profiled step, multiplied by the step time
    that follows from the recommendation's rate.

    The profiled steps were measured at different moments, so that their times cannot be compared on one scale.
    """
    r = recommendation
    before = {name: share * 1e3 * units_per_batch / r.baseline_units_per_s for name, share in r.shares_before.items()}
    after = {name: share * 1e3 * units_per_batch / r.units_per_s for name, share in r.shares_after.items()}
    steps = [(NEAREST if r.verdict is Verdict.ENABLES_TRAINING else TODAY, before)]
    if after and r.bottleneck_after != UNTRUSTED and not r.candidate.is_baseline:
        steps.append((RECOMMENDED, after))
    return [row for label, step in steps for row in _rows(label, step)]


def mean_step_ms(starts: Sequence[TrialResult]) -> dict[str, float]:
    """Return milliseconds per step by category, averaged over a configuration's runs and their ranks; empty if no
    profile can be trusted.
    """
    steps = [b.per_step_ns for result in starts for b in result.breakdowns if not b.quality.problems]
    names = {name for step in steps for name in step}
    return {name: statistics.fmean(step.get(name, 0.0) for step in steps) / 1e6 for name in names}


def _rows(configuration: str, step_ms: dict[str, float]) -> list[CategoryTime]:
    known = [info.category.value for info in theme.categories_in_order()]
    names = [name for name in known if name in step_ms] + sorted(set(step_ms) - set(known))
    total = sum(step_ms.values())
    return [
        CategoryTime(
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


def get_comparison_info(info: Sequence[CategoryTime]) -> list[CategoryTimes]:
    """Return the configurations' milliseconds per step side by side: one row per category, in the order of the bars."""
    configurations = list(dict.fromkeys(row.configuration for row in info))
    times = {(row.category, row.configuration): row.ms_per_step for row in info}
    order = {i.category.value: number for number, i in enumerate(theme.categories_in_order())}
    categories = sorted(dict.fromkeys(row.category for row in info), key=lambda name: order.get(name, len(order)))
    return [CategoryTimes(name, tuple(times.get((name, one), 0.0) for one in configurations)) for name in categories]


def plot_breakdown(info: Sequence[CategoryTime]) -> Figure:
    """Draw one stacked horizontal bar per configuration, all on one scale."""
    totals: dict[str, float] = {}
    for row in info:
        totals[row.configuration] = totals.get(row.configuration, 0.0) + row.ms_per_step
    configurations, longest = list(totals), max(totals.values(), default=1.0)
    figure = theme.new_figure(
        height=150 + 62 * len(configurations), barmode="stack", bargap=0.28, uniformtext={"mode": "hide", "minsize": 10}
    )
    for category, _ in get_comparison_info(info):
        rows = [row for row in info if row.category == category]
        colour = theme.category_colour(category)
        figure.add_bar(
            name=theme.plain(theme.category_title(category)),
            orientation="h",
            y=[row.configuration for row in rows],
            x=[row.ms_per_step for row in rows],
            text=[
                units.significant(row.ms_per_step) if row.ms_per_step > LABELLED_SHARE * longest else "" for row in rows
            ],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": theme.text_colour_on(colour), "size": 12},
            marker={
                "color": colour,
                "line": {"color": "#ffffff", "width": 1},
                "pattern": {"shape": "/" if category == "unknown" else "", "fgcolor": "#8a8f98", "size": 5},
            },
            customdata=[(units.milliseconds(row.ms_per_step), units.percent(row.share)) for row in rows],
            hovertemplate="%{fullData.name}<br><b>%{customdata[0]}</b> per step, %{customdata[1]}<extra>%{y}</extra>",
        )
    figure.update_xaxes(title={"text": "milliseconds per step"}, range=[0, 1.03 * (longest or 1.0)])
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        ticklabelstandoff=8,
        tickvals=configurations,
        ticktext=[f"{name}<br><b>{units.milliseconds(totals[name])}</b>" for name in configurations],
    )
    return figure

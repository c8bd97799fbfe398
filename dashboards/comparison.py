"""Two trials side by side: what changed, and what explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.breakdown import CategoryTime, plot_breakdown
from steptune.dashboards.figures import Figure
from steptune.dashboards.templating import figures_json
from steptune.tuner.records import Candidate, Study, Trial, choice_label
from steptune.tuner.speeds import is_wide
from steptune.tuner.trace_records import Comparison, Difference, KernelDifference

NUM_EXPLAINED = 3


class Side(NamedTuple):
    """One of the two trials compared: its study, and the addresses of its pages (empty where there are none)."""

    name: str
    study: Study
    trial: Trial
    study_url: str
    trial_url: str


class SettingRow(NamedTuple):
    """A strategy for which the two trials have different choices."""

    strategy: str
    before: str
    after: str


class DifferenceRow(NamedTuple):
    """A category that takes time in at least one of the two trials."""

    category: str
    title: str
    group: str
    before_ms: float
    after_ms: float
    change_ms: float
    """Change in ms per step."""
    low_ms: float
    high_ms: float
    """Upper end of the 95 % interval of the change; NaN where there is none."""
    share: float
    """Share of the step's change that the category explains."""


class ComparisonHeadline(NamedTuple):
    """Change of the step time between two trials: the ratio of speeds, both step times, and whether noise explains the
    change.
    """

    tone: str
    figure: str
    title: str
    sentence: str


def get_comparison_headline(comparison: Comparison) -> ComparisonHeadline:
    """Compare the step times of two trials: those that a study states, else the measured ones, else the profiled ones
    if both profiles can be trusted.
    """
    step = comparison.measured or comparison.step
    how = comparison.stated_how or ("one run each, without the profiler" if comparison.measured else "as profiled")
    ratio = step.before_ns / step.after_ns if step.after_ns else float("nan")
    interval = ""
    if comparison.stated is not None:
        interval = f", 95 % interval of the ratio {units.ratio_interval(comparison.stated)}"
    elif step.low_ns is not None and step.high_ns is not None:
        low, high = units.short_time_change(step.low_ns), units.short_time_change(step.high_ns)
        interval = f", 95 % interval {low} to {high}"
    sentence = (
        f"A step takes {units.short_time(step.before_ns)} in A and {units.short_time(step.after_ns)} in B ({how}), a "
        f"change of {units.short_time_change(step.change_ns)}{interval}."
    )
    if comparison.measured is None and not comparison.trusted:
        return ComparisonHeadline("warning", "", "No verdict: at least one profile cannot be trusted", sentence)
    if comparison.stated is not None and is_wide(comparison.stated):
        return ComparisonHeadline("neutral", units.ratio(ratio), "Inconclusive: the interval is wide", sentence)
    if not step.significant:
        return ComparisonHeadline("neutral", units.ratio(ratio), "No difference beyond noise", sentence)
    tone, title = ("good", "B is faster than A") if step.change_ns < 0 else ("warning", "B is slower than A")
    return ComparisonHeadline(tone, units.ratio(ratio), title, sentence)


def get_differences_info(comparison: Comparison) -> list[DifferenceRow]:
    """Return one row for each category that takes time on either side, the largest change first."""
    total = comparison.step.change_ns
    return [
        DifferenceRow(
            d.name,
            theme.category_title(d.name),
            theme.category_group(d.name),
            d.before_ns / 1e6,
            d.after_ns / 1e6,
            d.change_ns / 1e6,
            _ms(d.low_ns),
            _ms(d.high_ns),
            d.change_ns / total if total else float("nan"),
        )
        for d in comparison.categories
        if d.before_ns or d.after_ns
    ]


def _ms(value_ns: float | None) -> float:
    return float("nan") if value_ns is None else value_ns / 1e6


def get_explanation(comparison: Comparison) -> tuple[str, ...]:
    """Name the few categories that explain the change of the step. Categories with an interval that includes zero are
    left out. Empty where a profile cannot be trusted.
    """
    if not comparison.trusted:
        return ()
    significant = [d for d in comparison.categories if d.significant or d.low_ns is None]
    total = comparison.step.change_ns
    told = [d for d in significant if total and d.change_ns / total >= 0.05]
    return tuple(_told(d, total) for d in told[:NUM_EXPLAINED])


def _told(difference: Difference, total_ns: float) -> str:
    title, change = theme.category_title(difference.name), units.short_time_change(difference.change_ns)
    return f"{title}: {change}, {units.percent(difference.change_ns / total_ns)} of the change"


def get_sides_info(comparison: Comparison) -> list[CategoryTime]:
    """Return both steps by category, in the form of `breakdown.get_breakdown_info`: configurations "A" and "B"."""
    order = {info.category.value: number for number, info in enumerate(theme.categories_in_order())}
    found = sorted(comparison.categories, key=lambda d: order.get(d.name, len(order)))
    rows = []
    for name, total, values in (
        ("A", comparison.step.before_ns, [d.before_ns for d in found]),
        ("B", comparison.step.after_ns, [d.after_ns for d in found]),
    ):
        rows += [
            CategoryTime(
                name, d.name, theme.category_group(d.name), theme.category_title(d.name), value / 1e6, value / total
            )
            for d, value in zip(found, values, strict=True)
            if value > 0
        ]
    return rows


def get_settings_info(before: Candidate, after: Candidate) -> list[SettingRow]:
    """Return the strategies for which the two candidates have different choices."""

    def label(candidate: Candidate, name: str) -> str:
        return choice_label(candidate.choices[name]) if candidate.choices.get(name) else "as today"

    names = sorted({*before.choices, *after.choices})
    return [
        SettingRow(name, label(before, name), label(after, name))
        for name in names
        if before.choices.get(name) != after.choices.get(name)
    ]


def by_state(rows: tuple[KernelDifference, ...]) -> dict[str, list[KernelDifference]]:
    """Group kernels or gaps by whether they appeared, vanished or changed, in that order; empty groups are left out."""
    titles = {"new": "Appeared", "gone": "Vanished", "changed": "Changed"}
    found = {title: [row for row in rows if row.state == state] for state, title in titles.items()}
    return {title: states for title, states in found.items() if states}


def plot_differences(info: Sequence[DifferenceRow]) -> Figure:
    """Draw each category's change of time as a horizontal bar with its interval. Bars left of zero are time saved."""
    figure = theme.new_figure(height=92 + 30 * max(1, len(info)), showlegend=False, bargap=0.3)
    known = bool(info) and not any(math.isnan(row.low_ms) for row in info)
    figure.add_bar(
        orientation="h",
        y=[theme.plain(row.title) for row in info],
        x=[row.change_ms for row in info],
        marker={
            "color": [theme.category_colour(row.category) for row in info],
            "line": {"color": theme.NEUTRAL, "width": 0.8},
        },
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [row.high_ms - row.change_ms if known else 0.0 for row in info],
            "arrayminus": [row.change_ms - row.low_ms if known else 0.0 for row in info],
            "color": theme.NEUTRAL,
            "thickness": 1.5,
            "width": 4,
            "visible": known,
        },
        customdata=[
            f"<b>{units.short_time_change(row.change_ms * 1e6)}</b><br>"
            f"{units.short_time(row.before_ms * 1e6)} → {units.short_time(row.after_ms * 1e6)}"
            for row in info
        ],
        hovertemplate="%{y}<br>%{customdata}<extra></extra>",
    )
    figure.add_vline(x=0, line={"color": theme.NEUTRAL, "width": 1})
    figure.update_xaxes(title={"text": "B − A, ms per step"})
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=8)
    return figure


def comparison_context(comparison: Comparison, before: Side, after: Side) -> dict[str, Any]:
    """Return the context of the template `compare.html`."""
    differences = get_differences_info(comparison)
    figures = {"sides": plot_breakdown(get_sides_info(comparison)).update_layout(showlegend=False)}
    if differences:
        figures["differences"] = plot_differences(differences)
    return {
        "headline": get_comparison_headline(comparison),
        "comparison": comparison,
        "sides": (before, after),
        "settings": get_settings_info(before.trial.candidate, after.trial.candidate),
        "explanation": get_explanation(comparison),
        "differences": differences,
        "kernels": by_state(comparison.kernels),
        "gaps": by_state(comparison.gaps),
        "figures": figures_json(figures),
    }

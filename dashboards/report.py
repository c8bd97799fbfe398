"""One study as one HTML file: it loads nothing, so it can be mailed, archived and read offline."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import jinja2
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dashboards import theme, units
from dashboards.breakdown import get_breakdown_info, get_comparison_info, plot_breakdown
from dashboards.gains import get_gains_info, plot_gains
from dashboards.headline import get_headline_info
from dashboards.history import LOOKS, get_history_info, plot_history
from dashboards.sources import TrialSource
from dashboards.starts import TODAY, leading_candidate, reference_results, results
from dashboards.story import get_not_tried_info, get_tried_info
from tuner.errors import ChoiceError
from tuner.export import exporters_for
from tuner.records import Candidate, Choice, Finding, Numerics, Recommendation, SampleUnit, Study, choice_label
from tuner.strategies import strategy_named

NUMERICS: dict[str, str] = {
    Numerics.EXACT: "bit for bit the same",
    Numerics.SAMPLING: "the same samples; random augmentation may differ",
    Numerics.ROUNDING: "the same up to rounding",
    Numerics.LOSSY: "information is dropped",
    Numerics.RECIPE: "another training recipe",
}


class BreakdownRow(NamedTuple):
    """One category: its colour and its milliseconds by configuration."""

    title: str
    group: str
    colour: str
    hatched: bool
    values_ms: tuple[float, ...]


class ChangeRow(NamedTuple):
    """One parameter that differs from today."""

    strategy: str
    summary: str
    today: str
    now: str


class Download(NamedTuple):
    """One export, inside the page."""

    summary: str
    file_name: str
    version: str
    usage: str
    href: str
    not_expressible: tuple[str, ...]


def render_report(source: TrialSource, study_id: str) -> str:
    """The report of a study, whatever its state, as one self-contained HTML page.

    Raises:
        StudyNotFound: There is no such study.
    """
    template = templates().get_template("report.html")
    return template.render(plotly_js=get_plotlyjs(), **report_context(source, study_id))


def report_context(source: TrialSource, study_id: str) -> dict[str, Any]:
    """Everything that the template shows, as data."""
    study = source.get_study(study_id)
    study_id = study.study_id
    recommendation = source.recommendation(study_id)
    unit = _unit(study, recommendation)
    breakdown = get_breakdown_info(source, study_id)
    history = get_history_info(source, study_id)
    gains = get_gains_info(source, study_id)
    environment = study.environment
    return {
        "study": study,
        "recommendation": recommendation,
        "unit": unit,
        "headline": get_headline_info(source, study_id),
        "configurations": list(dict.fromkeys(breakdown["configuration"])),
        "breakdown": breakdown_rows(breakdown),
        "findings": findings_by_configuration(source, study_id),
        "tried": list(get_tried_info(source, study_id).itertuples()),
        "not_tried": list(get_not_tried_info(source, study_id).itertuples()),
        "history": list(history.itertuples()),
        "looks": LOOKS,
        "parts": list(gains.itertuples()),
        "numerics": NUMERICS,
        "hardware": recommendation.hardware if recommendation else environment.hardware if environment else None,
        "changes": change_rows(study, recommendation.candidate) if recommendation else [],
        "downloads": downloads(recommendation) if recommendation else [],
        "figures": _figures(breakdown, history, gains, unit),
    }


def _unit(study: Study, recommendation: Recommendation | None) -> SampleUnit:
    if recommendation is not None:
        return recommendation.sample_unit
    return study.facts.sample_unit if study.facts else SampleUnit.SAMPLE


def breakdown_rows(info: pd.DataFrame) -> list[BreakdownRow]:
    """The bars of the figure as a table, which is its legend as well."""
    if info.empty:
        return []
    return [
        BreakdownRow(
            title=theme.category_title(category),
            group=theme.category_group(category),
            colour=theme.category_colour(category),
            hatched=category == "unknown",
            values_ms=tuple(values),
        )
        for category, *values in get_comparison_info(info).itertuples(name=None)
    ]


def findings_by_configuration(source: TrialSource, study_id: str) -> dict[str, tuple[Finding, ...]]:
    """What the latest profile of each configuration shows."""
    trials = source.trials(study_id)
    starts = {TODAY: reference_results(trials)}
    leading = leading_candidate(source, study_id)
    if leading is not None:
        starts[leading[0]] = [r for r in results(trials) if r.candidate == leading[1]]
    latest = {name: [r.findings for r in found if r.findings] for name, found in starts.items()}
    return {name: found[-1] for name, found in latest.items() if found}


def change_rows(study: Study, candidate: Candidate) -> list[ChangeRow]:
    """Every parameter that the recommendation sets otherwise than today."""
    rows = []
    for name, choice in candidate.choices.items():
        summary, today = _strategy_today(study, name)
        for parameter, value in choice.items():
            was = choice_label({parameter: today[parameter]}) if parameter in today else units.UNKNOWN
            rows.append(ChangeRow(name, summary, was, choice_label({parameter: value})))
    return rows


def _strategy_today(study: Study, name: str) -> tuple[str, Choice]:
    """Summary and present choice of a strategy; nothing of one that this version does not know."""
    try:
        strategy = strategy_named(name)
    except ChoiceError:
        return "", {}
    current = study.facts.current.get(name, {}) if study.facts else {}
    return strategy.summary, strategy.completed(current)


def downloads(recommendation: Recommendation) -> list[Download]:
    """Every export, to be saved from the page itself."""
    return [
        Download(
            summary=exporter.summary,
            file_name=exporter.file_name(recommendation),
            version=exporter.version,
            usage=exporter.usage,
            href="data:application/octet-stream;base64,"
            + base64.b64encode(exporter.export(recommendation).encode("utf-8")).decode("ascii"),
            not_expressible=exporter.not_expressible(recommendation),
        )
        for exporter in exporters_for(recommendation)
    ]


def _figures(breakdown: pd.DataFrame, history: pd.DataFrame, gains: pd.DataFrame, unit: SampleUnit) -> dict[str, str]:
    """By the id of the element that shows it; only those that have something to show."""
    figures: dict[str, go.Figure] = {}
    if len(breakdown):
        figures["breakdown-figure"] = plot_breakdown(breakdown).update_layout(showlegend=False)
    if history["gain"].notna().any():
        figures["history-figure"] = plot_history(history, unit)
    if len(gains):
        figures["gains-figure"] = plot_gains(gains)
    return {name: figure.to_json() for name, figure in figures.items()}


def templates() -> jinja2.Environment:
    """The pages, with the filters that they use."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dashboards"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ratio=units.ratio,
        percent=units.percent,
        memory=units.memory,
        rate=units.rate,
        duration=units.duration,
        words=units.words,
        significant=units.significant,
        known=lambda value: value == value,
        change=units.change,
        counted=units.counted,
        short_time=units.short_time,
        short_time_change=units.short_time_change,
        kernel_name=units.kernel_name,
        per_second=units.per_second,
        place_name=units.place_name,
        gain_limit=units.gain_limit,
    )
    return environment

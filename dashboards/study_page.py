"""Data of a study's page, for the service and for the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from steptune.dashboards import theme
from steptune.dashboards.answer import change_rows, get_uses, screen_facts
from steptune.dashboards.breakdown import CategoryTime, get_breakdown_info, get_comparison_info, plot_breakdown
from steptune.dashboards.candidates import OUT_OF_MEMORY, CandidateRow, get_candidates_info, plot_memory
from steptune.dashboards.contributions import get_contributions_info
from steptune.dashboards.convergence import ConvergenceRow, get_convergence_info, plot_convergence
from steptune.dashboards.effects import Effects
from steptune.dashboards.epochs import get_epoch_info
from steptune.dashboards.figures import Figure
from steptune.dashboards.gains import GainRow, get_gains_info, plot_gains
from steptune.dashboards.headline import get_headline_info, more_time_command
from steptune.dashboards.history import LOOKS, HistoryRow, get_history_info, plot_history
from steptune.dashboards.importance import METHOD, ImportanceRow, get_importance_info, plot_importance
from steptune.dashboards.links import LinksInfo, get_links_info, plot_links
from steptune.dashboards.neighbours import NeighbourRow, get_neighbours_info, plot_neighbours
from steptune.dashboards.site import Site, data_url
from steptune.dashboards.sources import TrialSource, snapshot
from steptune.dashboards.starts import TODAY, leading_candidate, reference_results, results
from steptune.dashboards.story import get_not_tried_info, get_tried_info
from steptune.dashboards.templating import figures_json
from steptune.dashboards.under_way import get_under_way
from steptune.tuner.errors import ChoiceError, PlatformError
from steptune.tuner.export import EXPORTERS, Exporter, why_not_exported
from steptune.tuner.export.study_formats import STUDY_FORMATS
from steptune.tuner.objectives import parse_objective
from steptune.tuner.records import (
    Candidate,
    Finding,
    Interval,
    Numerics,
    Recommendation,
    SampleUnit,
    Study,
    StudyState,
    Trial,
    Verdict,
)
from steptune.tuner.speeds import Method, speed_of
from steptune.tuner.strategies.planned import PlannedStep, planned_steps
from steptune.tuner.workloads.reference import COMMAND, is_command

NUMERICS: dict[str, str] = {
    Numerics.EXACT: "bit for bit the same",
    Numerics.SAMPLING: "the same samples; random augmentation may differ",
    Numerics.ROUNDING: "the same up to rounding",
    Numerics.LOSSY: "information is dropped",
    Numerics.RECIPE: "another training recipe",
}
OUTCOME_TITLES = {**{name: look.title for name, look in LOOKS.items()}, OUT_OF_MEMORY: "out of memory"}
OPEN = (Verdict.NOT_SEARCHED, Verdict.INCONCLUSIVE)
"""Verdicts that leave open whether any configuration is better than today's settings."""
ENDED = (StudyState.COMPLETED, StudyState.FAILED, StudyState.CANCELLED)
NUM_TOP = 3
SCRIPTS = ("tabs.js", "study.js")
TALL = 40
"""Maximum number of rows of a table without a scroll bar of its own."""
IN_SERVICE: dict[str, Any] = {"queued": False, "waits_for": "", "last_event": 0, "live": False, "about": None}
"""Default values of the facts about a study that only a service knows, such as whether the study is queued.
`last_event` is the number of the study's last event.
"""


class BreakdownRow(NamedTuple):
    """One category: its colour, and its milliseconds in each configuration."""

    title: str
    group: str
    colour: str
    hatched: bool
    values_ms: tuple[float, ...]


class TopRow(NamedTuple):
    """One of the best configurations: its gain, its memory and its risk."""

    name: str
    label: str
    gain: float
    """Speedup over today's settings; NaN where no gain is claimed."""
    interval: Interval | None
    method: str
    peak_memory_bytes: int
    numerics: str
    guard: str


class Download(NamedTuple):
    """One file to download; `problem` says why it is not available, and what to do instead."""

    summary: str
    file_name: str
    version: str
    usage: str
    href: str
    not_expressible: tuple[str, ...] = ()
    carries: str = ""
    problem: str = ""


def study_context(source: TrialSource, study_id: str, site: Site) -> dict[str, Any]:
    """Collect the variables of the template `study.html`, except those that `Site` provides to every page.

    Raises:
        StudyNotFoundError: There is no such study.
    """
    source = snapshot(source, study_id)
    study, recommendation = source.study, source.answer
    study_id = study.study_id
    unit = _unit(study, recommendation)
    effects = Effects(source.trials(study_id), recommendation)
    breakdown = get_breakdown_info(source, study_id)
    history = get_history_info(source, study_id)
    gains = get_gains_info(source, study_id)
    candidates = get_candidates_info(source, study_id, effects)
    neighbours = get_neighbours_info(source, study_id, effects, candidates)
    importance = get_importance_info(source, study_id, effects)
    convergence = get_convergence_info(source, study_id, history, effects)
    numbers = {row.trial_id: row.number for row in history}
    environment = study.environment
    links = get_links_info(environment.topology) if environment and environment.topology else None
    headline = get_headline_info(source, study_id, at_service=bool(site.user))
    epoch = get_epoch_info(study, recommendation) if recommendation else None
    findings = findings_by_configuration(source, study_id)
    cause = next((found[0] for name, found in findings.items() if name == TODAY), None)
    spent_s = convergence[-1].spent_s if convergence else 0.0
    figures = _figures(study, unit, breakdown, history, gains, candidates, neighbours, importance, convergence, links)
    return {
        "title": short_name(study.workload),
        "study": study,
        "ended": study.state in ENDED,
        "recommendation": recommendation,
        "unit": unit,
        "headline": headline,
        "screen": screen_facts(headline, recommendation, epoch, cause) if recommendation and epoch else headline.facts,
        "under_way": get_under_way(source, study_id, spent_s, effects, _leading(findings)),
        "uses": get_uses(recommendation) if recommendation else [],
        "is_open": recommendation is not None and recommendation.verdict in OPEN,
        "more_time": more_time_command(study, recommendation) if recommendation and not site.user else "",
        "epoch": epoch,
        "quantity": parse_objective(study.settings.objective).axis,
        "top": top_rows(recommendation) if recommendation else [],
        "compare_url": ""
        if site.standalone or leading_candidate(source, study_id) is None
        else site.url(f"/compare?a={study_id}:baseline&b={study_id}:{'recommended' if recommendation else 'best'}"),
        "configurations": list(dict.fromkeys(row.configuration for row in breakdown)),
        "breakdown": breakdown_rows(breakdown),
        "profiled": any(r.breakdowns for r in results(source.trials(study_id))),
        "findings": findings,
        "tried": get_tried_info(source, study_id, effects),
        "not_tried": get_not_tried_info(source, study_id),
        "history": history,
        "numbers": numbers,
        "links_of": lambda ids: tuple((numbers[i], site.trial_url(i)) for i in ids if i in numbers),
        "looks": LOOKS,
        "tall": TALL,
        "outcomes": OUTCOME_TITLES,
        "parts": gains,
        "candidates": candidates,
        "neighbours": neighbours,
        "importance": importance,
        "importance_method": METHOD,
        "contributions": get_contributions_info(source, study_id),
        "convergence": _accepted(convergence),
        "numerics": NUMERICS,
        "hardware": recommendation.hardware if recommendation else environment.hardware if environment else None,
        "links": links,
        "plan": _plan(recommendation),
        "changes": change_rows(study, recommendation, gains) if recommendation else [],
        "downloads": downloads(recommendation, site) if recommendation else [],
        "study_files": study_files(study, source.trials(study_id), site) if len(history) else [],
        "figures": figures_json(figures),
        "scripts": SCRIPTS,
        "embedded": [],
        **IN_SERVICE,
    }


def short_name(workload: str) -> str:
    """Return a workload's reference without its folders, such as `photo_resnet.py:PhotoResNet`."""
    if is_command(workload):
        return workload.removeprefix(COMMAND)
    target, question, query = workload.partition("?")
    return target.rpartition("/")[2] + question + query


def _unit(study: Study, recommendation: Recommendation | None) -> SampleUnit:
    if recommendation is not None:
        return recommendation.sample_unit
    return study.facts.sample_unit if study.facts else SampleUnit.SAMPLE


def top_rows(r: Recommendation) -> list[TopRow]:
    """Return rows for the recommendation and the next best configurations, if measured."""
    mildest = max((part.numerics for part in r.parts), key=lambda numerics: numerics.rank, default=Numerics.EXACT)
    today = r.candidate.is_baseline
    first = TopRow(
        "recommended: today's settings" if today else "recommended",
        "" if today else r.candidate.label,
        *_speed(r, r.candidate),
        peak_memory_bytes=r.peak_memory_bytes,
        numerics=mildest.value,
        guard=r.guard.reason if r.guard else "",
    )
    others = [
        TopRow("", a.candidate.label, *_speed(r, a.candidate), a.peak_memory_bytes, a.numerics.value, a.guard)
        for a in r.alternatives[: NUM_TOP - 1]
    ]
    return [first, *others]


def _speed(r: Recommendation, candidate: Candidate) -> tuple[float, Interval | None, str]:
    speed = speed_of(r, candidate)
    assert speed is not None, "every configuration of the answer must have a speed"
    if r.verdict is Verdict.ENABLES_TRAINING and speed.method is Method.REFERENCE:
        return math.nan, None, "makes it fit"
    return speed.ratio, speed.interval, "" if speed.method is Method.REFERENCE else speed.told


def _accepted(convergence: Sequence[ConvergenceRow]) -> list[ConvergenceRow]:
    """Return the first convergence row of each accepted configuration."""
    first: dict[str, ConvergenceRow] = {}
    for row in convergence:
        if not math.isnan(row.best):
            first.setdefault(row.best_label, row)
    return list(first.values())


def breakdown_rows(info: Sequence[CategoryTime]) -> list[BreakdownRow]:
    """Return the bars of the breakdown's figure as a table, which is also the figure's legend."""
    return [
        BreakdownRow(
            title=theme.category_title(category),
            group=theme.category_group(category),
            colour=theme.category_colour(category),
            hatched=category == "unknown",
            values_ms=values,
        )
        for category, values in get_comparison_info(info)
    ]


def _plan(recommendation: Recommendation | None) -> tuple[PlannedStep, ...] | str:
    """Return the steps of the recommended plan (none for a script), or a sentence that says why they cannot be shown
    here.
    """
    if recommendation is None or recommendation.in_script is not None:
        return ()
    try:
        return planned_steps(recommendation.choices)
    except (ChoiceError, PlatformError) as error:
        return f"The plan cannot be shown here: {error}."


def findings_by_configuration(source: TrialSource, study_id: str) -> dict[str, tuple[Finding, ...]]:
    """Return the findings of the latest profile of each configuration."""
    trials = source.trials(study_id)
    starts = {TODAY: reference_results(trials)}
    leading = leading_candidate(source, study_id)
    if leading is not None:
        starts[leading[0]] = [r for r in results(trials) if r.candidate == leading[1]]
    latest = {name: [r.findings for r in found if r.findings] for name, found in starts.items()}
    return {name: found[-1] for name, found in latest.items() if found}


def _leading(findings: dict[str, tuple[Finding, ...]]) -> tuple[Finding, ...]:
    """Select the findings for the leading configuration."""
    return list(findings.values())[-1] if findings else ()


def downloads(recommendation: Recommendation, site: Site) -> list[Download]:
    """Return every export: as a link to the service, or, in a report, embedded in the page."""
    return [
        Download(
            summary=exporter.summary,
            file_name=exporter.file_name(recommendation),
            version=exporter.version,
            usage=exporter.usage,
            href=_export_url(exporter, recommendation, site),
            not_expressible=exporter.not_expressible(recommendation),
            carries="" if why_not_exported(exporter, recommendation) else exporter.carries(recommendation),
            problem=why_not_exported(exporter, recommendation) or "",
        )
        for exporter in EXPORTERS
    ]


def _export_url(exporter: Exporter, recommendation: Recommendation, site: Site) -> str:
    """Return the URL of an export; empty where the format cannot express the recommendation."""
    if why_not_exported(exporter, recommendation) is not None:
        return ""
    if site.standalone:
        return data_url(exporter.export(recommendation).encode())
    return site.url(f"/api/v1/studies/{recommendation.study_id}/exports/{exporter.name}")


def study_files(study: Study, trials: Sequence[Trial], site: Site) -> list[Download]:
    """Return the downloads with all trials; in a report, only the CSV file, which every program reads."""
    paths = {"csv": "/trials?format=csv", "parquet": "/trials?format=parquet", "optuna": "/optuna"}
    return [
        Download(
            summary=known.summary,
            file_name=known.file_name,
            version="",
            usage=known.usage,
            href=data_url(known.content(study, trials))
            if site.standalone
            else site.url(f"/api/v1/studies/{study.study_id}{paths[known.name]}"),
        )
        for known in STUDY_FORMATS
        if known.name in paths and (known.name == "csv" or not site.standalone)
    ]


def _figures(
    study: Study,
    unit: SampleUnit,
    breakdown: Sequence[CategoryTime],
    history: Sequence[HistoryRow],
    gains: Sequence[GainRow],
    candidates: Sequence[CandidateRow],
    neighbours: Sequence[NeighbourRow],
    importance: Sequence[ImportanceRow],
    convergence: Sequence[ConvergenceRow],
    links: LinksInfo | None,
) -> dict[str, Figure]:
    """Return the figures by their names on the page; figures without data are left out."""
    figures: dict[str, Figure] = {}
    if breakdown:
        figures["breakdown"] = plot_breakdown(breakdown).update_layout(showlegend=False)
    if any(not math.isnan(row.gain) for row in history):
        figures["history"] = plot_history(history, unit)
    if any(not math.isnan(row.gain) for row in gains):
        figures["gains"] = plot_gains(gains, parse_objective(study.settings.objective).axis)
    if any(not math.isnan(row.best) for row in convergence):
        figures["convergence"] = plot_convergence(convergence, study.settings.budget_s)
    if len(candidates) > 1 and any(not math.isnan(row.peak_memory_bytes) for row in candidates):
        figures["memory"] = plot_memory(candidates)
    if any(not math.isnan(row.ratio) for row in neighbours):
        figures["neighbours"] = plot_neighbours(neighbours)
    if importance:
        figures["importance"] = plot_importance(importance)
    if links is not None and len(links.points):
        figures["links"] = plot_links(links)
    return figures

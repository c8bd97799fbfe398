"""Data of a trial's page, for the service and for a study's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from markupsafe import Markup
from msgspec.structs import replace

from steptune.dashboards.compilation import compilation_sentence, get_compilation_info
from steptune.dashboards.figures import Figure
from steptune.dashboards.guard import get_guard_info, plot_guard
from steptune.dashboards.lanes import with_lanes, with_tiles
from steptune.dashboards.site import Site
from steptune.dashboards.sources import TrialSource
from steptune.dashboards.templating import figures_json, render
from steptune.dashboards.trace_page import trace_context, trace_figures
from steptune.dashboards.trial_headline import get_trial_headline
from steptune.dashboards.windows import get_spread, get_windows_info, plot_windows
from steptune.tuner.profiling.rank_comparison import main_rank
from steptune.tuner.records import CollectiveStats, SampleUnit, Trial, TrialResult, TrialState
from steptune.tuner.trace_records import Lane, RankAnalysis, TraceAnalysis
from steptune.tuner.trial_figures import TrialView

SCRIPTS = ("live.js", "lanes.js", "perfetto.js", "trial.js")

REPORT_CELLS = 50_000
"""Maximum number of timeline intervals for each trial in a report: some 300 kB."""


class SupportsHtml(Protocol):
    """Interface of an object that renders itself as HTML."""

    def __html__(self) -> str: ...


class TrialPageSource(TrialSource, Protocol):
    """Source of the data on a trial's page."""

    def get_trial(self, trial_id: str) -> TrialView:
        """Return a trial with its stored summary."""

    def trial_profile(self, trial: Trial) -> SupportsHtml | None:
        """Return the profile of a trial, as `render_profile` makes it; None for a trial without one."""

    def trial_files(self, trial_id: str) -> Mapping[str, int]:
        """Return the sizes in bytes of the trial's files, by kind: "log", "trace" of rank 0, "trace.1" of rank 1,
        ...
        """


def trial_context(source: TrialPageSource, trial_id: str) -> dict[str, Any]:
    """Return the data of `trial.html`.

    Raises:
        StudyNotFoundError: There is no such study.
    """
    view = source.get_trial(trial_id)
    trial = view.trial
    study = source.get_study(trial.study_id)
    decisions = [d for d in source.decisions(trial.study_id) if trial_id in d.trial_ids]
    unit = study.facts.sample_unit if study.facts else SampleUnit.SAMPLE
    result = trial.result
    profile = source.trial_profile(trial)
    files = source.trial_files(trial_id)
    return {
        "title": f"Trial {trial.sequence} of {study.workload}",
        "scripts": SCRIPTS,
        "trial": trial,
        "study": study,
        "unit": unit,
        "running": trial.state is TrialState.RUNNING,
        "result": result,
        "headline": get_trial_headline(view, unit, decisions, source.recommendation(trial.study_id)),
        "decisions": decisions,
        "profile": profile,
        "peaks": result.memory if result is not None else (),
        "no_profile": "" if profile is not None else why_no_profile(trial),
        "windows": list(get_windows_info(result).itertuples()) if result else [],
        "summary": view.figures,
        "spread": get_spread(result) if result else None,
        "guard": list(get_guard_info(result.guard).itertuples()) if result and result.guard else [],
        "compiled": compilation_sentence(result.compilation) if result and result.compilation else "",
        "compiled_rows": get_compilation_info(result.compilation) if result else [],
        "files": files,
        "traced_ranks": sorted(int(kind.removeprefix("trace.")) for kind in files if kind.startswith("trace.")),
        "figures": figures_json(result_figures(result)),
        "last_event": 0,
    }


def render_profile(result: TrialResult, kept: TraceAnalysis | None, lanes: Sequence[Lane] | str = ()) -> Markup | None:
    """Render the profile of a trial, as sections of its page.

    Args:
        kept: The analysis that was stored with the trial.
        lanes: All lanes, for a page that holds them; or the path of their tiles.
    """
    analysis = profile_of(result, kept)
    if analysis is None:
        return None
    rank = main_rank(analysis)
    timeline = None
    if lanes:
        timeline = with_tiles(rank, lanes) if isinstance(lanes, str) else with_lanes(rank, lanes, REPORT_CELLS)
    trace = trace_context(analysis, timeline)
    figures = figures_json(trace_figures(analysis))
    return Markup(render("trial_profile.html", Site(), trace=trace, figures=figures, peaks=result.memory))


def result_figures(result: TrialResult | None) -> dict[str, Figure]:
    """Return the page's figures by name, without the profile's figures; figures without data are left out."""
    figures: dict[str, Figure] = {}
    if result is not None and result.clean_windows:
        figures["windows"] = plot_windows(get_windows_info(result))
    if result is not None and result.guard is not None and (result.guard.losses or result.guard.reference_losses):
        figures["guard"] = plot_guard(get_guard_info(result.guard))
    return figures


def profile_of(result: TrialResult, kept: TraceAnalysis | None) -> TraceAnalysis | None:
    """Return the profile of a trial, with the breakdown and findings that the search used. If the analysis was not
    stored, the profile has only the content of the trial's record. None where the trial was not profiled.
    """
    if not result.breakdowns:
        return None
    if kept is None:
        return TraceAnalysis(ranks=_ranks_of(result), findings=result.findings, collectives=_collectives_of(result))
    own = {(b.rank, b.device): b for b in result.breakdowns}
    ranks = tuple(
        replace(rank, breakdowns=tuple(own.get((b.rank, b.device), b) for b in rank.breakdowns)) for rank in kept.ranks
    )
    return replace(kept, ranks=ranks, findings=result.findings or kept.findings)


def _ranks_of(result: TrialResult) -> tuple[RankAnalysis, ...]:
    profile = result.profile
    numbers = sorted({b.rank for b in result.breakdowns})
    ranks = []
    for number in numbers:
        breakdowns = tuple(b for b in result.breakdowns if b.rank == number)
        known = profile is not None and number == numbers[0]
        ranks.append(
            RankAnalysis(
                file="",
                rank=number,
                num_ranks=max(len(result.memory), len(numbers)),
                framing="",
                num_events=sum(b.quality.num_events for b in breakdowns),
                num_lost=0,
                device_names={},
                breakdowns=breakdowns,
                kernels=profile.kernels if profile is not None and known else (),
            )
        )
    return tuple(ranks)


def _collectives_of(result: TrialResult) -> tuple[CollectiveStats, ...]:
    return result.profile.collectives if result.profile is not None else ()


def why_no_profile(trial: Trial) -> str:
    """Say in a sentence why a trial has no profile."""
    result = trial.result
    if result is None:
        return "The trial has no profile yet." if trial.state is TrialState.RUNNING else "The trial has no profile."
    if result.failure is not None:
        return "The trial has no profile: it ended before profiling."
    return f"Not profiled: trials for the purpose “{trial.purpose.value}” need no profile."

"""One study as one self-contained HTML file: its page, as the service shows it, with the pages of the most relevant
trials. It loads nothing, so it can be mailed, archived and read offline.
"""

from __future__ import annotations

from dataclasses import replace

from markupsafe import Markup

from steptune.dashboards.site import STANDALONE, Site
from steptune.dashboards.sources import TrialSource, snapshot
from steptune.dashboards.starts import leading_candidate, reference_results
from steptune.dashboards.study_page import study_context
from steptune.dashboards.templating import render
from steptune.dashboards.trial_page import SCRIPTS, TrialPageSource, trial_context
from steptune.tuner.records import Trial

MAX_TRIALS = 6
"""Maximum number of trial pages in a report: each may be as large as the rest of the report."""


def render_report(source: TrialSource, study_id: str, pages: TrialPageSource | None = None) -> str:
    """Render a study's page, whatever the state of the study, as one self-contained HTML file.

    Args:
        pages: Source of the trial pages; without it there are none.

    Raises:
        StudyNotFoundError: There is no such study.
    """
    source = snapshot(source, study_id)
    study_id = source.study.study_id
    shown = [t.trial_id for t in trials_shown(source, study_id)] if pages is not None else []
    site = replace(STANDALONE, trials=frozenset(shown))
    context = study_context(source, study_id, site)
    embedded = [(i, _embedded(pages, i, site)) for i in shown] if pages is not None else []
    scripts = (*context["scripts"], *(SCRIPTS if embedded else ()))
    return render("study.html", site, **{**context, "embedded": embedded, "scripts": scripts})


def trials_shown(source: TrialSource, study_id: str) -> list[Trial]:
    """Return the profiled trials that get a page (at most `MAX_TRIALS`), the earliest first: the latest trial of
    today's settings, of each recently accepted configuration, and of the leading configuration.
    """
    trials = [t for t in source.trials(study_id) if t.result is not None and t.result.ok and t.result.breakdowns]
    reference = [r.candidate for r in reference_results(source.trials(study_id))][:1]
    accepted = [d.candidate for d in source.decisions(study_id) if d.verdict == "accepted" and d.candidate]
    leading = leading_candidate(source, study_id)
    wanted = [*reference, *accepted[-(MAX_TRIALS - 2) :], *([leading[1]] if leading else [])]
    latest = {trial.candidate.key: trial for trial in trials}
    found = {c.key: latest[c.key] for c in wanted if c.key in latest}
    return sorted(found.values(), key=lambda trial: trial.sequence)


def _embedded(pages: TrialPageSource, trial_id: str, site: Site) -> Markup:
    context = trial_context(pages, trial_id)
    return Markup(render("trial.html", site, **{**context, "layout": "embedded.html", "anchor": f"trial-{trial_id}-"}))

"""One study as one HTML file: the study's page, as the service shows it, that loads nothing and can be mailed."""

from __future__ import annotations

from dashboards.site import STANDALONE
from dashboards.sources import TrialSource
from dashboards.study_page import study_context
from dashboards.templating import render


def render_report(source: TrialSource, study_id: str) -> str:
    """The page of a study, whatever its state, as one self-contained HTML file.

    Raises:
        StudyNotFound: There is no such study.
    """
    return render("study.html", STANDALONE, **study_context(source, study_id, STANDALONE))

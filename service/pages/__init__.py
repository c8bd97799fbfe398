"""Web pages under `/`: HTML from the templates of `dashboards`, with data from the queries of the REST interface."""

from __future__ import annotations

from typing import NamedTuple

from steptune.service.pages import compare, fleet, scaling, static, studies, study, submit, trials


class Page(NamedTuple):
    """A page: its route's name, its path, and its purpose."""

    name: str
    path: str
    summary: str


PAGES = (
    Page("studies_page", "/", "Studies, with their results"),
    Page("submit_page", "/submit", "The form for a new study"),
    Page("study_page", "/studies/{study_id}", "Results of a study, with the reasons"),
    Page("scaling_page", "/studies/{study_id}/scaling", "Predicted training time of a study on more hosts"),
    Page("trial_page", "/trials/{trial_id}", "Time of a trial's steps by category"),
    Page("compare_page", "/compare", "Two trials or studies side by side"),
    Page("fleet_page", "/fleet", "Bottlenecks and successful strategies of all studies"),
)
ROUTERS = tuple(module.router for module in (static, studies, study, scaling, trials, compare, fleet, submit))

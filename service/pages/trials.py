"""The page of a trial."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from steptune.dashboards.site import Site
from steptune.dashboards.trial_page import trial_context
from steptune.service.api.context import TrialId, services
from steptune.service.api.ownership import check_trial
from steptune.service.pages.routing import PageRoute, Reader, shared_page, site_of
from steptune.service.queries.events import newest_number
from steptune.service.queries.versions import trial_version
from steptune.service.store import SqlStudyStore
from steptune.service.trial_source import KeptTrials

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/trials/{trial_id}")
def trial_page(request: Request, principal: Reader, trial_id: TrialId) -> Response:
    """Show the page of a trial: its time by category, or, while it runs, its progress."""
    service = services(request)
    check_trial(service.engine, trial_id, principal)
    study_id, version = trial_version(service.engine, trial_id)

    def context(site: Site) -> dict[str, Any]:
        store = SqlStudyStore(service.engine)
        return trial_context(KeptTrials(store, service.artifacts, service.records, service.profiles), trial_id)

    return shared_page(
        request,
        site_of(request, principal),
        "trial.html",
        key=trial_id,
        version=version,
        context=context,
        last_event=newest_number(service.engine, study_id),
    )

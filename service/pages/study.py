"""A study's page, and the same page as one file."""

from __future__ import annotations

import gzip
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from steptune.dashboards.report import render_report
from steptune.dashboards.site import Site
from steptune.dashboards.study_page import ENDED, SCRIPTS, study_context
from steptune.service.api.context import Services, StudyId, services
from steptune.service.api.ownership import check_study
from steptune.service.api.problems import not_found
from steptune.service.pages.routing import PageRoute, Reader, accepts_gzip, shared_page, site_of
from steptune.service.queries.events import newest_number
from steptune.service.queries.studies import find_study
from steptune.service.queries.versions import study_version
from steptune.service.queue.records import BEGUN
from steptune.service.store import SqlStudyStore
from steptune.service.trial_source import KeptTrials

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/studies/{study_id}")
def study_page(request: Request, principal: Reader, study_id: StudyId) -> Response:
    """Show the page of a study, with its answer and the reasons; live while it runs."""
    service = services(request)
    check_study(service.engine, study_id, principal)
    last_event = newest_number(service.engine, study_id)  # what happens while the page is made is told again
    version = study_version(service.engine, study_id)
    queue = _in_queue(service, study_id)

    def context(site: Site) -> dict[str, Any]:
        found = study_context(
            KeptTrials(SqlStudyStore(service.engine), service.artifacts, service.records), study_id, site
        )
        return {**found, **queue, "scripts": ("live.js", *SCRIPTS)}

    return shared_page(
        request,
        site_of(request, principal),
        "study.html",
        key=study_id,
        version=(version, queue["waits_for"]),
        context=context,
        last_event=last_event,
    )


@router.get("/studies/{study_id}/report.html")
def study_report(request: Request, principal: Reader, study_id: StudyId) -> Response:
    """Send the page as a file to download, which also contains its scripts."""
    service = services(request)
    check_study(service.engine, study_id, principal)
    source = KeptTrials(SqlStudyStore(service.engine), service.artifacts, service.records)
    body = render_report(source, study_id, source).encode()
    headers = {
        "Content-Disposition": f'attachment; filename="steptune-{study_id[-6:]}.html"',
        "Cache-Control": "private, no-cache",
        "Vary": "Cookie, Accept-Encoding",
    }
    if accepts_gzip(request):
        body, headers["Content-Encoding"] = gzip.compress(body, 5, mtime=0), "gzip"
    return Response(body, headers=headers, media_type="text/html; charset=utf-8")


def _in_queue(service: Services, study_id: str) -> dict[str, Any]:
    """Return facts about a study in the service: whether it is queued and live, what it waits for, and its details."""
    detail = find_study(service.engine, study_id)
    if detail is None:
        raise not_found("study", study_id)
    waits_for = ""
    if detail.queue is not None and detail.state in BEGUN:
        waits_for = service.queue.entry(study_id).waits_for
        if detail.queue.requested:
            waits_for = f"{detail.queue.requested} was requested; the study stops soon"
    return {
        "queued": detail.queue is not None,
        "waits_for": waits_for,
        "live": detail.state not in ENDED,
        "about": detail,
    }

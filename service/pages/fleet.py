"""Overview of all studies: their bottlenecks, and the gains of the strategies."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from steptune.dashboards.fleet import fleet_context
from steptune.dashboards.site import Site
from steptune.service.api.context import services
from steptune.service.api.inventory import reservation_of
from steptune.service.pages.routing import PageRoute, Reader, shared_page, site_of
from steptune.service.queries.versions import fleet_version
from steptune.tuner.records import StudyState

NUM_RESERVATIONS = 50
"""Maximum number of listed studies that hold devices, and of listed studies that wait for devices."""
router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/fleet")
def fleet_page(request: Request, principal: Reader) -> Response:
    """Show the overview: administrators see all studies, other users see their own. The reservations are read anew for
    each request.
    """
    service = services(request)
    owner_id = None if principal.is_admin else principal.user_id

    reservations = tuple(
        reservation_of(entry)
        for state in (StudyState.RUNNING, StudyState.QUEUED)
        for entry in service.queue.under_way(owner_id, [state], limit=NUM_RESERVATIONS)
    )

    def context(site: Site) -> dict[str, Any]:
        found = fleet_context(*service.fleet.read(service.engine, owner_id))
        return {**found, "reservations": reservations, "title": "Fleet", "current": "/fleet"}

    return shared_page(
        request,
        site_of(request, principal),
        "fleet.html",
        key=owner_id,
        version=(fleet_version(service.engine, owner_id), reservations),
        context=context,
    )

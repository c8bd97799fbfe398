"""The list of studies."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from steptune.dashboards.site import Site
from steptune.dashboards.studies_list import SORTS
from steptune.service.api.context import services
from steptune.service.api.problems import RefusalError
from steptune.service.pages.routing import PageRoute, Reader, shared_page, site_of
from steptune.service.queries.events import horizon
from steptune.service.queries.study_list import ListQuery, hardware_labels, list_page, num_by_state
from steptune.tuner.costs.categories import WAITS
from steptune.tuner.records import StudyState

router = APIRouter(include_in_schema=False, route_class=PageRoute)
NUM_ROWS = 50
BOTTLENECKS = (*WAITS, "compute", "optimizer")
Text = Annotated[str, Query(max_length=200, pattern=r"^[^\x00-\x1f]*$")]


@router.get("/")
def studies_page(
    request: Request,
    principal: Reader,
    q: Text = "",
    state: Text = "",
    hardware: Text = "",
    bottleneck: Text = "",
    tag: Text = "",
    sort: Text = "newest",
    cursor: Annotated[str, Query(max_length=900)] = "",
) -> Response:
    """Show the studies that the reader may see, one page of the list at a time."""
    service = services(request)
    owner_id = None if principal.is_admin else principal.user_id
    wanted = ListQuery(
        owner_id=owner_id,
        text=q.strip(),
        state=state,
        hardware=hardware,
        bottleneck=bottleneck,
        tag=tag,
        sort=sort if sort in SORTS else "newest",
        cursor=cursor,
    )
    last_event = horizon(service.engine).final
    try:
        found = list_page(service.engine, wanted, NUM_ROWS)
    except ValueError as error:
        raise RefusalError(404, "invalid-cursor", str(error)) from error
    given: dict[str, Any] = {
        "q": q,
        "state": state,
        "hardware": hardware,
        "bottleneck": bottleneck,
        "tag": tag,
        "sort": sort,
    }
    given = {name: value for name, value in given.items() if value and (name, value) != ("sort", "newest")}
    counts = num_by_state(service.engine, owner_id)
    labels = tuple(hardware_labels(service.engine))

    def context(site: Site) -> dict[str, Any]:
        return {
            "title": "Studies",
            "current": "/",
            "scripts": ("live.js", "studies.js"),
            "studies": found.studies,
            "next_query": urlencode({**given, "cursor": found.next_cursor}) if found.next_cursor else "",
            "first_query": urlencode(given),
            "is_first": not cursor,
            "wanted": wanted,
            "is_filtered": bool({*given} - {"sort"}),
            "counts": counts,
            "num_studies": sum(counts.values()),
            "states": list(StudyState),
            "hardware_labels": labels,
            "bottlenecks": BOTTLENECKS,
            "sorts": SORTS,
            "sort_queries": {name: urlencode({**given, "sort": name}) for name in SORTS},
        }

    return shared_page(
        request,
        site_of(request, principal),
        "studies.html",
        key=(wanted, *sorted(given)),
        version=(found, *counts.items(), labels),  # what it shows is read faster than a version of it were
        context=context,
        last_event=last_event,
    )

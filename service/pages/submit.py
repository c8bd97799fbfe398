"""The form for a new study. Its script sends the fields to the REST interface."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from steptune.service.api.requests import MAX_NUM_RANKS
from steptune.service.pages.routing import PageRoute, Submitter, page, site_of
from steptune.tuner.records import Numerics
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.workloads.zoo import ZOO

router = APIRouter(include_in_schema=False, route_class=PageRoute)
BUDGETS = {300: "5 minutes", 600: "10 minutes", 1800: "30 minutes", 3600: "1 hour", 14400: "4 hours"}
ASKED = {
    Numerics.LOSSY: "choices that lose information, such as gradient compression",
    Numerics.RECIPE: "another training recipe, such as another optimizer",
}


@router.get("/submit")
def submit_page(request: Request, principal: Submitter) -> Response:
    """Show the form for a new study."""
    return page(
        request,
        site_of(request, principal),
        "submit.html",
        title="Submit a study",
        current="/submit",
        scripts=("submit.js",),
        zoo=ZOO,
        budgets=BUDGETS,
        numerics=ASKED,
        strategies=STRATEGIES,
        max_num_ranks=MAX_NUM_RANKS,
    )

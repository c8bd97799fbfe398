"""The timeline of a trial at every zoom level: tiles with the activity of devices, streams and threads, and the events
of a given name.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from steptune.service.access.principal import Principal
from steptune.service.api.answers import answer
from steptune.service.api.context import TrialId, services
from steptune.service.api.openapi import COMMON, refuses, returns, unchanged
from steptune.service.api.ownership import check_trial
from steptune.service.api.problems import RefusalError
from steptune.service.api.security import Requires
from steptune.service.messages import TrialSpans
from steptune.service.settings.scopes import Scope
from steptune.service.store import SqlStudyStore
from steptune.service.trial_source import KeptTrials
from steptune.tuner.profiling.tiles import MAX_LEVEL, LaneTables
from steptune.tuner.trace_records import LaneTile

MAX_SPANS = 100
MAX_NAME = 5_300
"""Maximum number of characters of an event's name in a URL: a URL has room for 64 KiB, and an encoded character takes
up to 12 bytes.
"""
router = APIRouter(tags=["trials"], responses=COMMON)
Reader = Annotated[Principal, Requires(Scope.READ)]


@router.get(
    "/trials/{trial_id}/lanes",
    summary="Read a tile of a trial's timeline",
    description="Activity of devices, streams and threads in one of 2^`level` equal parts of the profiled time. Where "
    "many events are shorter than a thousandth of the part, they are merged into one cell for each category, with "
    "its exact time. Level 0 covers the whole time; each further level doubles the resolution.",
    responses={**returns(LaneTile, "The tile."), **unchanged(), **refuses(404)},
)
def get_lanes(
    request: Request,
    principal: Reader,
    trial_id: TrialId,
    level: Annotated[int, Query(ge=0, le=MAX_LEVEL, description="How close.")] = 0,
    tile: Annotated[int, Query(ge=0, lt=1 << MAX_LEVEL, description="Index of the tile within its level, from 0.")] = 0,
) -> Response:
    if tile >= 1 << level:
        raise RefusalError(404, "tile-not-found", f"level {level} has the tiles 0 to {(1 << level) - 1}, not {tile}")
    return answer(request, _tables(request, principal, trial_id).tile(level, tile))


@router.get(
    "/trials/{trial_id}/spans",
    summary="Find events in a trial's timeline",
    description="The longest events with one name (of a kernel, an operator or a call), the longest first.",
    responses={**returns(TrialSpans, "Their places."), **unchanged(), **refuses(404)},
)
def list_spans(
    request: Request,
    principal: Reader,
    trial_id: TrialId,
    name: Annotated[str, Query(min_length=1, max_length=MAX_NAME, description="The whole name.")],
    limit: Annotated[int, Query(ge=1, le=MAX_SPANS, description="Maximum number of results.")] = MAX_SPANS,
) -> Response:
    found = _tables(request, principal, trial_id).places(name, limit)
    return answer(request, TrialSpans(trial_id=trial_id, name=name, spans=found))


def _tables(request: Request, principal: Principal, trial_id: str) -> LaneTables:
    """Return the timeline of a trial: its lanes, one for each device, stream and thread.

    Raises:
        RefusalError: The trial has no stored lanes.
    """
    service = services(request)
    check_trial(service.engine, trial_id, principal)
    source = KeptTrials(SqlStudyStore(service.engine), service.artifacts)
    tables = source.lane_tables(trial_id, service.lanes)
    if not tables.num_cells:
        raise RefusalError(404, "lanes-not-found", f"no timeline is stored for trial {trial_id}")
    return tables

"""Endpoints for workers, reservations, hardware profiles and the calling user."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from steptune.service.access.principal import Principal
from steptune.service.api.answers import answer
from steptune.service.api.context import services
from steptune.service.api.openapi import COMMON, refuses, returns, unchanged
from steptune.service.api.pagination import Paging
from steptune.service.api.problems import not_found
from steptune.service.api.security import Requires
from steptune.service.messages import (
    Caller,
    HardwareSummary,
    Page,
    ReservationSummary,
    WorkerSlot,
    WorkerSummary,
)
from steptune.service.queries import inventory as queries
from steptune.service.queries.stored import message
from steptune.service.queries.studies import owners_of
from steptune.service.queue import QueueEntry, WorkerInfo
from steptune.service.settings.scopes import Scope

router = APIRouter(responses=COMMON)
Reader = Annotated[Principal, Requires(Scope.READ)]
Anybody = Annotated[Principal, Requires()]


@router.get(
    "/workers",
    tags=["workers"],
    summary="List workers",
    description="Workers, the newest first. Studies that a worker runs for other users are not shown.",
    responses={**returns(Page[WorkerSummary], "A page of workers."), **unchanged()},
)
def list_workers(request: Request, principal: Reader, page: Paging) -> Response:
    service = services(request)
    workers = [w for w in service.queue.workers() if page.after is None or w.worker_id < page.after]
    found = page.cut(workers, lambda worker: worker.worker_id)
    owners = owners_of(service.engine, [worker.study_id for worker in found.items if worker.study_id is not None])
    seen = {study_id for study_id, owner_id in owners.items() if principal.may_see(owner_id)}
    return answer(request, found.each(lambda worker: _worker(worker, seen)))


@router.get(
    "/reservations",
    tags=["workers"],
    summary="List reservations",
    description="Studies that hold hosts and devices or wait for them, with the reason for each wait; the oldest "
    "study first. Administrators see the studies of all users, others only their own.",
    responses={**returns(Page[ReservationSummary], "A page of reservations."), **unchanged()},
)
def list_reservations(request: Request, principal: Reader, page: Paging) -> Response:
    owner_id = None if principal.is_admin else principal.user_id
    found = services(request).queue.under_way(owner_id, limit=page.limit + 1, after=page.after)
    return answer(request, page.cut(found, lambda entry: entry.study_id).each(reservation_of))


@router.get(
    "/hardware-profiles",
    tags=["workers"],
    summary="List hardware profiles",
    description="Hardware of workers and of past studies, ordered by fingerprint.",
    responses={**returns(Page[HardwareSummary], "A page of hardware profiles."), **unchanged()},
)
def list_hardware(request: Request, principal: Reader, page: Paging) -> Response:
    service = services(request)
    found = queries.list_hardware(service.engine, limit=page.limit, after=page.after)
    return answer(request, page.cut(found, lambda profile: profile.fingerprint))


@router.get(
    "/hardware-profiles/{fingerprint}",
    tags=["workers"],
    summary="Read a hardware profile",
    description="Properties of the hardware that affect the measurements of its studies.",
    responses={**returns(HardwareSummary, "The hardware profile."), **unchanged(), **refuses(404)},
)
def get_hardware(
    request: Request,
    principal: Reader,
    fingerprint: Annotated[str, Path(pattern=r"^[0-9a-f]{1,64}$", description="Fingerprint of the hardware profile.")],
) -> Response:
    service = services(request)
    profile = queries.find_hardware(service.engine, fingerprint)
    if profile is None:
        raise not_found("hardware profile", fingerprint)
    return answer(request, profile)


@router.get(
    "/me",
    tags=["session"],
    summary="Who am I?",
    description="User and permissions of this token or session.",
    responses={**returns(Caller, "The caller."), **unchanged()},
)
async def get_me(request: Request, principal: Anybody) -> Response:
    me = message(Caller, principal, scopes=tuple(scope for scope in Scope if scope in principal.scopes))
    return answer(request, me)


def reservation_of(entry: QueueEntry) -> ReservationSummary:
    """Return the reservation that a study holds or waits for, in the form that the REST interface and the HTML pages
    show.
    """
    since = (entry.claimed_at if entry.holds else None) or entry.queued_at
    return message(ReservationSummary, entry, since=since)


def _worker(worker: WorkerInfo, seen: set[str]) -> WorkerSummary:
    return message(
        WorkerSummary,
        worker,
        slots=tuple(WorkerSlot(kind=slot.kind, number=slot.number) for slot in worker.slots),
        study_id=worker.study_id if worker.study_id in seen else None,
    )

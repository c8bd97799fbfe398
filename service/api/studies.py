"""Studies: submitting, following, changing and ending them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from service.access.principal import Principal
from service.access.scopes import Scope
from service.api.answers import answer
from service.api.context import Service, StudyId
from service.api.openapi import COMMON, refuses, returns, unchanged
from service.api.pagination import Paging
from service.api.problems import not_found
from service.api.security import Requires
from service.messages import StudyDetail, StudyPage
from service.queries import studies as queries
from service.queries.studies import StudyFilter
from tuner.records import StudyState

router = APIRouter(prefix="/studies", tags=["studies"], responses=COMMON)
Reader = Annotated[Principal, Requires(Scope.READ)]
Submitter = Annotated[Principal, Requires(Scope.SUBMIT)]

PLAIN = r"^[^\x00-\x1f]*$"


@router.get(
    "",
    summary="List studies",
    description="Yours, the newest first; all of them for administrators.",
    responses={**returns(StudyPage, "A page of studies."), **unchanged()},
)
def list_studies(
    request: Request,
    service: Service,
    principal: Reader,
    page: Paging,
    state: Annotated[StudyState | None, Query(description="Only those in this state.")] = None,
    owner: Annotated[
        str | None, Query(pattern=r"^[0-9A-Za-z]{1,64}$", description="Only those of this user (an id).")
    ] = None,
    workload: Annotated[
        str | None, Query(max_length=500, pattern=PLAIN, description="Only those of this workload (its reference).")
    ] = None,
    workload_id: Annotated[
        str | None, Query(pattern=r"^[0-9a-z]{1,64}$", description="Only those of this uploaded workload.")
    ] = None,
    hardware: Annotated[
        str | None,
        Query(pattern=r"^[0-9a-f]{1,64}$", description="Only those on this hardware profile (a fingerprint)."),
    ] = None,
) -> Response:
    wanted = StudyFilter(
        owner_id=owner if principal.is_admin else principal.user_id,
        state=state,
        workload=workload,
        workload_id=workload_id,
        hardware=hardware,
    )
    if owner is not None and not principal.may_see(owner):
        return answer(request, StudyPage(items=(), next_cursor=None))
    found = queries.list_studies(service.engine, wanted, limit=page.limit, before=page.after)
    items, next_cursor = page.cut(found, lambda study: study.study_id)
    return answer(request, StudyPage(items=items, next_cursor=next_cursor))


@router.get(
    "/{study_id}",
    summary="Read a study",
    description="What was asked, on what it runs, how far it is. Its ETag goes into `If-Match` of a change.",
    responses={**returns(StudyDetail, "The study."), **unchanged(), **refuses(404)},
)
def get_study(request: Request, service: Service, principal: Reader, study_id: StudyId) -> Response:
    return _study_answer(request, service, principal, study_id)


def _study_answer(
    request: Request, service: Service, principal: Principal, study_id: str, *, status: int = 200
) -> Response:
    study = queries.find_study(service.engine, study_id)
    if study is None or not principal.may_see(study.owner_id):
        raise not_found("study", study_id)
    version = None if study.queue is None else study.queue.version
    return answer(request, study, status=status, version=version)

"""Studies: submitting, reading, changing and ending them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from msgspec.structs import replace

from steptune.service.access.principal import Principal
from steptune.service.api.answers import IfMatch, answer, check_version
from steptune.service.api.context import Services, StudyId, services
from steptune.service.api.idempotency import Idempotency, Once
from steptune.service.api.openapi import COMMON, refuses, returns, unchanged
from steptune.service.api.ownership import check_study, own_workload
from steptune.service.api.pagination import Paging
from steptune.service.api.problems import RefusalError, not_found
from steptune.service.api.reading import reads_rows
from steptune.service.api.requests import StudyChange, StudyRequest, check_of_a_script
from steptune.service.api.security import Requires
from steptune.service.messages import Page, StudyDetail, StudySummary
from steptune.service.queries import studies as queries
from steptune.service.queries.studies import StudyFilter
from steptune.service.queue.records import BEGUN, SCRIPT
from steptune.service.settings.scopes import Scope
from steptune.service.submission import checked_reference, new_study
from steptune.tuner.errors import WorkloadNotFoundError
from steptune.tuner.records import StudyState

router = APIRouter(prefix="/studies", tags=["studies"], responses=COMMON)
Reader = Annotated[Principal, Requires(Scope.READ)]
Submitter = Annotated[Principal, Requires(Scope.SUBMIT)]

ACCEPTED = returns(StudyDetail, "Current state of the study.", status=202, headers=("Location", "Retry-After"))
PLAIN = r"^[^\x00-\x1f]*$"


@router.get(
    "",
    summary="List studies",
    description="Your studies, the newest first; administrators see all studies.",
    responses={**returns(Page[StudySummary], "A page of studies."), **unchanged()},
)
@reads_rows
def list_studies(
    request: Request,
    principal: Reader,
    page: Paging,
    state: Annotated[StudyState | None, Query(description="Only studies in this state.")] = None,
    owner: Annotated[
        str | None, Query(pattern=r"^[0-9A-Za-z]{1,64}$", description="Only studies of this user (an id).")
    ] = None,
    workload: Annotated[
        str | None,
        Query(
            max_length=500,
            pattern=PLAIN,
            description="Only studies of this workload (a reference, exactly as in the study).",
        ),
    ] = None,
    workload_id: Annotated[
        str | None, Query(pattern=r"^[0-9a-z]{1,64}$", description="Only studies of this uploaded workload.")
    ] = None,
    hardware: Annotated[
        str | None,
        Query(pattern=r"^[0-9a-f]{1,64}$", description="Only studies on the hardware with this fingerprint."),
    ] = None,
) -> Response:
    service = services(request)
    wanted = StudyFilter(
        owner_id=owner if principal.is_admin else principal.user_id,
        state=state,
        workload=workload,
        workload_id=workload_id,
        hardware=hardware,
    )
    if owner is not None and not principal.may_see(owner):
        return answer(request, Page(items=(), next_cursor=None))
    found = queries.list_studies(service.engine, wanted, limit=page.limit, before=page.after)
    return answer(request, page.cut(found, lambda study: study.study_id))


@router.get(
    "/{study_id}",
    summary="Read a study",
    description="The request, the machine that runs it, and its progress. Send its ETag as `If-Match` with a change.",
    responses={**returns(StudyDetail, "The study."), **unchanged(), **refuses(404)},
)
@reads_rows
def get_study(request: Request, principal: Reader, study_id: StudyId) -> Response:
    service = services(request)
    return _study_answer(request, service, principal, study_id)


@router.post(
    "",
    status_code=201,
    summary="Submit a study",
    description="The study waits for a worker with the required hardware. Studies of different users take turns.",
    responses={**returns(StudyDetail, "The new study.", status=201, headers=("Location",)), **refuses(404, 409, 507)},
)
def submit_study(request: Request, principal: Submitter, body: StudyRequest, once: Once) -> Response:
    service = services(request)

    def work(study_id: str) -> Response:
        return _submit(request, service, principal, body, study_id)

    return once.run(service.engine, principal.user_id, work)


@router.patch(
    "/{study_id}",
    summary="Change a study",
    description="Changes the title, tags, notes or priority. With `If-Match`, only if the study has not changed "
    "meanwhile.",
    responses={**returns(StudyDetail, "Current state of the study."), **refuses(404, 409, 412)},
)
def change_study(
    request: Request,
    principal: Submitter,
    study_id: StudyId,
    body: StudyChange,
    if_match: IfMatch = None,
) -> Response:
    service = services(request)
    version = _checked_version(service, principal, study_id, if_match)
    queries.change_study(
        service.engine,
        study_id,
        version,
        title=body.title,
        priority=body.priority,
        tags=body.tags,
        notes=body.notes,
    )
    return _study_answer(request, service, principal, study_id)


@router.delete(
    "/{study_id}",
    status_code=204,
    summary="Delete a study",
    description="Deletes the study with its trials and all their measurements. A running study must be "
    "cancelled first.",
    responses={204: {"description": "It is gone."}, **refuses(404, 409, 412)},
)
def delete_study(request: Request, principal: Submitter, study_id: StudyId, if_match: IfMatch = None) -> Response:
    service = services(request)
    service.queue.delete(study_id, _checked_version(service, principal, study_id, if_match))
    return Response(status_code=204)


@router.post(
    "/{study_id}/cancel",
    status_code=202,
    summary="Cancel a study",
    description="Ends the study permanently. A running study stops soon, and recommends the best candidate so far.",
    responses={**ACCEPTED, **refuses(404, 409, 412)},
)
def cancel_study(
    request: Request, principal: Submitter, study_id: StudyId, once: Once, if_match: IfMatch = None
) -> Response:
    service = services(request)
    return _act(request, service, principal, study_id, once, if_match, service.queue.cancel)


@router.post(
    "/{study_id}/pause",
    status_code=202,
    summary="Pause a study",
    description="Stops the study until it is resumed. A running study stops soon; complete trials are kept.",
    responses={**ACCEPTED, **refuses(404, 409, 412)},
)
def pause_study(
    request: Request, principal: Submitter, study_id: StudyId, once: Once, if_match: IfMatch = None
) -> Response:
    service = services(request)
    return _act(request, service, principal, study_id, once, if_match, service.queue.pause)


@router.post(
    "/{study_id}/resume",
    status_code=202,
    summary="Resume a study",
    description="Requeues a paused, interrupted or failed study; complete trials are kept.",
    responses={**ACCEPTED, **refuses(404, 409, 412)},
)
def resume_study(
    request: Request, principal: Submitter, study_id: StudyId, once: Once, if_match: IfMatch = None
) -> Response:
    service = services(request)
    return _act(request, service, principal, study_id, once, if_match, service.queue.resume)


def _submit(request: Request, service: Services, principal: Principal, body: StudyRequest, study_id: str) -> Response:
    if not queries.study_owner(service.engine, study_id).exists:  # it does where its process died before it answered
        source = None if body.workload_id is None else own_workload(service.engine, body.workload_id, principal)
        if source is not None and source.kind == SCRIPT:
            check_of_a_script(body)
        reference = checked_reference(body.workload or "") if source is None else source.entry
        study = new_study(
            study_id,
            reference,
            body.settings(),
            service.settings.data_directory,
            uploaded_digest=None if source is None else source.digest,
        )
        try:
            service.queue.submit(
                study,
                owner_id=principal.user_id,
                source_id=body.workload_id,
                title=body.title,
                priority=body.priority,
                required_device_kind=body.device,
                required_hardware=body.hardware,
                num_devices=body.num_ranks // body.num_hosts if body.device == "cuda" else 1,
            )
        except WorkloadNotFoundError as error:  # deleted since it was found
            raise not_found("workload", body.workload_id or "") from error
    headers = {"Location": _location(request, study_id)}
    return _study_answer(request, service, principal, study_id, status=201, headers=headers)


def _location(request: Request, study_id: str) -> str:
    return str(request.url_for("get_study", study_id=study_id).path)


def _act(
    request: Request,
    service: Services,
    principal: Principal,
    study_id: str,
    once: Idempotency,
    if_match: str | None,
    action: Callable[[str, int | None], object],
) -> Response:
    """Carry out an action on one of the caller's studies; a repeated request with the same idempotency key gets the
    same answer without repeating the action.
    """

    def work(_: str) -> Response:
        action(study_id, _checked_version(service, principal, study_id, if_match))
        headers = {"Location": _location(request, study_id), "Retry-After": "1"}
        return _study_answer(request, service, principal, study_id, status=202, headers=headers)

    check_study(service.engine, study_id, principal)
    return once.run(service.engine, principal.user_id, work)


def _checked_version(service: Services, principal: Principal, study_id: str, if_match: str | None) -> int | None:
    """Check a study's owner and the header `If-Match`. Return the version that the study must still have when it is
    changed, or None if any version will do.

    Raises:
        RefusalError: 404 where there is none, 409 where it belongs to the command line, 412 where its version
            differs.
    """
    check_study(service.engine, study_id, principal)
    version = queries.version_of_study(service.engine, study_id)
    if version is None:
        raise RefusalError(
            409,
            "not-in-queue",
            f"study {study_id} was started by a `steptune` command: the service can read it, but not change it",
        )
    return check_version(if_match, version)


def _study_answer(
    request: Request,
    service: Services,
    principal: Principal,
    study_id: str,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    study = queries.find_study(service.engine, study_id)
    if study is None or not principal.may_see(study.owner_id):
        raise not_found("study", study_id)
    if study.queue is not None and study.state in BEGUN:
        waits_for = service.queue.entry(study_id).waits_for
        study = replace(study, queue=replace(study.queue, waits_for=waits_for))
    version = None if study.queue is None else study.queue.version
    return answer(request, study, status=status, version=version, headers=headers)

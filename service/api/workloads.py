"""Workloads: uploading them, or naming those that the workers already have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException

from steptune.service.access.principal import Principal
from steptune.service.api.answers import answer
from steptune.service.api.context import Services, services
from steptune.service.api.idempotency import Once
from steptune.service.api.openapi import COMMON, refuses, returns, unchanged
from steptune.service.api.ownership import own_workload
from steptune.service.api.pagination import Paging
from steptune.service.api.problems import RefusalError
from steptune.service.api.requests import UploadForm, WorkloadRequest
from steptune.service.api.security import Requires
from steptune.service.connections import storage_errors
from steptune.service.messages import Page, WorkloadInfo
from steptune.service.queries import workloads as queries
from steptune.service.settings.scopes import Scope
from steptune.service.submission import checked_reference
from steptune.service.uploads import receive

router = APIRouter(prefix="/workloads", tags=["workloads"], responses=COMMON)
Reader = Annotated[Principal, Requires(Scope.READ)]
Submitter = Annotated[Principal, Requires(Scope.SUBMIT)]
WorkloadId = Annotated[str, PathParameter(pattern=r"^[0-9a-z]{1,64}$", description="Id of a workload.")]

BODIES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": WorkloadRequest.model_json_schema()},
            "multipart/form-data": {"schema": UploadForm.model_json_schema()},
        },
    }
}


@dataclass(frozen=True, kw_only=True)
class SentFile:
    """A file that was received completely."""

    file: UploadFile
    form: UploadForm


async def _sent(request: Request, _: Submitter) -> AsyncIterator[WorkloadRequest | SentFile]:
    """Yield the body: a JSON request or an uploaded file. It is read only after its sender is authenticated; a file is
    written to disk as it arrives.
    """
    try:
        yield await _read(request)
    finally:
        await request.close()  # the file is gone


async def _read(request: Request) -> WorkloadRequest | SentFile:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if media_type == "application/json":
            return WorkloadRequest.model_validate_json(await request.body())
        if media_type == "multipart/form-data":
            return await _sent_file(request)
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_context=media_type == "application/json")
        raise RequestValidationError([{**m, "loc": ("body", *m["loc"])} for m in mistakes]) from error
    raise RefusalError(
        415,
        "unsupported-media-type",
        f"the body is {media_type or 'of no type'!r}; send application/json or multipart/form-data",
    )


async def _sent_file(request: Request) -> SentFile:
    try:
        with storage_errors("the folder for temporary files"):
            form = await request.form(max_files=1, max_fields=8, max_part_size=1 << 14)
    except MultiPartException as error:
        raise RefusalError(400, "malformed-form", f"the form cannot be read: {error.message}") from error
    fields: dict[str, Any] = {name: value for name, value in form.items() if isinstance(value, str)}
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise RequestValidationError([{"loc": ("body", "file"), "msg": "a file is required", "type": "missing"}])
    return SentFile(file=file, form=UploadForm.model_validate({**fields, "file": file.filename or ""}))


@router.post(
    "",
    status_code=201,
    summary="Give a workload",
    description="Upload a Python file or an archive (tar, zip) as `multipart/form-data`, or name, as JSON, a zoo entry "
    "or a class in a module that is installed on the workers. The API parses uploaded code, and never imports it.",
    responses={
        **returns(WorkloadInfo, "The new workload.", status=201, headers=("Location",)),
        **refuses(409, 413, 415, 507),
    },
    openapi_extra=BODIES,
)
def create_workload(
    request: Request,
    principal: Submitter,
    sent: Annotated[WorkloadRequest | SentFile, Depends(_sent)],
    once: Once,
) -> Response:
    service = services(request)
    if isinstance(sent, SentFile):
        return _upload(request, service, principal, sent, once)
    reference = checked_reference(sent.entry)

    def work(source_id: str) -> Response:
        kind = "zoo" if reference.startswith("zoo:") else "module"
        name = sent.name or reference
        found = queries.find_workload(service.engine, source_id) or queries.add_workload(
            service.engine, source_id, principal.user_id, kind=kind, name=name, entry=reference
        )
        return _created(request, found)

    return once.run(service.engine, principal.user_id, work)


@router.get(
    "",
    summary="List workloads",
    description="Your workloads, the newest first; administrators see all workloads.",
    responses={**returns(Page[WorkloadInfo], "A page of workloads."), **unchanged()},
)
def list_workloads(request: Request, principal: Reader, page: Paging) -> Response:
    service = services(request)
    owner_id = None if principal.is_admin else principal.user_id
    found = queries.list_workloads(service.engine, owner_id, limit=page.limit, before=page.after)
    return answer(request, page.cut(found, lambda workload: workload.workload_id))


@router.get(
    "/{workload_id}",
    summary="Read a workload",
    description="Description of an upload, without its contents.",
    responses={**returns(WorkloadInfo, "The workload."), **unchanged(), **refuses(404)},
)
def get_workload(request: Request, principal: Reader, workload_id: WorkloadId) -> Response:
    service = services(request)
    return answer(request, own_workload(service.engine, workload_id, principal))


@router.delete(
    "/{workload_id}",
    status_code=204,
    summary="Delete a workload",
    description="Only a workload that no study refers to can be deleted.",
    responses={204: {"description": "It is gone."}, **refuses(404, 409)},
)
def delete_workload(request: Request, principal: Submitter, workload_id: WorkloadId) -> Response:
    service = services(request)
    own_workload(service.engine, workload_id, principal)
    queries.delete_workload(service.engine, workload_id)
    return Response(status_code=204)


def _upload(request: Request, service: Services, principal: Principal, sent: SentFile, once: Once) -> Response:
    with service.uploads.taken() as folder:
        if folder is None:
            raise RefusalError(
                503,
                "too-many-uploads",
                "the service is already unpacking the maximum number of uploads: try again in a few seconds",
                headers={"Retry-After": "5"},
            )
        upload = receive(sent.file.file, sent.form.file, sent.form.entry, folder)

        def work(source_id: str) -> Response:
            found = queries.find_workload(service.engine, source_id)
            if found is None:
                limit = service.settings.max_upload_bytes
                with service.artifacts.putting(upload.path, move=True, limit=limit) as kept:
                    found = queries.add_workload(
                        service.engine,
                        source_id,
                        principal.user_id,
                        kind=upload.kind,
                        name=sent.form.name or sent.form.file,
                        entry=upload.entry,
                        digest=kept.digest,
                        size_bytes=kept.size_bytes,
                        max_bytes=service.settings.max_user_artifact_bytes,
                    )
            return _created(request, found)

        content = f"{upload.digest}\n{sent.form.model_dump_json()}".encode()
        return once.of(content).run(service.engine, principal.user_id, work)


def _created(request: Request, workload: WorkloadInfo) -> Response:
    location = request.url_for("get_workload", workload_id=workload.workload_id).path
    return answer(request, workload, status=201, headers={"Location": location})

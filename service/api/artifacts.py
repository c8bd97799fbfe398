"""Files of studies and trials: lists, downloads, and views of their content."""

from __future__ import annotations

import gzip
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from steptune.service.access.principal import Principal
from steptune.service.api.answers import answer, is_known
from steptune.service.api.context import Services, StudyId, TrialId, services
from steptune.service.api.openapi import COMMON, refuses, returns, returns_file, unchanged
from steptune.service.api.ownership import check_study, check_trial
from steptune.service.api.pagination import Paging
from steptune.service.api.problems import RefusalError, not_found
from steptune.service.api.security import Requires
from steptune.service.artifacts.retention import trace_kind
from steptune.service.messages import ArtifactInfo, Page, TrialTimeline
from steptune.service.queries import outcomes as queries
from steptune.service.settings.scopes import Scope
from steptune.tuner.trials.analysis_files import MAX_TIMELINE_BYTES

_CHUNK_BYTES = 1 << 18
FILES = ("application/octet-stream", "application/gzip")
_GZIP = b"\x1f\x8b"
MAX_TAIL_BYTES = 10 << 20

router = APIRouter(tags=["files"], responses=COMMON)
Reader = Annotated[Principal, Requires(Scope.READ)]


@router.get(
    "/studies/{study_id}/artifacts",
    summary="List a study's files",
    description="Files of the study and of its trials, in the order in which they were recorded.",
    responses={**returns(Page[ArtifactInfo], "A page of files."), **unchanged(), **refuses(404)},
)
def list_study_artifacts(request: Request, principal: Reader, study_id: StudyId, page: Paging) -> Response:
    service = services(request)
    check_study(service.engine, study_id, principal)
    found = queries.list_artifacts(service.engine, study_id=study_id, limit=page.limit, after=page.after_number)
    return answer(request, page.cut(found, lambda artifact: artifact.artifact_id))


@router.get(
    "/trials/{trial_id}/artifacts",
    summary="List a trial's files",
    description="Traces, timelines and logs, in the order in which they were recorded.",
    responses={**returns(Page[ArtifactInfo], "A page of files."), **unchanged(), **refuses(404)},
)
def list_trial_artifacts(request: Request, principal: Reader, trial_id: TrialId, page: Paging) -> Response:
    service = services(request)
    check_trial(service.engine, trial_id, principal)
    found = queries.list_artifacts(service.engine, trial_id=trial_id, limit=page.limit, after=page.after_number)
    return answer(request, page.cut(found, lambda artifact: artifact.artifact_id))


@router.get(
    "/artifacts/{artifact_id}",
    summary="Download a file",
    description="The file as it is stored: traces and timelines are gzip files.",
    responses={**returns_file(FILES, "The file."), **unchanged(), **refuses(404, 410)},
)
def get_artifact(
    request: Request,
    principal: Reader,
    artifact_id: Annotated[int, Path(ge=1, lt=1 << 63, description="Number of a file.")],
) -> Response:
    service = services(request)
    artifact = queries.artifact_by_id(service.engine, artifact_id)
    if artifact is None:
        raise not_found("artifact", str(artifact_id))
    check_study(service.engine, artifact.study_id, principal)
    return _download(request, service, artifact)


@router.get(
    "/trials/{trial_id}/trace",
    summary="Download a trial's trace",
    description="Events that the profiler recorded on one rank, as gzipped JSON. https://ui.perfetto.dev opens it; "
    "`steptune analyze` reads the traces of all ranks together.",
    responses={**returns_file(FILES, "The trace."), **unchanged(), **refuses(404, 410)},
)
def get_trace(
    request: Request,
    principal: Reader,
    trial_id: TrialId,
    rank: Annotated[int, Query(ge=0, lt=1 << 31, description="Rank of the trace.")] = 0,
) -> Response:
    service = services(request)
    check_trial(service.engine, trial_id, principal)
    return _download(request, service, _newest(service, trial_id, trace_kind(rank)))


@router.get(
    "/trials/{trial_id}/timeline",
    summary="Read a trial's timeline",
    description="Activity of the devices in the profiled steps, reduced for display.",
    responses={**returns(TrialTimeline, "The timeline."), **unchanged(), **refuses(404, 410)},
)
def get_timeline(request: Request, principal: Reader, trial_id: TrialId) -> Response:
    service = services(request)
    check_trial(service.engine, trial_id, principal)
    artifact = _newest(service, trial_id, "timeline")
    tag = artifact.digest[:16]
    headers = {"ETag": f'"{tag}"', "Cache-Control": "private, no-cache"}
    if is_known(request, tag):
        return Response(status_code=304, headers=headers)
    file = service.artifacts.open(artifact.digest)
    size = _unpacked_bytes(file)
    if size is None:
        file.close()
        raise RefusalError(
            404, "timeline-not-found", f"the timeline of trial {trial_id} is damaged, or too large to be sent"
        )
    before, after = f'{{"trial_id":"{trial_id}","timelines":'.encode(), b"}"
    headers["Content-Length"] = str(len(before) + size + len(after))
    return StreamingResponse(_enclosed(before, file, after), media_type="application/json", headers=headers)


@router.get(
    "/trials/{trial_id}/logs",
    summary="Read a trial's log",
    description="End of the output of the trial's processes.",
    responses={**returns_file(("text/plain",), "The end of the log."), **refuses(404, 410)},
)
def get_logs(
    request: Request,
    principal: Reader,
    trial_id: TrialId,
    tail_bytes: Annotated[
        int, Query(ge=1, le=MAX_TAIL_BYTES, description="Maximum bytes to return, from the end of the log.")
    ] = 1 << 16,
) -> Response:
    service = services(request)
    check_trial(service.engine, trial_id, principal)
    with service.artifacts.open(_newest(service, trial_id, "log").digest) as file:
        tail = _tail(file, tail_bytes)
    return Response(tail.decode("utf-8", "replace"), media_type="text/plain; charset=utf-8")


def _newest(service: Services, trial_id: str, kind: str) -> ArtifactInfo:
    artifact = queries.find_artifact(service.engine, trial_id, kind)
    if artifact is None:
        raise RefusalError(404, f"{kind.partition('.')[0]}-not-found", f"no {kind} is stored for trial {trial_id}")
    return artifact


def _download(request: Request, service: Services, artifact: ArtifactInfo) -> Response:
    """Send a file in chunks. Browsers store it and never display it, whatever it contains."""
    tag = artifact.digest[:16]
    caching = {"ETag": f'"{tag}"', "Cache-Control": "private, no-cache"}
    if is_known(request, tag):
        return Response(status_code=304, headers=caching)
    file = service.artifacts.open(artifact.digest)
    packed = file.read(2) == _GZIP
    file.seek(0)
    name = f"{artifact.trial_id or artifact.study_id}.{artifact.kind}{'.gz' if packed else ''}"
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Length": str(artifact.size_bytes),
        **caching,
        "Content-Security-Policy": "sandbox",
    }
    media_type = "application/gzip" if packed else "application/octet-stream"
    return StreamingResponse(_chunks(file), media_type=media_type, headers=headers)


def _unpacked_bytes(file: BinaryIO) -> int | None:
    """Return the unpacked size of a gzip file in bytes; None if the file cannot be unpacked or is too large. This
    version checks files when they are stored; earlier versions stored any file that a trial wrote.
    """
    size = 0
    try:
        with gzip.open(file) as unpacked:
            while chunk := unpacked.read(_CHUNK_BYTES):
                size += len(chunk)
                if size > MAX_TIMELINE_BYTES:
                    return None
    except (OSError, EOFError, zlib.error):
        return None
    file.seek(0)
    return size


def _enclosed(before: bytes, file: BinaryIO, after: bytes) -> Iterator[bytes]:
    yield before
    with file, gzip.open(file) as unpacked:
        while chunk := unpacked.read(_CHUNK_BYTES):
            yield chunk
    yield after


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _tail(file: BinaryIO, num_bytes: int) -> bytes:
    if file.read(2) == _GZIP:
        file.seek(0)
        with gzip.open(file) as unpacked:
            chunks, size = deque[bytes](), 0
            while chunk := unpacked.read(_CHUNK_BYTES):
                chunks.append(chunk)
                size += len(chunk)
                while size - len(chunks[0]) >= num_bytes:
                    size -= len(chunks.popleft())
            return b"".join(chunks)[-num_bytes:]
    file.seek(0, 2)
    file.seek(max(0, file.tell() - num_bytes))
    return file.read(num_bytes)

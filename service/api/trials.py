"""Trials: their configurations, measurements and outcomes."""

from __future__ import annotations

from enum import StrEnum
from operator import itemgetter
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from steptune.service.access.principal import Principal
from steptune.service.api.answers import answer, preferred, tagged
from steptune.service.api.context import Services, StudyId, TrialId, services
from steptune.service.api.openapi import COMMON, refuses, returns, returns_file, unchanged
from steptune.service.api.ownership import check_study, check_trial
from steptune.service.api.pagination import PageRequest, Paging
from steptune.service.api.problems import RefusalError, not_found
from steptune.service.api.reading import reads_rows
from steptune.service.api.security import Requires
from steptune.service.messages import (
    Page,
    TrialBreakdown,
    TrialDetail,
    TrialGuard,
    TrialSummary,
)
from steptune.service.models import CollectiveStatsRow, FindingRow, GapStatsRow, KernelStatsRow
from steptune.service.queries import profiles
from steptune.service.queries import trials as queries
from steptune.service.queries.stored import value_of
from steptune.service.settings.scopes import Scope
from steptune.service.store import SqlStudyStore
from steptune.service.trial_source import KeptTrials
from steptune.tuner.errors import MissingDependencyError
from steptune.tuner.export.study_formats import STUDY_FORMATS
from steptune.tuner.records import CollectiveStats, Finding, GapSite, KernelStats, TrialState, Window

router = APIRouter(tags=["trials"], responses=COMMON)
Reader = Annotated[Principal, Requires(Scope.READ)]
_FORMATS = {known.name: known for known in STUDY_FORMATS}
OPTUNA = _FORMATS["optuna"]
TABLES = {name: _FORMATS[name].media_type for name in ("csv", "parquet")}
JSON = "application/json"


class TrialFormat(StrEnum):
    """Output format of trials."""

    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


@router.get(
    "/studies/{study_id}/trials",
    summary="List a study's trials",
    description="Trials in the order in which they began. A table (selected by `format` or `Accept`) contains all "
    "trials: `limit` and `cursor` apply to pages only.",
    responses={
        **returns(Page[TrialSummary], "A page of trials.", other_types=tuple(TABLES.values())),
        **unchanged(),
        **refuses(404, 406),
    },
)
async def list_trials(
    request: Request,
    principal: Reader,
    study_id: StudyId,
    page: Paging,
    state: Annotated[TrialState | None, Query(description="Only trials in this state.")] = None,
    format: Annotated[TrialFormat | None, Query(description="Goes before `Accept`.")] = None,
) -> Response:
    form = format or _accepted(request)
    if form is TrialFormat.JSON:
        return await _page_of_trials(request, principal, study_id, page, state)
    return await run_in_threadpool(_study_file, request, principal, study_id, form.value, state=state)


@reads_rows
def _page_of_trials(
    request: Request, principal: Principal, study_id: str, page: PageRequest, state: TrialState | None
) -> Response:
    service = services(request)
    check_study(service.engine, study_id, principal)
    found = queries.list_trials(service.engine, study_id, state=state, limit=page.limit, after=page.after_number)
    return answer(request, page.cut(found, lambda trial: trial.sequence), headers={"Vary": "Accept"})


@router.get(
    "/studies/{study_id}/optuna",
    summary="Export a study for Optuna",
    description="The study as an Optuna journal file, which optuna-dashboard can open. Running trials are left out.",
    responses={**returns_file((OPTUNA.media_type,), "The file."), **unchanged(), **refuses(404)},
)
def get_optuna_study(request: Request, principal: Reader, study_id: StudyId) -> Response:
    return _study_file(request, principal, study_id, OPTUNA.name)


@router.get(
    "/trials/{trial_id}",
    summary="Read a trial",
    description="The configuration and the result. Windows, breakdown, kernels and other details have separate paths "
    "below this one.",
    responses={**returns(TrialDetail, "The trial."), **unchanged(), **refuses(404)},
)
@reads_rows
def get_trial(request: Request, principal: Reader, trial_id: TrialId) -> Response:
    service = services(request)
    check_trial(service.engine, trial_id, principal)
    trials = KeptTrials(SqlStudyStore(service.engine), service.artifacts, service.records)
    attempts = queries.list_attempts(service.engine, trial_id)
    return answer(request, queries.trial_detail(trials.get_trial(trial_id), attempts))


@router.get(
    "/trials/{trial_id}/windows",
    summary="List a trial's windows",
    description="Timed, unprofiled stretches of whole steps, in the order in which they were measured.",
    responses={**returns(Page[Window], "A page of windows."), **unchanged(), **refuses(404)},
)
@reads_rows
def list_windows(request: Request, principal: Reader, trial_id: TrialId, page: Paging) -> Response:
    service = services(request)
    check_trial(service.engine, trial_id, principal)
    windows = value_of(profiles.result_part(service.engine, trial_id, "windows")) or []
    begin = 0 if page.after_number is None else page.after_number + 1
    return answer(request, page.cut(list(enumerate(windows))[begin:], itemgetter(0)).each(itemgetter(1)))


@router.get(
    "/trials/{trial_id}/breakdown",
    summary="Read a trial's breakdown",
    description="Exclusive categories of the profiled steps' time; their sum is exactly the time of the steps.",
    responses={**returns(TrialBreakdown, "The breakdown."), **unchanged(), **refuses(404)},
)
@reads_rows
def get_breakdown(request: Request, principal: Reader, trial_id: TrialId) -> Response:
    service = services(request)
    check_trial(service.engine, trial_id, principal)
    return answer(request, profiles.breakdown_of(service.engine, trial_id))


@router.get(
    "/trials/{trial_id}/kernels",
    summary="List a trial's kernels",
    description="Kernels that took the most time in the profiled steps of the first rank.",
    responses={**returns(Page[KernelStats], "A page of kernels."), **unchanged(), **refuses(404)},
)
@reads_rows
def list_kernels(request: Request, principal: Reader, trial_id: TrialId, page: Paging) -> Response:
    service = services(request)
    return _numbered(request, service, principal, trial_id, page, KernelStatsRow)


@router.get(
    "/trials/{trial_id}/gaps",
    summary="List a trial's gaps",
    description="Idle times of the device, grouped by cause and by the kernel that ends the gap; the largest total "
    "first.",
    responses={**returns(Page[GapSite], "A page of gaps."), **unchanged(), **refuses(404)},
)
@reads_rows
def list_gaps(request: Request, principal: Reader, trial_id: TrialId, page: Paging) -> Response:
    service = services(request)
    return _numbered(request, service, principal, trial_id, page, GapStatsRow)


@router.get(
    "/trials/{trial_id}/collectives",
    summary="List a trial's collectives",
    description="Calls that exchange data between ranks, by name and message size; the largest total time first.",
    responses={**returns(Page[CollectiveStats], "A page of collectives."), **unchanged(), **refuses(404)},
)
@reads_rows
def list_collectives(request: Request, principal: Reader, trial_id: TrialId, page: Paging) -> Response:
    service = services(request)
    return _numbered(request, service, principal, trial_id, page, CollectiveStatsRow)


@router.get(
    "/trials/{trial_id}/findings",
    summary="List a trial's findings",
    description="Findings of its breakdown, with evidence and advice; the largest possible saving first.",
    responses={**returns(Page[Finding], "A page of findings."), **unchanged(), **refuses(404)},
)
@reads_rows
def list_trial_findings(request: Request, principal: Reader, trial_id: TrialId, page: Paging) -> Response:
    service = services(request)
    return _numbered(request, service, principal, trial_id, page, FindingRow)


@router.get(
    "/trials/{trial_id}/guard",
    summary="Read a trial's guard",
    description="Verdict on whether the candidate trains like the reference, with every check and the loss curves of "
    "candidate and reference.",
    responses={**returns(TrialGuard, "The guard's verdict."), **unchanged(), **refuses(404)},
)
@reads_rows
def get_guard(request: Request, principal: Reader, trial_id: TrialId) -> Response:
    service = services(request)
    check_trial(service.engine, trial_id, principal)
    verdict = profiles.result_part(service.engine, trial_id, "guard")
    return answer(request, TrialGuard(trial_id=trial_id, verdict=verdict))


def _accepted(request: Request) -> TrialFormat:
    """Return the output format that the client prefers.

    Raises:
        RefusalError: The client accepts none of the forms.
    """
    forms = {JSON: TrialFormat.JSON, **{media_type: TrialFormat(name) for name, media_type in TABLES.items()}}
    media_type = preferred(request.headers.get("accept", "*/*"), tuple(forms))
    if media_type is None:
        raise RefusalError(406, "not-acceptable", f"the trials are available as {', '.join(forms)}")
    return forms[media_type]


def _study_file(
    request: Request, principal: Principal, study_id: str, name: str, *, state: TrialState | None = None
) -> Response:
    """Return a study, or its trials in one state, in one of `STUDY_FORMATS`. This takes too long for the threads that
    are reserved for quick reads.
    """
    engine = services(request).engine
    check_study(engine, study_id, principal)
    found = queries.whole_study(engine, study_id, state=state)
    if found is None:
        raise not_found("study", study_id)
    known = _FORMATS[name]
    try:
        content = known.content(*found)
    except MissingDependencyError as error:
        raise RefusalError(406, "not-acceptable", str(error)) from error
    headers = {"Content-Disposition": f'attachment; filename="{known.file_name}"', "Vary": "Accept"}
    return tagged(request, content, known.media_type, headers=headers)


def _numbered(
    request: Request,
    service: Services,
    principal: Principal,
    trial_id: str,
    page: PageRequest,
    kind: profiles.NumberedRow,
) -> Response:
    """Return a page of one trial's records of one kind, from that kind's own table."""
    check_trial(service.engine, trial_id, principal)
    found = profiles.list_numbered(service.engine, kind, trial_id, limit=page.limit, after=page.after_number)
    return answer(request, page.cut(found, itemgetter(0)).each(itemgetter(1)))

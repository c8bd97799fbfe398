"""Outcomes of a study: findings, decisions, the recommendation and its exports."""

from __future__ import annotations

from enum import StrEnum
from operator import itemgetter
from pathlib import PurePath
from typing import Annotated, TypeVar

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from steptune.service.access.principal import Principal
from steptune.service.api.answers import answer, preferred, tagged
from steptune.service.api.context import Services, StudyId, services
from steptune.service.api.openapi import COMMON, refuses, returns, returns_file, unchanged
from steptune.service.api.ownership import check_study
from steptune.service.api.pagination import Paging
from steptune.service.api.problems import RefusalError
from steptune.service.api.reading import reads_rows
from steptune.service.api.security import Requires
from steptune.service.messages import ExportFormat, ExportList, Page, TrialFinding
from steptune.service.queries import outcomes as queries
from steptune.service.queries.stored import stored
from steptune.service.queries.trials import whole_study
from steptune.service.settings.scopes import Scope
from steptune.tuner.errors import ChoiceError, RecommendationError
from steptune.tuner.export import EXPORTERS, Exporter, exported, exporter_named, exporters_for
from steptune.tuner.export.of_trial import recommendation_of_trial
from steptune.tuner.records import Decision, Recommendation

router = APIRouter(prefix="/studies/{study_id}", tags=["outcomes"], responses=COMMON)
Reader = Annotated[Principal, Requires(Scope.READ)]
Found = TypeVar("Found")
OfTrial = Annotated[
    str | None,
    Query(
        pattern=r"^[0-9a-z]{1,64}$",
        description="Number or id of the trial whose configuration is exported; by default the recommended one.",
    ),
]

ExportName = StrEnum("ExportName", {exporter.name: exporter.name for exporter in EXPORTERS})  # type: ignore[misc]
ExportName.__doc__ = "Export format of the recommendation."
_TYPES = {
    ".json": "application/json",
    ".yaml": "application/yaml",
    ".py": "text/x-python",
    ".sh": "text/x-shellscript",
}
OTHER = "text/plain"
FILE_TYPES = (*_TYPES.values(), OTHER)
JSON = "application/json"
NEGOTIATED = {"application/yaml": "yaml", "text/x-python": "python"}
"""Export formats that can be chosen by media type; all others are chosen by name."""


@router.get(
    "/findings",
    summary="List a study's findings",
    description="Findings from the breakdowns of the study's trials, the newest trial first.",
    responses={**returns(Page[TrialFinding], "A page of findings."), **unchanged(), **refuses(404)},
)
@reads_rows
def list_study_findings(request: Request, principal: Reader, study_id: StudyId, page: Paging) -> Response:
    service = services(request)
    check_study(service.engine, study_id, principal)
    found = queries.list_findings(service.engine, study_id, limit=page.limit, after=page.after_pair)
    return answer(request, page.cut(found, lambda row: f"{row[0]}.{row[1]}").each(itemgetter(2)))


@router.get(
    "/decisions",
    summary="List a study's decisions",
    description="The decisions of the search: each choice that was tried or left out, the reason, and the result.",
    responses={**returns(Page[Decision], "A page of decisions."), **unchanged(), **refuses(404)},
)
@reads_rows
def list_decisions(request: Request, principal: Reader, study_id: StudyId, page: Paging) -> Response:
    service = services(request)
    check_study(service.engine, study_id, principal)
    found = queries.list_decisions(service.engine, study_id, limit=page.limit, after=page.after_number)
    return answer(request, page.cut(found, itemgetter(0)).each(itemgetter(1)))


@router.get(
    "/recommendation",
    summary="Read a study's recommendation",
    description="The recommendation as a record, or in the format that `format` or the header `Accept` names.",
    responses={
        **returns(Recommendation, "The recommendation.", other_types=FILE_TYPES[1:]),
        **unchanged(),
        **refuses(404, 406, 409),
    },
)
def get_recommendation(
    request: Request,
    principal: Reader,
    study_id: StudyId,
    format: Annotated[ExportName | None, Query(description="Export format; overrides `Accept`.")] = None,
) -> Response:
    service = services(request)
    check_study(service.engine, study_id, principal)
    if format is not None:
        return _exported(request, service, study_id, exporter_named(format))
    accepted = preferred(request.headers.get("accept", "*/*"), (JSON, *NEGOTIATED))
    if accepted is None:
        raise RefusalError(
            406, "not-acceptable", f"the recommendation is available as {', '.join((JSON, *NEGOTIATED))}"
        )
    if accepted == JSON:
        text = _existing(queries.recommendation_text(service.engine, study_id), study_id)
        return tagged(request, bytes(stored(text)), JSON, headers={"Vary": "Accept"})
    return _exported(request, service, study_id, exporter_named(NEGOTIATED[accepted]))


@router.get(
    "/exports",
    summary="List the formats of a study's recommendation",
    description="The formats that can express the recommendation, each with the settings that it cannot express.",
    responses={**returns(ExportList, "The formats."), **unchanged(), **refuses(404, 409)},
)
def list_exports(request: Request, principal: Reader, study_id: StudyId, trial: OfTrial = None) -> Response:
    service = services(request)
    check_study(service.engine, study_id, principal)
    recommendation = _recommendation(service, study_id, trial)
    items = tuple(_format(exporter, recommendation) for exporter in exporters_for(recommendation))
    return answer(request, ExportList(items=items))


@router.get(
    "/exports/{format}",
    summary="Export a study's recommendation",
    description="The recommendation as a file for another tool.",
    responses={
        **returns_file(FILE_TYPES, "The file."),
        **unchanged(),
        **refuses(404, 409),
    },
)
def get_export(
    request: Request,
    principal: Reader,
    study_id: StudyId,
    format: Annotated[ExportName, Path(description="The format's name.")],
    trial: OfTrial = None,
) -> Response:
    service = services(request)
    check_study(service.engine, study_id, principal)
    return _exported(request, service, study_id, exporter_named(format), trial)


def _existing(found: Found | None, study_id: str) -> Found:
    if found is None:
        raise RefusalError(404, "recommendation-not-found", f"study {study_id} has no recommendation yet")
    return found


def _media_type(file_name: str) -> str:
    return _TYPES.get(PurePath(file_name).suffix, OTHER)


def _recommendation(service: Services, study_id: str, trial: str | None) -> Recommendation:
    """Return the recommended configuration, or a trial's configuration if a trial is named."""
    recommendation = _existing(queries.recommendation_of(service.engine, study_id), study_id)
    if trial is None:
        return recommendation
    study, trials = _existing(whole_study(service.engine, study_id), study_id)
    try:
        return recommendation_of_trial(study, recommendation, trials, trial)
    except ChoiceError as error:
        raise RefusalError(404, "trial-not-found", str(error)) from error
    except RecommendationError as error:
        raise RefusalError(409, "not-expressible", str(error)) from error


def _exported(
    request: Request, service: Services, study_id: str, exporter: Exporter, trial: str | None = None
) -> Response:
    recommendation = _recommendation(service, study_id, trial)
    try:
        text = exported(exporter, recommendation)
    except RecommendationError as error:
        raise RefusalError(409, "not-expressible", str(error)) from error
    name = exporter.file_name(recommendation)
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Vary": "Accept"}
    return tagged(request, text.encode(), _media_type(name), headers=headers)


def _format(exporter: Exporter, recommendation: Recommendation) -> ExportFormat:
    file_name = exporter.file_name(recommendation)
    return ExportFormat(
        name=exporter.name,
        summary=exporter.summary,
        version=exporter.version,
        usage=exporter.how_to_use(recommendation),
        file_name=file_name,
        media_type=_media_type(file_name),
        not_expressible=exporter.not_expressible(recommendation),
        carries=exporter.carries(recommendation),
    )

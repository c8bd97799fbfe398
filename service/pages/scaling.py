"""Prediction of a study's training on more hosts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from steptune.dashboards.scaling import scaling_context
from steptune.dashboards.site import Site
from steptune.service.api.context import StudyId, services
from steptune.service.api.ownership import check_study
from steptune.service.pages.routing import PageRoute, Reader, shared_page, site_of
from steptune.service.predicting import Question, predicted
from steptune.service.queries.versions import study_version
from steptune.service.store import SqlStudyStore
from steptune.tuner.errors import ChoiceError, StoreError
from steptune.tuner.prediction.extrapolate import MAX_HOSTS
from steptune.tuner.records import SampleUnit

router = APIRouter(include_in_schema=False, route_class=PageRoute)
SHOWN_HOSTS = 8
SHOWN_NETWORK = "25gbps"
Quantity = Annotated[str, Query(max_length=20, pattern=r"^[0-9A-Za-zµμ./ ]*$")]


@router.get("/studies/{study_id}/scaling")
def scaling_page(
    request: Request,
    principal: Reader,
    study_id: StudyId,
    hosts: Annotated[int, Query(ge=1, le=MAX_HOSTS)] = SHOWN_HOSTS,
    devices: Annotated[str, Query(max_length=2, pattern=r"^[0-9]*$")] = "",
    network: Quantity = SHOWN_NETWORK,
    latency: Quantity = "",
    inside: Quantity = "",
) -> Response:
    """Show a form that describes a cluster, and below it the prediction for this cluster."""
    service = services(request)
    check_study(service.engine, study_id, principal)
    asked = Question(
        hosts=hosts,
        devices=int(devices) if devices else None,
        network=network.strip(),
        latency=latency.strip(),
        inside=inside.strip(),
    )

    def context(site: Site) -> dict[str, Any]:
        store = SqlStudyStore(service.engine)
        study = store.get_study(study_id)
        unit = study.facts.sample_unit if study.facts is not None else SampleUnit.SAMPLE
        problem, shown = "", {}
        try:
            shown = scaling_context(predicted(store, study, asked), unit)
        except (ChoiceError, StoreError) as error:
            problem = f"{str(error)[:1].upper()}{str(error)[1:]}."
        return {"title": "On more hosts", "study": study, "asked": asked, "problem": problem, **shown}

    return shared_page(
        request,
        site_of(request, principal),
        "scaling.html",
        key=(study_id, asked),
        version=study_version(service.engine, study_id),
        context=context,
    )

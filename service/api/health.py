"""Health of the process: liveness, readiness, and metrics."""

from __future__ import annotations

import hmac

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import SecretStr

from steptune.service.api.answers import answer
from steptune.service.api.context import services
from steptune.service.api.known_parameters import check_query
from steptune.service.api.openapi import refuses, returns, returns_file
from steptune.service.api.problems import RefusalError
from steptune.service.database import check_schema
from steptune.service.messages import Health
from steptune.tuner.errors import StoreError

router = APIRouter(tags=["operations"], dependencies=[Depends(check_query)])


@router.get(
    "/healthz",
    summary="Check that the process is alive",
    description="Succeeds while the process can answer; reads no data.",
    responses=returns(Health, "It is."),
)
async def healthz(request: Request) -> Response:
    return answer(request, Health(status="ok"))


@router.get(
    "/readyz",
    summary="Check that requests can be served",
    description="Reads the database and compares its schema with the one that this version needs.",
    responses={**returns(Health, "They can."), **refuses(503)},
)
def readyz(request: Request) -> Response:
    service = services(request)
    try:
        check_schema(service.engine)
    except StoreError as error:
        request.scope["steptune.error"] = error
        raise RefusalError(
            503, "not-ready", "the database cannot be used, or its schema does not match this version; see the log"
        ) from error
    return answer(request, Health(status="ready"))


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    description="Requires the setting `metrics_token` as bearer token; open to all if `insecure_no_auth` is set.",
    responses={**returns_file(("text/plain",), "Metrics in Prometheus' text format."), **refuses(401, 403, 503)},
)
def metrics(request: Request) -> Response:
    service = services(request)
    if not service.settings.insecure_no_auth:
        _check_may_scrape(request, service.settings.metrics_token)
    return Response(service.metrics.text(), media_type="text/plain; version=1.0.0; charset=utf-8")


def _check_may_scrape(request: Request, token: SecretStr | None) -> None:
    if token is None:
        raise RefusalError(
            403, "forbidden", "metrics are off: set STEPTUNE_METRICS_TOKEN, and send it as a bearer token"
        )
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), token.get_secret_value().encode()):
        challenge = {"WWW-Authenticate": 'Bearer realm="metrics"'}
        raise RefusalError(401, "not-authenticated", "send the metrics token as a bearer token", headers=challenge)

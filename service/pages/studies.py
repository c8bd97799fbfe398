"""The list of studies."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.context import Service
from service.pages.routing import PageRoute, Reader, page

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/")
def studies_page(request: Request, service: Service, principal: Reader) -> Response:
    return page(request, principal, "studies.html", title="Studies", current="/")

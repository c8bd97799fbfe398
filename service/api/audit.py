"""The audit log: for administrators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from steptune.service.access.audit import AuditEntry
from steptune.service.access.principal import Principal
from steptune.service.api.answers import answer
from steptune.service.api.openapi import COMMON, returns, unchanged
from steptune.service.api.pagination import Paging
from steptune.service.api.security import RequestAccess, Requires
from steptune.service.messages import Page
from steptune.service.settings.scopes import Scope

router = APIRouter(prefix="/audit", tags=["audit"], responses=COMMON)


@router.get(
    "",
    summary="Read the audit log",
    description="All requests that changed something, and all refused requests of callers with a token; the newest "
    "entry first.",
    responses={**returns(Page[AuditEntry], "A page of entries."), **unchanged()},
)
def list_audit(
    request: Request,
    access: RequestAccess,
    principal: Annotated[Principal, Requires(Scope.ADMIN)],
    page: Paging,
    user: Annotated[
        str | None, Query(pattern=r"^[0-9a-z]{1,64}$", description="Only entries of this user (an id).")
    ] = None,
) -> Response:
    found = access.audit.page(limit=page.limit + 1, before=page.after_number, user_id=user)
    return answer(request, page.cut(found, lambda entry: entry.entry_id))

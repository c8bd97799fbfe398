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
from steptune.service.settings.scopes import Scope
from steptune.tuner.records import Record

router = APIRouter(prefix="/audit", tags=["audit"], responses=COMMON)


class AuditPage(Record):
    """A page of the audit log.

    Attributes:
        items: The newest first.
        next_cursor: For the next page; null on the last one.
    """

    items: tuple[AuditEntry, ...]
    next_cursor: str | None


@router.get(
    "",
    summary="Read the audit log",
    description="Every request that changed something, and every refusal of somebody who tried; the newest first.",
    responses={**returns(AuditPage, "A page of entries."), **unchanged()},
)
def list_audit(
    request: Request,
    access: RequestAccess,
    principal: Annotated[Principal, Requires(Scope.ADMIN)],
    page: Paging,
    user: Annotated[
        str | None, Query(pattern=r"^[0-9a-z]{1,64}$", description="Only what this user did (an id).")
    ] = None,
) -> Response:
    found = access.audit.page(limit=page.limit + 1, before=page.after_number, user_id=user)
    items, next_cursor = page.cut(found, lambda entry: entry.entry_id)
    return answer(request, AuditPage(items=items, next_cursor=next_cursor))

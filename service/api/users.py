"""Users: for administrators."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from pydantic import Field

from steptune.service.access.principal import Principal
from steptune.service.access.users import MAX_NAME, MAX_PRIORITY, User
from steptune.service.api.answers import IfMatch, answer
from steptune.service.api.context import services
from steptune.service.api.idempotency import Once
from steptune.service.api.openapi import COMMON, refuses, returns, unchanged
from steptune.service.api.pagination import Paging
from steptune.service.api.problems import RefusalError
from steptune.service.api.requests import Body, Text
from steptune.service.api.security import RequestAccess, Requires, note
from steptune.service.messages import Page
from steptune.service.settings.scopes import Scope

router = APIRouter(prefix="/users", tags=["users"], responses=COMMON)
Administrator = Annotated[Principal, Requires(Scope.ADMIN)]
UserId = Annotated[
    str, Path(pattern=r"^[0-9a-z]{1,64}$", description="Id of a user.", examples=["01kabcdefghjkmnpqrstvwxyz3"])
]
_MAX_COUNT = 2**53


class Limits(Body):
    """Limits of a user; null means the default of the settings."""

    priority: int = Field(
        default=0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Priority of the user's studies; higher ones run first.",
    )
    max_running: int | None = Field(default=None, ge=0, le=_MAX_COUNT, description="Maximum number of running studies.")
    max_queued: int | None = Field(default=None, ge=0, le=_MAX_COUNT, description="Maximum number of waiting studies.")
    max_device_hours: float | None = Field(
        default=None, ge=0, le=_MAX_COUNT, description="Maximum device hours in 30 days."
    )
    max_artifact_bytes: int | None = Field(
        default=None, ge=0, le=_MAX_COUNT, description="Maximum bytes of uploads, traces and logs."
    )


class UserRequest(Limits):
    """Request for a new user."""

    name: Text = Field(min_length=1, max_length=MAX_NAME, description="Unique.", examples=["ada@example.org"])
    scopes: list[Annotated[Scope, Field(strict=False)]] = Field(
        min_length=1,
        max_length=len(Scope),
        description="Maximum scopes of the user's tokens and sessions.",
        examples=[["read", "submit"]],
    )


class UserChanges(Limits):
    """Changes of a user; omitted fields keep their values."""

    scopes: list[Annotated[Scope, Field(strict=False)]] = Field(
        default_factory=list,
        min_length=1,
        max_length=len(Scope),
        description="Maximum scopes of the user's tokens and sessions.",
    )
    disabled: bool = Field(default=False, description="Whether the user's tokens and logins are refused.")


@router.post(
    "",
    status_code=201,
    summary="Make a user",
    description="The user logs in with a token, or through a proxy or an identity provider that reports this name.",
    responses={**returns(User, "The user.", status=201, headers=("Location",)), **refuses(409)},
)
def create_user(
    request: Request,
    access: RequestAccess,
    principal: Administrator,
    body: UserRequest,
    once: Once,
) -> Response:
    service = services(request)

    def work(_: str) -> Response:
        user = access.users.create(body.name, body.scopes, **_limits(body))
        note(request, user_id=user.user_id, name=user.name, scopes=" ".join(user.scopes))
        location = request.url_for("get_user", user_id=user.user_id).path
        return answer(request, user, status=201, headers={"Location": location})

    return once.run(service.engine, principal.user_id, work)


@router.get(
    "",
    summary="List users",
    description="The newest first.",
    responses={**returns(Page[User], "A page of users."), **unchanged()},
)
def list_users(request: Request, access: RequestAccess, principal: Administrator, page: Paging) -> Response:
    found = access.users.page(limit=page.limit + 1, before=page.after)
    return answer(request, page.cut(found, lambda user: user.user_id))


@router.get(
    "/{user_id}",
    summary="Read a user",
    description="Send the ETag of the answer as `If-Match` with a change.",
    responses={**returns(User, "The user."), **unchanged(), **refuses(404)},
)
def get_user(request: Request, access: RequestAccess, principal: Administrator, user_id: UserId) -> Response:
    return answer(request, access.users.get(user_id))


@router.patch(
    "/{user_id}",
    summary="Change a user",
    description="Changes scopes, priority or limits, or disables or enables the user. The last administrator must "
    "keep the scope `admin`.",
    responses={**returns(User, "The user."), **refuses(404, 412)},
)
def change_user(
    request: Request,
    access: RequestAccess,
    principal: Administrator,
    user_id: UserId,
    body: UserChanges,
    if_match: IfMatch = None,
) -> Response:
    changes: dict[str, Any] = {name: getattr(body, name) for name in body.model_fields_set}
    user = access.users.change(user_id, lambda now: _check_unchanged(if_match, now), **changes)
    note(request, **{name: " ".join(value) if name == "scopes" else value for name, value in changes.items()})
    return answer(request, user)


def _limits(body: Limits) -> dict[str, Any]:
    return {name: getattr(body, name) for name in Limits.model_fields}


def _check_unchanged(if_match: str | None, user: User) -> None:
    """Refuse to change a user whose record was modified after the client read it.

    Raises:
        RefusalError: 412, where `If-Match` is given and is not the user's ETag.
    """
    wanted = if_match or "*"
    tag = hashlib.sha256(msgspec.json.encode(user)).hexdigest()[:16]
    if wanted.strip() != "*" and f'"{tag}"' not in wanted:
        raise RefusalError(
            412,
            "changed-meanwhile",
            f"the ETag of the user is {tag!r} now, not {wanted[:100]}: read the user again, then repeat the change",
        )

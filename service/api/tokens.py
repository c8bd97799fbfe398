"""Tokens: making, listing and revoking them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import Response
from pydantic import Field

from steptune.service.access.principal import Principal
from steptune.service.access.tokens import Token
from steptune.service.access.users import MAX_NAME
from steptune.service.api.answers import answer
from steptune.service.api.openapi import COMMON, refuses, returns, unchanged
from steptune.service.api.pagination import Paging
from steptune.service.api.problems import RefusalError
from steptune.service.api.requests import Body, Id, Text
from steptune.service.api.security import RequestAccess, Requires, note
from steptune.service.messages import Page
from steptune.service.settings.scopes import Scope
from steptune.tuner.records import Record

router = APIRouter(prefix="/tokens", tags=["tokens"], responses=COMMON)
Caller = Annotated[Principal, Requires(Scope.READ)]
TokenId = Annotated[
    str, Path(pattern=r"^[0-9a-z]{1,64}$", description="Id of a token.", examples=["01kabcdefghjkmnpqrstvwxyz2"])
]
MAX_DAYS = 3650


class TokenRequest(Body):
    """Request for a new token."""

    name: Text = Field(default="", max_length=MAX_NAME, description="Purpose of the token.", examples=["nightly runs"])
    scopes: list[Annotated[Scope, Field(strict=False)]] = Field(
        min_length=1,
        max_length=len(Scope),
        description="Scopes of the token; only scopes that you have yourself.",
        examples=[["read"]],
    )
    expires_in_days: float | None = Field(
        default=None,
        gt=0,
        le=MAX_DAYS,
        description="Time of expiry; null for the service's default. A token cannot expire later than the token that "
        "creates it.",
        examples=[30],
    )
    user_id: Id | None = Field(
        default=None, description="Owner of the token; only administrators may name another user."
    )


class IssuedToken(Record):
    """A new token, with its secret.

    Attributes:
        token: To be sent as `Authorization: Bearer …`. It is shown this once.
        info: What can be read of it later.
    """

    token: str
    info: Token


@router.post(
    "",
    status_code=201,
    summary="Make a token",
    description="Only this answer contains the secret, so `Idempotency-Key` is not accepted. A token that was "
    "created with another token becomes invalid together with it.",
    responses={**returns(IssuedToken, "The token.", status=201, headers=("Location",)), **refuses(404)},
)
def create_token(
    request: Request,
    access: RequestAccess,
    principal: Caller,
    body: TokenRequest,
    idempotency_key: Annotated[str | None, Header(include_in_schema=False)] = None,
) -> Response:
    if idempotency_key is not None:
        raise RefusalError(
            400,
            "no-idempotency",
            "the secret of a token is returned only once: send the request without Idempotency-Key",
        )
    user_id = body.user_id or principal.user_id
    if not principal.may_see(user_id):
        raise RefusalError(
            403, "forbidden", "only administrators may create tokens for other users: leave out `user_id`"
        )
    days = access.settings.token_days if body.expires_in_days is None else body.expires_in_days
    token, bearer = access.tokens.issue(user_id, name=body.name, scopes=body.scopes, days=days, by=principal)
    note(request, token_id=token.token_id, user_id=user_id, scopes=" ".join(token.scopes))
    location = request.url_for("get_token", token_id=token.token_id).path
    headers = {"Location": location, "Cache-Control": "no-store"}
    issued = IssuedToken(token=bearer.text, info=token)
    return Response(msgspec.json.encode(issued), 201, headers, "application/json")


@router.get(
    "",
    summary="List tokens",
    description="Your tokens, the newest first; administrators see all tokens. Revoked and expired ones stay in "
    "the list.",
    responses={**returns(Page[Token], "A page of tokens."), **unchanged()},
)
def list_tokens(
    request: Request,
    access: RequestAccess,
    principal: Caller,
    page: Paging,
    user: Annotated[
        str | None, Query(pattern=r"^[0-9a-z]{1,64}$", description="Only tokens of this user (an id).")
    ] = None,
) -> Response:
    if user is not None and not principal.may_see(user):
        return answer(request, Page(items=(), next_cursor=None))
    owner_id = user if principal.is_admin else principal.user_id
    found = access.tokens.page(limit=page.limit + 1, owner_id=owner_id, before=page.after)
    return answer(request, page.cut(found, lambda token: token.token_id))


@router.get(
    "/{token_id}",
    summary="Read a token",
    description="Everything about the token except its secret.",
    responses={**returns(Token, "The token."), **unchanged(), **refuses(404)},
)
def get_token(request: Request, access: RequestAccess, principal: Caller, token_id: TokenId) -> Response:
    return answer(request, access.tokens.get(token_id, owner_id=_owner(principal)))


@router.post(
    "/{token_id}/revoke",
    summary="Revoke a token",
    description="The service refuses the token from now on, and all tokens and browser sessions that were created with "
    "it. Revoking it again changes nothing. A token can revoke another only if it has all scopes of that token.",
    responses={**returns(Token, "The token."), **refuses(404)},
)
def revoke_token(request: Request, access: RequestAccess, principal: Caller, token_id: TokenId) -> Response:
    return answer(request, access.tokens.revoke(token_id, owner_id=_owner(principal), by=principal))


def _owner(principal: Principal) -> str | None:
    return None if principal.is_admin else principal.user_id

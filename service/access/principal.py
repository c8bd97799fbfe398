"""Authenticated sender of a request."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from steptune.service.settings.scopes import Scope


class Method(StrEnum):
    """Method of authentication."""

    TOKEN = "token"
    SESSION = "session"
    OPEN = "open"
    """No login: the service runs with `--insecure-no-auth`."""


@dataclass(frozen=True, kw_only=True)
class Principal:
    """A user, with the permissions of one request.

    Attributes:
        scopes: Scopes of the token or session, never beyond the user's, with all scopes that they imply.
        token_id: The token that was sent, or with which the session was opened.
        expires_at: When the token or session ends; None if never.
        is_new: Whether this login has just created the user.
    """

    user_id: str
    name: str
    scopes: frozenset[Scope]
    method: Method
    token_id: str | None = None
    expires_at: datetime | None = None
    is_new: bool = False

    @property
    def is_admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    def may_see(self, owner_id: str | None) -> bool:
        """Say whether the user may see what belongs to `owner_id`; administrators see everything."""
        return self.is_admin or self.user_id == owner_id

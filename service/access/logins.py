"""Users who log in elsewhere: at a trusted proxy, or at an identity provider."""

from __future__ import annotations

from contextlib import suppress

from steptune.service.access.errors import NameTakenError, NotAuthenticatedError, NotFoundError
from steptune.service.access.first_start import FIRST_ADMIN
from steptune.service.access.open_access import LOCAL_USER
from steptune.service.access.principal import Method, Principal
from steptune.service.access.users import User, UserStore
from steptune.service.settings.access import AccessSettings
from steptune.service.settings.scopes import implied, parse_scopes
from steptune.tuner.errors import ChoiceError

OWN_NAMES = (LOCAL_USER, FIRST_ADMIN)
"""Names of the service's own users: an identical name from a proxy or provider must not match them."""


def principal_named(users: UserStore, settings: AccessSettings, name: str) -> Principal:
    """Return the user whom a proxy or provider calls `name`; the user is created on the first login if the settings
    allow it.

    Raises:
        NotAuthenticatedError: There is no such user, they are disabled, or the name is the service's own.
    """
    if name in OWN_NAMES:
        raise NotAuthenticatedError(
            f"the name {name!r} is reserved for the service: log in with a token", token_sent=True
        )
    user, is_new = _user_named(users, settings, name)
    return principal_of(user, is_new=is_new)


def principal_of(user: User, *, is_new: bool = False) -> Principal:
    """Return the principal of a user who logs in without a token.

    Raises:
        NotAuthenticatedError: The user is disabled.
    """
    if user.disabled_at is not None:
        raise NotAuthenticatedError("the user is disabled: ask an administrator", token_sent=True)
    return Principal(
        user_id=user.user_id,
        name=user.name,
        scopes=implied(parse_scopes(" ".join(user.scopes))),
        method=Method.SESSION,
        is_new=is_new,
    )


def _user_named(users: UserStore, settings: AccessSettings, name: str) -> tuple[User, bool]:
    """Return the user, and whether this login created the user."""
    with suppress(NotFoundError):
        return users.named(name), False
    if not settings.new_user_scopes.strip():
        raise NotAuthenticatedError(
            f"no user is called {name!r}: ask an administrator to create one with `steptune user create`",
            token_sent=True,
        )
    try:
        with suppress(NameTakenError):  # another request of theirs was faster
            return users.create(name, parse_scopes(settings.new_user_scopes)), True
    except ChoiceError as error:
        raise NotAuthenticatedError(str(error), token_sent=True) from error
    return users.named(name), False

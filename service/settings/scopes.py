"""Scopes of a token, a session or a user."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from steptune.tuner.errors import ChoiceError


class Scope(StrEnum):
    """A permission. `ADMIN` implies all others; the others imply nothing.

    No operation asks for `WORKER` yet: workers use the database and the artifacts themselves.
    """

    READ = "read"
    SUBMIT = "submit"
    WORKER = "worker"
    ADMIN = "admin"


ALL_SCOPES = frozenset(Scope)


def implied(scopes: Iterable[Scope]) -> frozenset[Scope]:
    """Return the scopes together with all that they imply."""
    given = frozenset(scopes)
    return ALL_SCOPES if Scope.ADMIN in given else given


def parse_scopes(text: str) -> frozenset[Scope]:
    """Parse scopes from a text like "read submit", separated by spaces or commas.

    Raises:
        ChoiceError: A scope does not exist, or the text is empty.
    """
    words = text.replace(",", " ").split()
    unknown = sorted(set(words) - {scope.value for scope in Scope})
    if unknown or not words:
        found = f"{', '.join(map(repr, unknown))} is no scope" if unknown else "at least one scope is required"
        raise ChoiceError(f"{found}: name some of {', '.join(Scope)}")
    return frozenset(map(Scope, words))


def scopes_text(scopes: Iterable[Scope]) -> str:
    """Write scopes in the form that `parse_scopes` reads, from the least powerful to the most powerful."""
    given = frozenset(scopes)
    return " ".join(scope for scope in Scope if scope in given)

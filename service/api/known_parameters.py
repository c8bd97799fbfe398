"""Refusal of unknown and repeated query parameters: a mistyped filter must not mean "everything", and one of two values
must not be dropped silently.

`steptune.service.api.security.Requires` depends on it, after authentication; operations without authentication name it
themselves.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

_MAX_SHOWN = 5


async def check_query(request: Request) -> None:
    """Refuse unknown parameters, with the names of the known ones, and parameters given twice, of which only one value
    would count.

    Raises:
        RequestValidationError: There are such parameters; it has one error for each.
    """
    if not request.scope["query_string"]:
        return
    route: APIRoute = request.scope["route"]
    known = set(_names(route.dependant))
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        raise RequestValidationError([_mistake(name, known) for name in unknown[:_MAX_SHOWN]])
    names = [name for name, _ in request.query_params.multi_items()]
    repeated = [name for name in known if names.count(name) > 1]
    if repeated:
        raise RequestValidationError([_repeated(name) for name in sorted(repeated)])


def _names(needed: Dependant) -> Iterator[str]:
    """Yield the names of the parameters that an endpoint and its dependencies take."""
    yield from (field.alias for field in needed.query_params)
    for inner in needed.dependencies:
        yield from _names(inner)


def _repeated(name: str) -> dict[str, Any]:
    return {"type": "too_long", "loc": ("query", name), "msg": "this parameter may be given only once"}


def _mistake(name: str, known: set[str]) -> dict[str, Any]:
    offered = ", ".join(sorted(known)) or "none"
    meant = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {meant[0]}?" if meant else ""
    return {
        "type": "extra_forbidden",
        "loc": ("query", name[:100]),
        "msg": f"unknown parameter; the known ones are: {offered}{hint}",
    }

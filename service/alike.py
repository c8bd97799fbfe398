"""Copying of fields with the same names between rows, records and messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from steptune.tuner.records import Record

AnyRecord = TypeVar("AnyRecord", bound=Record)
_ABSENT = object()


def shared(names: Iterable[str], sources: Iterable[object], given: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the named fields: the given value, else the value of the first source with such a field."""
    values = dict(given)
    for source in sources:
        for name in names:
            if name not in values and (value := getattr(source, name, _ABSENT)) is not _ABSENT:
                values[name] = value
    return values


def record_like(kind: type[AnyRecord], *sources: object, **given: Any) -> AnyRecord:
    """Build a record from the fields with the same names in the sources; given values take precedence."""
    return kind(**shared(kind.__struct_fields__, sources, given))
